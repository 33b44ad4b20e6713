// Number formats on the way: rows that are quantised inside dispatch, and results inside combine.
// What one conversion gives is proven elsewhere (unit/format); here every row must arrive as exactly
// that, and sums must be those of the definition.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/expected.hpp"
#include "unit/format/rows.hpp"

namespace wherry::test {
namespace {

using ::testing::HasSubstr;

// Rows that are converted already, as dispatch takes them.
ConstTensorView view_of(const Wired& rows, std::int64_t count) {
  const bool quantised = rows.format.quantised();
  return {rows.payload.data(), quantised ? DType::raw : DType::bf16, count,
          quantised ? rows.format.payload_bytes : rows.format.hidden};
}

// The scales of one received row, as quantize_row() lays them out.
std::vector<std::byte> scales_of(const Received& received, std::int64_t row) {
  const WireFormat& format = received.wire;
  std::vector<std::byte> scales(static_cast<std::size_t>(format.scale_bytes));
  const auto take = [&](std::int64_t to, std::int64_t from, std::int64_t bytes) {
    std::memcpy(scales.data() + to, static_cast<const std::byte*>(received.scales) + from,
                static_cast<std::size_t>(bytes));
  };
  const std::int64_t each = format.scale_type == ScaleType::f32 ? 4 : 1;
  for (std::int64_t b = 0; b < format.num_blocks; ++b) {
    take(b * each, scale_offset(format, received.scale_rows, row, b), each);
  }
  if (format.scale_type == ScaleType::e4m3_f32) {
    take(format.scale_bytes - 4, row_scale_offset(format, received.scale_rows, row), 4);
  }
  return scales;
}

// Every received row belongs to some token: its payload and its scales are that token's, converted.
template <typename T>
void expect_converted_rows(const Exchange& exchange, const Batch& batch, const Received& received) {
  const WireFormat& format = received.wire;
  std::vector<std::vector<std::byte>> payloads;
  std::vector<std::vector<float>> values;
  payloads.reserve(static_cast<std::size_t>(batch.tokens()));
  values.reserve(payloads.capacity());
  for (std::int64_t t = 0; t < batch.tokens(); ++t) {
    std::vector<T> x = row_of<T>(batch, t);
    const auto alone = wire_format(format.wire, format.dtype, batch.hidden);
    payloads.push_back(wired(alone, x).payload);
    values.push_back(after_travel<float>(alone, x));
  }
  WireFormat wide = format;
  wide.dtype = DType::f32;
  std::vector<float> worth(static_cast<std::size_t>(batch.hidden));
  const auto check = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::span payload(received.rows.row<std::byte>(row),
                              static_cast<std::size_t>(format.payload_bytes));
      dequantize_row(wide, payload.data(), scales_of(received, row).data(), worth.data());
      std::size_t token = 0;
      while (token < values.size() &&
             !(std::ranges::equal(payload, payloads[token]) && worth == values[token])) {
        ++token;
      }
      expect(token < values.size(), fmt::format("row {} is no token", row));
    }
  };
  if (exchange.config().layout == Layout::tokens) return check(0, received.rows.rows);
  for (std::size_t s = 0; s < received.slot_counts.size(); ++s) {
    check(received.slot_begin[s], received.slot_begin[s] + received.slot_counts[s]);
  }
}

