// Every mistake is a typed error that names what was wrong and says what is allowed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "routed.hpp"

namespace {

using testing::AllOf;
using testing::HasSubstr;
using wherry::ErrorCode;
using wherry::RouterConfig;
using wherry::RouterInput;
using wherry::Score;
using wherry::Selection;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string config_error(const RouterConfig& config) {
  return message_of(ErrorCode::bad_argument, [&] { config.check(); });
}
std::string route_error(const RouterConfig& config, const RouterInput& input,
                        ErrorCode code = ErrorCode::bad_argument) {
  return message_of(code, [&] { (void)routed(config, input); });
}

TEST(RouterErrors, AConfigurationSaysWhichFieldAndWhatIsAllowed) {
  EXPECT_EQ(config_error({.experts = 0, .topk = 1}), "experts is 0; allowed: 1 or more");
  EXPECT_EQ(config_error({.experts = 4, .topk = 0}), "topk is 0; allowed: 1 or more");
  EXPECT_THAT(config_error({.experts = 4, .topk = 5}), HasSubstr("topk is 5; allowed: 1 to 4"));
  EXPECT_THAT(config_error({.experts = 4, .topk = 1, .scale = kNaN}), HasSubstr("scale is nan"));
  EXPECT_THAT(config_error({.experts = 4, .topk = 2, .weight_on_input = true}),
              HasSubstr("allowed: topk 1"));
  EXPECT_THAT(config_error({.experts = 4, .topk = 2, .selection = Selection::hash, .bias = true}),
              HasSubstr("only with 'topk'"));
}

TEST(RouterErrors, EmptyGroupsAreRefused) {
  EXPECT_EQ(config_error({.experts = 4, .topk = 1, .groups = 5}),
            "groups is 5; allowed: 1 to 4 (experts), so that no group is empty");
  EXPECT_THAT(config_error({.experts = 4, .topk = 1, .groups = 0}), HasSubstr("groups is 0"));
  EXPECT_THAT(config_error({.experts = 10, .topk = 1, .groups = 4}),
              HasSubstr("allowed: a divisor of 10"));
  EXPECT_THAT(config_error({.experts = 8, .topk = 1, .groups = 4, .groups_kept = 0}),
              HasSubstr("groups_kept is 0; allowed: 1 to 4"));
  EXPECT_THAT(config_error({.experts = 8, .topk = 1, .groups = 4, .groups_kept = 5}),
              HasSubstr("groups_kept is 5; allowed: 1 to 4"));
}

TEST(RouterErrors, TopkMayNotExceedWhatTheKeptGroupsHold) {
  EXPECT_EQ(config_error({.experts = 32, .topk = 9, .groups = 8, .groups_kept = 2}),
            "topk is 9; allowed: 1 to 8 (groups_kept 2 of 4 experts each)");
}

TEST(RouterErrors, ALogitWithoutAScoreIsNamedByTokenAndExpert) {
  for (const Score score :
       {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::topk_softmax}) {
    const RouterConfig config{.experts = 3, .topk = 1, .score = score};
    std::vector<float> logits{1, 2, 3, 4, 5, 6};
    logits[5] = kNaN;
    EXPECT_EQ(route_error(config, {.tokens = 2, .logits = logits}),
              "the logit of token 1, expert 2 is nan; allowed: finite values and -inf");
    logits[5] = kInfinity;
    EXPECT_THAT(route_error(config, {.tokens = 2, .logits = logits}),
                HasSubstr("token 1, expert 2 is inf"));
    logits[3] = logits[4] = logits[5] = -kInfinity;
    EXPECT_THAT(route_error(config, {.tokens = 2, .logits = logits}),
                AllOf(HasSubstr("token 1"), HasSubstr("at least one finite")));
  }
}

TEST(RouterErrors, WrongLengthsNameTheSpanAndBothLengths) {
  const RouterConfig config{.experts = 3, .topk = 1};
  const std::vector<float> five(5, 0.0F);
  const std::vector<float> six(6, 0.0F);
  EXPECT_EQ(route_error(config, {.tokens = 2, .logits = five}),
            "logits holds 5 values; expected 2 x 3");
  EXPECT_THAT(route_error(config, {.tokens = 2, .logits = six, .bias = five}),
              HasSubstr("bias holds 5 values; expected 0 x 3"));
  RouterConfig biased = config;
  biased.bias = true;
  EXPECT_THAT(route_error(biased, {.tokens = 2, .logits = six}),
              HasSubstr("bias holds 0 values; expected 1 x 3"));
  EXPECT_THAT(
      message_of(ErrorCode::bad_argument, [&] { wherry::route(config, {.tokens = -1}, {}, {}); }),
      HasSubstr("tokens is -1"));
  std::vector<std::int32_t> ids(2);
  std::vector<float> weights(1);
  EXPECT_THAT(
      message_of(ErrorCode::bad_argument,
                 [&] { wherry::route(config, {.tokens = 2, .logits = six}, ids, weights); }),
      HasSubstr("weights (output) holds 1 values; expected 2 x 1"));
  EXPECT_THAT(message_of(ErrorCode::bad_argument,
                         [&] {
                           wherry::route(config, {.tokens = std::int64_t{1} << 62, .logits = six},
                                         ids, weights);
                         }),
              HasSubstr("logits holds 6 values"));
}

TEST(RouterErrors, ABiasThatIsNotFiniteIsRefused) {
  const RouterConfig config{.experts = 2, .topk = 1, .bias = true};
  const std::vector<float> logits{0, 0};
  const std::vector<float> bias{0, kNaN};
  EXPECT_EQ(route_error(config, {.tokens = 1, .logits = logits, .bias = bias}),
            "the bias of expert 1 is nan; allowed: finite values");
}

TEST(RouterErrors, GivenAndHashedIdsOutOfRangeAreBadRouting) {
  RouterConfig config{.experts = 4, .topk = 2, .selection = Selection::given};
  const std::vector<float> logits(8, 0.0F);
  const std::vector<std::int32_t> ids{0, 1, 2, 4};
  EXPECT_EQ(
      route_error(config, {.tokens = 2, .logits = logits, .ids = ids}, ErrorCode::bad_routing),
      "token 1, choice 1 names expert 4; allowed: -1 (none) to 3");
  config.selection = Selection::hash;
  const std::vector<std::int64_t> token_ids{0, 1};
  EXPECT_EQ(route_error(config,
                        {.tokens = 2, .logits = logits, .token_ids = token_ids, .hash_table = ids},
                        ErrorCode::bad_routing),
            "hash_table row 1, choice 1 names expert 4; allowed: -1 (none) to 3");
}

TEST(RouterErrors, ATokenIdBeyondTheTableIsNamed) {
  const RouterConfig config{.experts = 4, .topk = 2, .selection = Selection::hash};
  const std::vector<float> logits(8, 0.0F);
  const std::vector<std::int32_t> table{0, 1, 2, 3};
  std::vector<std::int64_t> token_ids{0, 2};
  EXPECT_EQ(
      route_error(config,
                  {.tokens = 2, .logits = logits, .token_ids = token_ids, .hash_table = table}),
      "token 1 has id 2 in the vocabulary; allowed: 0 to 1 (rows of hash_table)");
  token_ids[1] = -3;
  EXPECT_THAT(route_error(config, {.tokens = 2, .logits = logits, .token_ids = token_ids}),
              HasSubstr("token 1 has id -3 in the vocabulary; allowed: 0 or more"));
  EXPECT_THAT(route_error(config, {.tokens = 2,
                                   .logits = logits,
                                   .token_ids = token_ids,
                                   .hash_table = std::span(table).first(3)}),
              HasSubstr("hash_table holds 3 values; expected a multiple of 2"));
}

TEST(CapacityErrors, SayWhatIsAllowed) {
  const RouterConfig config{.experts = 2, .topk = 1};
  const auto capacity = [&](double factor, std::int64_t minimum) {
    return message_of(ErrorCode::bad_argument, [&] {
      (void)wherry::expert_capacity(config, 4, {.factor = factor, .minimum = minimum});
    });
  };
  EXPECT_THAT(capacity(0.0, 0), HasSubstr("capacity factor is 0; allowed"));
  EXPECT_THAT(capacity(std::nan(""), 0), HasSubstr("capacity factor is nan"));
  EXPECT_THAT(capacity(1e300, 0), HasSubstr("does not fit"));
  EXPECT_THAT(capacity(1.0, -1), HasSubstr("minimum capacity is -1; allowed"));

  std::vector<std::int32_t> ids{0, 1};
  std::vector<float> weights{1.0F, kNaN};
  const auto drop = [&](std::int64_t room, wherry::DropPolicy policy, ErrorCode code) {
    return message_of(code,
                      [&] { wherry::drop_over_capacity(config, room, policy, ids, weights); });
  };
  EXPECT_THAT(drop(-1, wherry::DropPolicy::position, ErrorCode::bad_argument),
              HasSubstr("capacity is -1"));
  EXPECT_THAT(drop(1, wherry::DropPolicy::probs, ErrorCode::bad_argument),
              HasSubstr("the weight of token 1, choice 0 (expert 1) is NaN"));
  EXPECT_EQ(drop(1, wherry::DropPolicy::position, ErrorCode::bad_argument), "nothing was thrown");
  ids[0] = 2;
  EXPECT_THAT(drop(1, wherry::DropPolicy::position, ErrorCode::bad_routing),
              HasSubstr("token 0, choice 0 names expert 2"));
}

TEST(LossErrors, SayWhatIsAllowed) {
  const RouterConfig config{.experts = 2, .topk = 1};
  std::vector<float> logits{0, 0, 0, 0};
  std::vector<std::int32_t> ids{0, 1};
  std::vector<float> grad(3);
  const wherry::BalanceInput input{.tokens = 2, .logits = logits, .ids = ids};
  const auto error = [](auto call) { return message_of(ErrorCode::bad_argument, call); };
  EXPECT_THAT(error([&] { wherry::topk_loss(config, input, grad); }),
              HasSubstr("grad_logits holds 3 values; expected 2 x 2"));
  const auto sequence = [&](std::vector<std::int64_t> begin) {
    return error([&] { wherry::sequence_loss(config, input, begin); });
  };
  EXPECT_THAT(sequence({}), HasSubstr("from 0 to 2"));
  EXPECT_THAT(sequence({0, 1}), HasSubstr("from 0 to 2 (tokens); it holds [0, 1]"));
  EXPECT_THAT(sequence({0, 3, 2}), HasSubstr("sequence_begin[2] is 2, below the 3 before it"));
  EXPECT_THAT(
      error([&] { wherry::global_batch_loss(config, input, std::vector<std::int64_t>{1, 1}, 1); }),
      HasSubstr("global_tokens is 1; allowed: 2"));
  logits[3] = kNaN;
  EXPECT_THAT(error([&] { wherry::z_loss(config, input); }), HasSubstr("token 1, expert 1 is nan"));
  EXPECT_THAT(error([&] { wherry::topk_loss(config, input); }),
              HasSubstr("token 1, expert 1 is nan"));
}

TEST(BiasErrors, NegativeCountsAndWrongLengthsAreRefused) {
  std::vector<float> bias(2);
  const auto error = [&](std::vector<std::int64_t> counts, float rate) {
    return message_of(ErrorCode::bad_argument, [&] { wherry::update_bias(counts, rate, bias); });
  };
  EXPECT_EQ(error({3, -1}, 0.1F), "the count of expert 1 is -1; allowed: 0 or more");
  EXPECT_THAT(error({3}, 0.1F), HasSubstr("bias holds 2 values; expected 1 x 1"));
  EXPECT_THAT(error({3, 1}, kNaN), HasSubstr("rate is nan"));
}

}  // namespace
