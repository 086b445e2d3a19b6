#include "gateway/scheduling/kv_blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace tandem::gateway {
namespace {

std::vector<uint32_t> Tokens(uint32_t count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

class KvBlocksTest : public ::testing::Test {
 protected:
  KvBlocks blocks_{{{.block_tokens = 4, .block_count = 8}}, /*prefix_cache=*/true};

  void Audit(std::vector<const BlockTables*> users) { EXPECT_EQ(blocks_.Audit(users), ""); }

  // Computes and publishes `tokens` for a sequence of `tenant`, and gives the blocks back.
  void Remember(const std::vector<uint32_t>& tokens, const std::string& tenant = "") {
    BlockTables tables;
    PrefixPath path{.tenant = tenant};
    ASSERT_TRUE(blocks_.Extend(tokens.size(), &tables));
    blocks_.Publish(tokens, tables, &path);
    blocks_.Release(&tables);
  }
  uint32_t Found(const std::vector<uint32_t>& tokens, const std::string& tenant = "") {
    BlockTables tables;
    PrefixPath path{.tenant = tenant};
    const uint32_t found = blocks_.Match(tokens, 100, &path, &tables);
    blocks_.Release(&tables);
    return found;
  }
};

TEST_F(KvBlocksTest, ExtendsByWholeBlocksOrNotAtAll) {
  BlockTables tables;
  EXPECT_TRUE(blocks_.Extend(5, &tables));
  EXPECT_EQ(tables[0].size(), 2u);
  EXPECT_TRUE(blocks_.Extend(8, &tables));
  EXPECT_EQ(tables[0].size(), 2u);
  EXPECT_FALSE(blocks_.Extend(33, &tables));
  EXPECT_EQ(tables[0].size(), 2u);
  EXPECT_EQ(blocks_.available(0), 6u);
  Audit({&tables});
  blocks_.Release(&tables);
  EXPECT_EQ(blocks_.available(0), 8u);
  Audit({});
}

TEST_F(KvBlocksTest, FindsTheLongestFullBlocks) {
  Remember(Tokens(10));
  EXPECT_EQ(Found(Tokens(12)), 8u);
  EXPECT_EQ(Found(Tokens(7)), 4u);
  EXPECT_EQ(Found(Tokens(3)), 0u);
  auto other = Tokens(12);
  other[5] = 99;
  EXPECT_EQ(Found(other), 4u);
  Audit({});
}

TEST_F(KvBlocksTest, KeepsTenantsApart) {
  Remember(Tokens(8), "a");
  EXPECT_EQ(Found(Tokens(8), "b"), 0u);
  EXPECT_EQ(Found(Tokens(8), ""), 0u);
  EXPECT_EQ(Found(Tokens(8), "a"), 8u);
}

TEST_F(KvBlocksTest, TheSameBlockUnderAnotherPrefixIsAnotherEntry) {
  auto first = Tokens(8);
  auto second = Tokens(8);
  second[0] = 77;  // the second blocks are equal, what stands before them is not
  Remember(first);
  Remember(second);
  EXPECT_EQ(blocks_.cached_entries(), 4u);
  const std::vector<uint32_t> tail(first.begin() + 4, first.end());
  EXPECT_EQ(Found(tail), 0u);
}

TEST_F(KvBlocksTest, SharesAMatchedPrefix) {
  Remember(Tokens(8));
  BlockTables a, b;
  PrefixPath path_a, path_b;
  EXPECT_EQ(blocks_.Match(Tokens(8), 2, &path_a, &a), 8u);
  EXPECT_EQ(blocks_.Match(Tokens(8), 1, &path_b, &b), 4u);
  EXPECT_EQ(a[0][0], b[0][0]);
  EXPECT_EQ(blocks_.available(0), 6u);
  Audit({&a, &b});
  blocks_.Release(&a);
  EXPECT_EQ(blocks_.available(0), 7u);
  blocks_.Release(&b);
  Audit({});
}

TEST_F(KvBlocksTest, TakesTheLeastRecentlyUsedAwayTailsFirst) {
  Remember(Tokens(16));       // 4 blocks
  Remember(Tokens(8, 1000));  // 2 blocks
  EXPECT_EQ(blocks_.cached_entries(), 6u);
  BlockTables tables;
  ASSERT_TRUE(blocks_.Extend(16, &tables));  // 2 free ones and the first path's last two
  EXPECT_EQ(blocks_.cached_entries(), 4u);
  Audit({&tables});
  EXPECT_EQ(Found(Tokens(16)), 8u);
  EXPECT_EQ(Found(Tokens(8, 1000)), 8u);
  blocks_.Release(&tables);
  Audit({});
}

TEST_F(KvBlocksTest, ABlockInUseIsNotTakenAway) {
  Remember(Tokens(16));
  BlockTables user, other;
  PrefixPath path;
  ASSERT_EQ(blocks_.Match(Tokens(16), 4, &path, &user), 16u);
  EXPECT_TRUE(blocks_.Extend(16, &other));
  EXPECT_FALSE(blocks_.Extend(20, &other));
  Audit({&user, &other});
  EXPECT_EQ(blocks_.cached_entries(), 4u);
  blocks_.Release(&user);
  blocks_.Release(&other);
}

TEST_F(KvBlocksTest, TwoThatComputeTheSameShareTheFirstOnesEntry) {
  BlockTables a, b;
  PrefixPath path_a, path_b;
  ASSERT_TRUE(blocks_.Extend(8, &a));
  ASSERT_TRUE(blocks_.Extend(8, &b));
  const auto tokens = Tokens(8);
  blocks_.Publish(std::span(tokens).first(4), a, &path_a);
  blocks_.Publish(tokens, b, &path_b);
  blocks_.Publish(tokens, a, &path_a);
  EXPECT_EQ(blocks_.cached_entries(), 2u);
  Audit({&a, &b});
  blocks_.Release(&a);
  blocks_.Release(&b);
  EXPECT_EQ(blocks_.available(0), 8u);
  EXPECT_EQ(Found(tokens), 8u);
  Audit({});
}

TEST_F(KvBlocksTest, ForgetsWhatIsNotToBeTrusted) {
  BlockTables tables;
  PrefixPath path;
  ASSERT_TRUE(blocks_.Extend(8, &tables));
  blocks_.Publish(Tokens(8), tables, &path);
  blocks_.Forget(tables);
  EXPECT_EQ(Found(Tokens(8)), 0u);
  Audit({&tables});
  blocks_.Release(&tables);
  Audit({});
}

TEST(KvBlocks, SeveralGroupsMoveTogether) {
  KvBlocks blocks({{4, 8}, {4, 3}}, true);
  ASSERT_TRUE(blocks.prefix_cache());
  BlockTables tables;
  PrefixPath path;
  EXPECT_FALSE(blocks.Extend(16, &tables));  // the second group is too small
  EXPECT_EQ(blocks.available(0), 8u);
  ASSERT_TRUE(blocks.Extend(12, &tables));
  blocks.Publish(Tokens(12), tables, &path);
  blocks.Release(&tables);
  // Taking a block of the second group away takes the entry from both.
  BlockTables small;
  ASSERT_TRUE(blocks.Extend(4, &small));
  EXPECT_EQ(blocks.cached_entries(), 2u);
  const BlockTables* users[] = {&small};
  EXPECT_EQ(blocks.Audit(users), "");
}

TEST(KvBlocks, NoPrefixCacheWhereAGroupForgetsOrSizesDiffer) {
  EXPECT_FALSE(KvBlocks({{4, 8}, {8, 8}}, true).prefix_cache());
  EXPECT_FALSE(KvBlocks({{.block_tokens = 4, .block_count = 8, .keeps_all_tokens = false}}, true)
                   .prefix_cache());
  EXPECT_FALSE(KvBlocks({{4, 8}}, false).prefix_cache());
}

}  // namespace
}  // namespace tandem::gateway
