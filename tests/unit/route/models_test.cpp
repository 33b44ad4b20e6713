// The presets: complete, consistent, and found by name.
#include "route/models.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "routed.hpp"

namespace {

using testing::HasSubstr;
using wherry::Model;
using wherry::Score;
using wherry::Selection;

TEST(Models, EveryPresetHasAValidRouterAndAUniqueName) {
  std::set<std::string_view> names;
  for (const Model& model : wherry::models()) {
    EXPECT_TRUE(names.insert(model.name).second) << model.name;
    EXPECT_EQ(&wherry::find_model(model.name), &model);
    EXPECT_GT(model.hidden, 0) << model.name;
    EXPECT_GT(model.expert_hidden, 0) << model.name;
    EXPECT_NO_THROW(wherry::router_config(model).check()) << model.name;
    if (model.hash_layers > 0) {
      EXPECT_NO_THROW(wherry::router_config(model, true).check()) << model.name;
    }
  }
  EXPECT_EQ(names.size(), 15U);
}

TEST(Models, AnUnknownNameListsTheKnownOnes) {
  const std::string message =
      message_of(wherry::ErrorCode::bad_argument, [] { (void)wherry::find_model("deepseek-v2"); });
  EXPECT_THAT(message, HasSubstr("no model 'deepseek-v2'; known: "));
  for (const Model& model : wherry::models()) {
    EXPECT_THAT(message, HasSubstr(std::string(model.name)));
  }
}

TEST(Models, DeepSeekV3IsGroupLimitedWithABias) {
  const Model& model = wherry::find_model("deepseek-v3");
  EXPECT_EQ(model.hidden, 7168);
  EXPECT_EQ(model.expert_hidden, 2048);
  EXPECT_EQ(model.shared, 1);
  EXPECT_TRUE(model.verified);
  EXPECT_EQ(wherry::router_config(model), (wherry::RouterConfig{.experts = 256,
                                                                .topk = 8,
                                                                .score = Score::sigmoid,
                                                                .groups = 8,
                                                                .groups_kept = 4,
                                                                .bias = true,
                                                                .normalize = true,
                                                                .scale = 2.5F}));
}

TEST(Models, TheFirstLayersOfDeepSeekV4HashWithoutABias) {
  const Model& model = wherry::find_model("deepseek-v4-flash");
  EXPECT_EQ(model.hash_layers, 3);
  const wherry::RouterConfig hash = wherry::router_config(model, true);
  EXPECT_EQ(hash.selection, Selection::hash);
  EXPECT_FALSE(hash.bias);
  EXPECT_EQ(hash.scale, 1.5F);
  EXPECT_TRUE(wherry::router_config(model).bias);
  EXPECT_THAT(message_of(wherry::ErrorCode::bad_argument,
                         [] { (void)wherry::router_config(wherry::find_model("glm-4.5"), true); }),
              HasSubstr("glm-4.5 has no layers"));
}

TEST(Models, Llama4WeighsTheInputOfItsOneExpert) {
  for (const char* name : {"llama4-maverick", "llama4-scout"}) {
    const wherry::RouterConfig config = wherry::router_config(wherry::find_model(name));
    EXPECT_EQ(config.topk, 1);
    EXPECT_TRUE(config.weight_on_input);
    EXPECT_EQ(config.score, Score::sigmoid);
    EXPECT_FALSE(config.normalize);
  }
}

}  // namespace
