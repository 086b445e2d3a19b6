#include "expert_worker/engine/batch_groups.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

namespace tandem::expert {
namespace {

using Part = BatchGroups::Part;
using Pick = std::tuple<uint32_t, uint32_t, uint32_t, float>;  // expert, row, target, weight

constexpr uint32_t kTopK = 2;

struct Picks {
  std::vector<uint16_t> ids;
  std::vector<uint8_t> deferred = {};
  std::vector<float> weights = {};

  shm::ExpertBatch Batch() {
    for (size_t i = 0; i < ids.size(); ++i) weights.push_back(static_cast<float>(i));
    return {.rows = static_cast<uint32_t>(ids.size()) / kTopK,
            .top_k = kTopK,
            .ids = ids.data(),
            .weights = weights.data(),
            .deferred = deferred.empty() ? nullptr : deferred.data()};
  }
};

std::vector<Pick> Grouped(const BatchGroups& groups) {
  std::vector<Pick> out;
  for (const BatchGroups::Group& group : groups.groups()) {
    for (uint32_t p = group.begin; p < group.begin + group.count; ++p) {
      out.emplace_back(group.expert, groups.rows()[p], groups.targets()[p], groups.weights()[p]);
    }
  }
  EXPECT_EQ(out.size(), groups.picks());
  return out;
}

TEST(BatchGroups, SortsByExpertAndSkipsIdsBeyond) {
  BatchGroups groups;
  groups.Configure(4, 8, kTopK);
  Picks picks{.ids = {3, 1, 1, shm::kNoExpert, 4, 3}};
  groups.Assign(picks.Batch(), Part::kImmediate);
  EXPECT_EQ(Grouped(groups),
            (std::vector<Pick>{{1, 0, 0, 1}, {1, 1, 1, 2}, {3, 0, 0, 0}, {3, 2, 2, 5}}));
  EXPECT_EQ(groups.outputs(), 3u);
  EXPECT_EQ(groups.position(0), 2u);
  EXPECT_EQ(groups.position(3), BatchGroups::kSkipped);
  EXPECT_EQ(groups.position(4), BatchGroups::kSkipped);
}

TEST(BatchGroups, PartsAreThePicksThatAreDeferredAndTheOthers) {
  BatchGroups groups;
  groups.Configure(4, 8, kTopK);
  Picks picks{.ids = {3, 1, 1, 3}, .deferred = {0, 1, 0, 1}};
  const shm::ExpertBatch batch = picks.Batch();
  groups.Assign(batch, Part::kImmediate);
  EXPECT_EQ(Grouped(groups), (std::vector<Pick>{{1, 1, 1, 2}, {3, 0, 0, 0}}));
  EXPECT_EQ(groups.outputs(), 2u);
  groups.Assign(batch, Part::kDeferred);
  EXPECT_EQ(Grouped(groups), (std::vector<Pick>{{1, 0, 0, 1}, {3, 1, 1, 3}}));
  EXPECT_EQ(groups.outputs(), 2u);
}

// Expert 1 is picked now and later, expert 2 only later, expert 3 too often to be shared.
TEST(BatchGroups, ASharedExpertIsImmediateAsAWhole) {
  BatchGroups groups;
  groups.Configure(4, 8, kTopK, 2);
  Picks picks{.ids = {1, 3, 1, 3, 2, 3}, .deferred = {0, 0, 1, 1, 1, 0}};
  const shm::ExpertBatch batch = picks.Batch();
  groups.Assign(batch, Part::kImmediate);
  EXPECT_EQ(Grouped(groups),
            (std::vector<Pick>{{1, 0, 0, 0}, {1, 1, 4, 2}, {3, 0, 0, 1}, {3, 2, 2, 5}}));
  EXPECT_EQ(groups.outputs(), 6u);
  groups.Assign(batch, Part::kDeferred);
  EXPECT_EQ(Grouped(groups), (std::vector<Pick>{{2, 2, 2, 4}, {3, 1, 1, 3}}));
  EXPECT_EQ(groups.outputs(), 3u);
}

}  // namespace
}  // namespace tandem::expert