// plan, dispatch (rows as they travel, then converted back), experts, combine; verified.
template <typename T>
void run_and_verify_wired(Group& group, const Batch& batch, ExchangeConfig config) {
  config.dtype = Codec<T>::dtype;
  Exchange exchange(group, config);
  const int rank = group.rank();
  Plan plan = exchange.make_plan();
  exchange.plan(batch.routing_of(rank), plan);
  std::vector<T> x = tokens_of<T>(batch, rank);
  std::vector<T> out(x.size());
  const Received wire_rows = exchange.dispatch(plan, view(x, batch.hidden));
  expect_converted_rows<T>(exchange, batch, wire_rows);
  exchange.release(wire_rows);

  const std::int64_t rows = wire_rows.rows.rows;
  std::vector<T> mine(static_cast<std::size_t>(rows * batch.hidden));
  std::vector<T> y(mine.size());
  const Received received =
      exchange.dispatch(plan, view(x, batch.hidden), {.out = view(mine, batch.hidden)});
  expect(received.rows.dtype == Codec<T>::dtype && received.scales == nullptr, "converted back");
  apply_experts<T>(exchange, received, view(y, batch.hidden));
  exchange.combine(plan, view(y, batch.hidden), view(out, batch.hidden));
  const auto expert_of = [&](int slot) {
    return exchange.placement().slot_to_expert()[static_cast<std::size_t>(slot)];
  };
  for (std::int64_t t = 0; t < batch.tokens_of(rank); ++t) {
    const std::int64_t token = batch.token_begin[static_cast<std::size_t>(rank)] + t;
    const std::vector<T> want = Expected<T>(config, row_of<T>(batch, token))
                                    .sums(choices_of(config, plan.to_host(), t, expert_of));
    const std::span got(out.data() + t * batch.hidden, want.size());
    expect(std::ranges::equal(std::as_bytes(std::span(want)), std::as_bytes(got)),
           fmt::format("rank {}, token {} differs", rank, token));
  }
  const Traffic traffic = exchange.traffic();
  expect(traffic.dispatch_bytes == traffic.dispatch_rows * wire_rows.wire.row_bytes(),
         "bytes of the wire, scales included");
}

struct WiredPair {
  Layout layout;
  Reduction reduction;
};
constexpr WiredPair kWiredPairs[] = {{Layout::grouped, Reduction::by_token},
                                     {Layout::grouped, Reduction::by_rank},
                                     {Layout::tokens, Reduction::by_rank},
                                     {Layout::slots, Reduction::by_token},
                                     {Layout::slots, Reduction::by_rank}};

class EveryWire : public testing::TestWithParam<Wire> {};
INSTANTIATE_TEST_SUITE_P(Exchange, EveryWire, testing::ValuesIn(kQuantisedWires),
                         [](const auto& wire) { return std::string(name(wire.param)); });

TEST_P(EveryWire, GoesOutAndHomeInEveryLegalPair) {
  const Batch batch = make_batch(19, 3, 7, 3, 200, 81, 0.2);
  for (const WiredPair& pair : kWiredPairs) {
    SCOPED_TRACE(fmt::format("{} {}", name(pair.layout), name(pair.reduction)));
    ExchangeConfig config = config_for(batch);
    config.layout = pair.layout;
    config.reduction = pair.reduction;
    config.dispatch_wire = GetParam();
    config.combine_wire = GetParam();
    EXPECT_NO_THROW(run_threads(3, [&](Group& group) {
      run_and_verify_wired<Bf16>(group, batch, config);
      run_and_verify_wired<float>(group, batch, config);
    }));
  }
}

TEST_P(EveryWire, TakesAnyHiddenSize) {
  for (const std::int64_t hidden : {1, 15, 33, 129, 257}) {
    SCOPED_TRACE(hidden);
    const Batch batch = make_batch(9, 2, 5, 2, hidden, 88);
    ExchangeConfig config = config_for(batch);
    config.dispatch_wire = GetParam();
    config.combine_wire = GetParam();
    EXPECT_NO_THROW(
        run_threads(2, [&](Group& group) { run_and_verify_wired<Bf16>(group, batch, config); }));
  }
}

TEST_P(EveryWire, CarriesItsScalesInEveryLayoutTheyHave) {
  const Batch batch = make_batch(19, 3, 7, 3, 400, 82);
  for (const ScaleLayout scale_layout :
       {ScaleLayout::row_major, ScaleLayout::column_major, ScaleLayout::packed_ue8m0}) {
    try {
      static_cast<void>(wire_format(GetParam(), DType::bf16, batch.hidden, scale_layout));
    } catch (const Error&) {
      continue;  // not a power of two
    }
    SCOPED_TRACE(std::string(name(scale_layout)));
    ExchangeConfig config = config_for(batch);
    config.dispatch_wire = GetParam();
    config.scale_layout = scale_layout;
    EXPECT_NO_THROW(
        run_threads(3, [&](Group& group) { run_and_verify_wired<Bf16>(group, batch, config); }));
  }
}

