#include "common/shm/layout.h"

#include <gtest/gtest.h>

#include <random>

namespace tandem::shm {
namespace {

BatchLimits Limits() {
  return {.max_rows = 2048,
          .hidden = 7168,
          .top_k = 8,
          .num_experts = 256,
          .num_layers = 61,
          .lanes = 2,
          .row_type = RowType::kBf16};
}

TEST(Layout, HasTheSizesOfTheMemoryPlan) {
  const auto layout = ComputeLayout(Limits(), SlotsFor(2));
  ASSERT_TRUE(layout.ok());
  // 2,048 rows of 7,168: 29 MB in, 59 MB out, and the picks.
  EXPECT_EQ(layout->ids_offset - layout->x_offset, 2048u * 7168 * 2);
  EXPECT_GE(layout->slot_bytes - layout->results_offset, 2048u * 7168 * 4);
  EXPECT_LT(layout->slot_bytes - layout->results_offset, 2048u * 7168 * 4 + kPageBytes);
  EXPECT_EQ(layout->segment_bytes, layout->slots_offset + 4 * layout->slot_bytes);
}

TEST(Layout, PartsAreAlignedAndDoNotOverlap) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    BatchLimits limits;
    limits.max_rows = 1 + static_cast<uint32_t>(random() % 300);
    limits.hidden = 1 + static_cast<uint32_t>(random() % 300);
    limits.top_k = 1 + static_cast<uint32_t>(random() % 16);
    limits.num_experts = 1 + static_cast<uint32_t>(random() % 0xFFFF);
    limits.num_layers = 1 + static_cast<uint32_t>(random() % 100);
    limits.lanes = 1 + static_cast<uint32_t>(random() % kMaxLanes);
    limits.row_type = random() % 2 == 0 ? RowType::kBf16 : RowType::kF32;
    const auto layout = ComputeLayout(limits, SlotsFor(limits.lanes));
    ASSERT_TRUE(layout.ok()) << layout.status();
    const uint64_t elements = uint64_t{limits.max_rows} * limits.hidden;
    const uint64_t picks = uint64_t{limits.max_rows} * limits.top_k;
    EXPECT_GE(layout->x_offset, sizeof(SlotHeader));
    EXPECT_GE(layout->ids_offset, layout->x_offset + elements * RowTypeBytes(limits.row_type));
    EXPECT_GE(layout->weights_offset, layout->ids_offset + picks * 2);
    EXPECT_GE(layout->deferred_offset, layout->weights_offset + picks * 4);
    EXPECT_GE(layout->results_offset, layout->deferred_offset + picks);
    EXPECT_GE(layout->slot_bytes, layout->results_offset + elements * 4);
    for (const uint64_t offset : {layout->x_offset, layout->ids_offset, layout->weights_offset,
                                  layout->deferred_offset, layout->results_offset}) {
      EXPECT_EQ(offset % kLineBytes, 0u);
    }
    EXPECT_EQ(layout->slot_bytes % kPageBytes, 0u);
    EXPECT_GE(layout->slots_offset, layout->pairs_offset + kMaxPairs * sizeof(PairLines));
  }
}

TEST(Layout, RefusesSenselessLimits) {
  EXPECT_TRUE(ComputeLayout(Limits(), 4).ok());
  for (uint32_t BatchLimits::*field :
       {&BatchLimits::max_rows, &BatchLimits::hidden, &BatchLimits::top_k,
        &BatchLimits::num_experts, &BatchLimits::num_layers, &BatchLimits::lanes}) {
    for (const uint32_t value : {0u, ~0u, 1u << 31}) {
      BatchLimits limits = Limits();
      limits.*field = value;
      EXPECT_FALSE(ComputeLayout(limits, 16).ok());
    }
  }
  BatchLimits limits = Limits();
  limits.row_type = static_cast<RowType>(3);
  EXPECT_FALSE(ComputeLayout(limits, 4).ok());
  // Fewer than two slots a lane; too large a segment.
  EXPECT_FALSE(ComputeLayout(Limits(), 3).ok());
  EXPECT_FALSE(ComputeLayout(Limits(), 0).ok());
  limits = Limits();
  limits.max_rows = 1u << 20;
  limits.hidden = 1u << 20;
  EXPECT_FALSE(ComputeLayout(limits, 4).ok());
}

TEST(Layout, CopyOnceAndStoreWordsKeepEveryByte) {
  SlotHeader header{};
  auto* bytes = reinterpret_cast<unsigned char*>(&header);
  for (size_t i = 0; i < sizeof(header); ++i) bytes[i] = static_cast<unsigned char>(i * 7 + 1);
  SlotHeader stored{};
  StoreWords(&stored, header);
  const SlotHeader copy = CopyOnce(stored);
  EXPECT_EQ(std::memcmp(&copy, &header, sizeof(header)), 0);
}

}  // namespace
}  // namespace tandem::shm