TEST_P(EveryWire, PassesThroughRowsThatTheCallerHasConverted) {
  const Batch batch = make_batch(19, 2, 7, 3, 200, 83);
  ExchangeConfig config = config_for(batch);
  config.dispatch_wire = GetParam();
  config.scale_layout = ScaleLayout::column_major;
  run_threads(2, [&](Group& group) {
    Exchange exchange(group, config);
    Plan plan = exchange.make_plan();
    exchange.plan(batch.routing_of(group.rank()), plan);
    std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
    const auto format = wire_format(GetParam(), DType::bf16, 200, ScaleLayout::column_major);
    const Wired converted = wired(format, x);
    const Received r = exchange.dispatch(plan, view_of(converted, plan.tokens()),
                                         {.x_scales = converted.scales.data()});
    expect_converted_rows<Bf16>(exchange, batch, r);
  });
}

TEST(Wires, OtherDTypesOnTheWayRoundOnce) {
  const Batch batch = make_batch(19, 3, 7, 3, 24, 84, 0.2);
  for (const WiredPair& pair : kWiredPairs) {
    ExchangeConfig config = config_for(batch);
    config.layout = pair.layout;
    config.reduction = pair.reduction;
    config.dispatch_wire = Wire::bf16;
    config.combine_wire = Wire::f16;
    EXPECT_NO_THROW(
        run_threads(3, [&](Group& group) { run_and_verify_wired<float>(group, batch, config); }));
    config.dispatch_wire = Wire::f32;
    config.combine_wire = Wire::f32;
    EXPECT_NO_THROW(
        run_threads(3, [&](Group& group) { run_and_verify_wired<Bf16>(group, batch, config); }));
  }
}

TEST(Wires, ByTokenGivesTheSameBitsForAnyNumberOfRanks) {
  ExchangeConfig config;
  std::vector<std::vector<Bf16>> outputs;
  for (const int ranks : {1, 2, 4}) {
    const Batch batch = make_batch(24, ranks, 8, 3, 256, 85);
    config = config_for(batch);
    config.dispatch_wire = Wire::e4m3_block128;
    config.combine_wire = Wire::e4m3_block128;
    std::vector<Bf16>& all = outputs.emplace_back(static_cast<std::size_t>(24 * 256));
    run_threads(ranks, [&](Group& group) {
      Exchange exchange(group, config);
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
      std::vector<Bf16> mine(
          static_cast<std::size_t>(plan.to_host().slot_begin.back() * batch.hidden));
      std::vector<Bf16> y(mine.size());
      const Received r = exchange.dispatch(plan, view(x, 256), {.out = view(mine, 256)});
      apply_experts<Bf16>(exchange, r, view(y, 256));
      TensorView out = view(x, 256);
      out.data = all.data() + batch.token_begin[static_cast<std::size_t>(group.rank())] * 256;
      exchange.combine(plan, view(y, 256), out);
    });
  }
  for (const auto& other : outputs) {
    EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(other)),
                                   std::as_bytes(std::span(outputs.front()))));
  }
}

TEST(Wires, PaddingRowsAndTheirScalesAreZero) {
  const Batch batch = make_batch(11, 2, 4, 2, 200, 86);
  ExchangeConfig config = config_for(batch);
  config.alignment = 8;
  for (const ScaleLayout scale_layout : {ScaleLayout::row_major, ScaleLayout::packed_ue8m0}) {
    config.dispatch_wire = Wire::e4m3_block128_pow2;
    config.scale_layout = scale_layout;
    run_threads(2, [&](Group& group) {
      Exchange exchange(group, config);
      for (int repeat = 0; repeat < 2; ++repeat) {
        Plan plan = exchange.make_plan();
        exchange.plan(batch.routing_of(group.rank()), plan);
        std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
        const Received r = exchange.dispatch(plan, view(x, 200));
        for (std::size_t s = 0; s < r.slot_counts.size(); ++s) {
          for (std::int64_t row = r.slot_begin[s] + r.slot_counts[s]; row < r.slot_begin[s + 1];
               ++row) {
            for (std::int64_t i = 0; i < r.wire.payload_bytes; ++i) {
              expect(r.rows.row<std::uint8_t>(row)[i] == 0, "a padding row has a payload");
            }
            for (std::int64_t b = 0; b < r.wire.num_blocks; ++b) {
              const auto* at = static_cast<const std::uint8_t*>(r.scales) +
                               scale_offset(r.wire, r.scale_rows, row, b);
              expect(*at == 0, "a padding row has a scale");
            }
          }
        }
        // What an earlier step may have left there.
        std::memset(r.rows.data, 0xFF, static_cast<std::size_t>(r.rows.rows * r.rows.pitch()));
        std::memset(const_cast<void*>(r.scales), 0xFF,
                    static_cast<std::size_t>(scale_plane_bytes(r.wire, r.scale_rows)));
        exchange.release(r);
      }
    });
  }
}

// The message of the Error that `call` must throw on rank 0.
template <typename Call>
std::string refusal(ErrorCode code, const ExchangeConfig& config, const Batch& batch, Call call) {
  std::string message;
  run_threads(1, [&](Group& group) {
    try {
      Exchange exchange(group, config);
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(0), plan);
      call(exchange, plan);
    } catch (const Error& error) {
      message = error.what();
      expect(error.code() == code, message);
    }
  });
  return message;
}

TEST(Wires, WhatDoesNotFitIsRefusedWithWhatIsAllowed) {
  const Batch batch = make_batch(5, 1, 4, 2, 200, 87);
  const auto nothing = [](Exchange&, Plan&) {};
  ExchangeConfig config = config_for(batch, DType::f64);
  config.dispatch_wire = Wire::nvfp4;
  EXPECT_THAT(refusal(ErrorCode::bad_argument, config, batch, nothing),
              HasSubstr("dispatch_wire is nvfp4"));
  config = config_for(batch);
  config.scale_layout = ScaleLayout::packed_ue8m0;
  config.dispatch_wire = Wire::e4m3_block128;
  EXPECT_THAT(refusal(ErrorCode::bad_argument, config, batch, nothing), HasSubstr("packed_ue8m0"));
  config = config_for(batch);
  config.reduction = Reduction::by_rank;
  config.combine_wire = Wire::mxfp8_e4m3;
  config.sum_at = SumAt::home;
  EXPECT_THAT(refusal(ErrorCode::bad_argument, config, batch, nothing), HasSubstr("sum_at expert"));
  config = config_for(batch);
  config.combine_wire = Wire::e4m3_block128;
  EXPECT_THAT(refusal(ErrorCode::unsupported, config, batch,
                      [&](Exchange& exchange, Plan& plan) {
                        std::vector<Bf16> x = tokens_of<Bf16>(batch, 0);
                        static_cast<void>(exchange.dispatch(plan, view(x, 200)));
                        static_cast<void>(exchange.combine_input(plan));
                      }),
              HasSubstr("memory of your own"));
  config = config_for(batch);
  config.dispatch_wire = Wire::e4m3_block128;
  EXPECT_THAT(refusal(ErrorCode::bad_argument, config, batch,
                      [&](Exchange& exchange, Plan& plan) {
                        std::vector<Bf16> x = tokens_of<Bf16>(batch, 0);
                        const Wired w =
                            wired(wire_format(Wire::e4m3_block128, DType::bf16, 200), x);
                        static_cast<void>(exchange.dispatch(plan, view_of(w, 5)));
                      }),
              HasSubstr("x_scales is null"));
  EXPECT_THAT(refusal(ErrorCode::bad_argument, config, batch,
                      [&](Exchange& exchange, Plan& plan) {
                        std::vector<Bf16> x = tokens_of<Bf16>(batch, 0);
                        ConstTensorView v = view(x, 200);
                        v.dtype = DType::raw;
                        v.cols = 199;
                        static_cast<void>(exchange.dispatch(plan, v, {.x_scales = x.data()}));
                      }),
              HasSubstr("raw [5, 200]"));
}

}  // namespace
}  // namespace wherry::test
