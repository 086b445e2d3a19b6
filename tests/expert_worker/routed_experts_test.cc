// The routed-expert block against a double-precision sum, and its independence of rows, threads,
// instruction set and cut.

#include "expert_worker/engine/routed_experts.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/hw/cpu_features.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/pool.h"
#include "expert_worker/kernels/select.h"
#include "expert_worker/kernels/tables.h"
#include "tests/expert_worker/expert_fakes.h"

namespace tandem::expert {
namespace {

using kernels::KernelTable;
using kernels::kRefTable;

struct Batch {
  uint32_t rows = 0;
  uint32_t top_k = 0;
  std::vector<float> x;
  std::vector<uint16_t> ids;
  std::vector<float> weights;
};

Batch RandomBatch(const FakeShape& shape, uint32_t rows, uint32_t top_k, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  Batch batch{rows, top_k, {}, {}, {}};
  for (uint32_t i = 0; i < rows * shape.hidden; ++i) batch.x.push_back(normal(rng));
  for (uint32_t r = 0; r < rows; ++r) {
    std::vector<uint16_t> all(shape.experts);
    for (uint32_t e = 0; e < shape.experts; ++e) all[e] = static_cast<uint16_t>(e);
    std::shuffle(all.begin(), all.end(), rng);
    batch.ids.insert(batch.ids.end(), all.begin(), all.begin() + top_k);
  }
  for (uint32_t i = 0; i < rows * top_k; ++i) batch.weights.push_back(std::fabs(normal(rng)));
  return batch;
}

// A store, its block and a pool.
class Block {
 public:
  Block(const FakeExperts& experts, const KernelTable& table, SegmentRange range, uint32_t quantum,
        int threads)
      : shape_(experts.shape()),
        pool_({.threads = threads, .spin = std::chrono::microseconds(20)}) {
    const StoreSpec spec = experts.Spec(quantum, range);
    fd_ = shm::UniqueFd(memfd_create("store", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    LoadProgress progress;
    auto store = WeightStore::Build(fd_.get(), spec, experts, 1, &progress);
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = std::move(*store);
    engine_ = std::make_unique<RoutedExperts>(store_.get(), &table,
                                              RoutedExperts::Options{.threads = threads});
    EXPECT_TRUE(engine_->Configure(Limits()).ok());
  }

  shm::BatchLimits Limits() const {
    shm::BatchLimits limits;
    limits.max_rows = 300;
    limits.hidden = shape_.hidden;
    limits.top_k = shape_.experts;
    limits.num_experts = shape_.experts;
    limits.num_layers = shape_.layers;
    limits.lanes = 1;
    return limits;
  }

  std::vector<float> Run(const Batch& batch, uint32_t layer = 1, bool bf16 = false) {
    std::vector<float> out(size_t{batch.rows} * shape_.hidden, -3.0f);
    std::vector<uint16_t> narrow(batch.x.size());
    for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = F32ToBf16(batch.x[i]);
    ticks = 0;
    shm::ExpertBatch call;
    call.layer = layer;
    call.rows = batch.rows;
    call.top_k = batch.top_k;
    call.hidden = shape_.hidden;
    call.row_type = bf16 ? shm::RowType::kBf16 : shm::RowType::kF32;
    call.x = bf16 ? static_cast<const void*>(narrow.data()) : batch.x.data();
    call.ids = batch.ids.data();
    call.weights = batch.weights.data();
    call.out = out.data();
    call.ticks = &ticks;
    pool_.Run([&](int thread) { engine_->Run(call, thread, pool_.threads()); });
    return out;
  }

  RoutedExperts& engine() { return *engine_; }
  std::atomic<uint64_t> ticks{0};

 private:
  FakeShape shape_;
  Pool pool_;
  shm::UniqueFd fd_;
  std::unique_ptr<WeightStore> store_;
  std::unique_ptr<RoutedExperts> engine_;
};

Block WholeBlock(const FakeExperts& experts, const KernelTable& table, int threads) {
  const uint32_t quantum = ChooseQuantum(experts.shape().intermediate);
  return Block(experts, table, {0, SegmentCount(experts.shape().intermediate, quantum)}, quantum,
               threads);
}

double LargestError(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, largest = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    error = std::max(error, std::fabs(static_cast<double>(got[i]) - want[i]));
    largest = std::max(largest, std::fabs(want[i]));
  }
  return error / largest;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<const KernelTable*> RunnableTables() {
  std::vector<const KernelTable*> tables;
  for (const KernelTable* table : kernels::AllKernelTables()) {
    if (kernels::IsRunnable(*table, DetectCpuFeatures())) tables.push_back(table);
  }
  return tables;
}

TEST(RoutedExperts, EqualsTheDoublePrecisionSum) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (uint32_t intermediate : {16u, 30u, 77u, 130u}) {
      FakeShape shape;
      shape.hidden = 72;
      shape.intermediate = intermediate;
      shape.dtype = dtype;
      const FakeExperts experts(shape, 1);
      for (const KernelTable* table : RunnableTables()) {
        Block block = WholeBlock(experts, *table, 2);
        for (uint32_t rows : {1u, 2u, 7u, 150u}) {
          const Batch batch = RandomBatch(shape, rows, 3, rows);
          const auto want = ExactBlock(experts, 1, batch.x, batch.ids, batch.weights, 3);
          EXPECT_LT(LargestError(block.Run(batch), want), 2e-6)
              << table->name << " rows " << rows << " intermediate " << intermediate;
        }
      }
    }
  }
}

TEST(RoutedExperts, HasTheSameBitsOnEveryTableAndThreadCount) {
  FakeShape shape;
  shape.hidden = 104;
  shape.intermediate = 50;
  shape.dtype = DType::kBF16;
  const FakeExperts experts(shape, 2);
  const Batch batch = RandomBatch(shape, 33, 2, 3);
  const std::vector<float> want = WholeBlock(experts, kRefTable, 1).Run(batch);
  for (const KernelTable* table : RunnableTables()) {
    for (int threads : {1, 2, 3, 5}) {
      Block block = WholeBlock(experts, *table, threads);
      EXPECT_TRUE(SameBits(want, block.Run(batch))) << table->name << " threads " << threads;
      EXPECT_GT(block.ticks.load(), 0u);
    }
  }
}

TEST(RoutedExperts, ARowsResultDoesNotDependOnOtherRows) {
  FakeShape shape;
  const FakeExperts experts(shape, 4);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  const Batch batch = RandomBatch(shape, 200, 3, 5);
  const std::vector<float> together = block.Run(batch);
  for (uint32_t r = 0; r < batch.rows; r += 13) {
    Batch alone{1, 3, {}, {}, {}};
    alone.x.assign(batch.x.begin() + r * shape.hidden, batch.x.begin() + (r + 1) * shape.hidden);
    alone.ids.assign(batch.ids.begin() + r * 3, batch.ids.begin() + (r + 1) * 3);
    alone.weights.assign(batch.weights.begin() + r * 3, batch.weights.begin() + (r + 1) * 3);
    const std::vector<float> out = block.Run(alone);
    EXPECT_EQ(
        std::memcmp(out.data(), together.data() + r * shape.hidden, shape.hidden * sizeof(float)),
        0)
        << "row " << r;
  }
}

TEST(RoutedExperts, AllRowsOnOneExpert) {
  FakeShape shape;
  const FakeExperts experts(shape, 6);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  Batch batch = RandomBatch(shape, 300, 1, 7);
  std::fill(batch.ids.begin(), batch.ids.end(), uint16_t{2});
  EXPECT_LT(
      LargestError(block.Run(batch), ExactBlock(experts, 1, batch.x, batch.ids, batch.weights, 1)),
      2e-6);
}

TEST(RoutedExperts, SkippedPicksCountForNothing) {
  FakeShape shape;
  const FakeExperts experts(shape, 8);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  Batch batch = RandomBatch(shape, 9, 3, 9);
  for (uint32_t i = 0; i < batch.ids.size(); i += 2) {
    batch.ids[i] = shm::kNoExpert;
    batch.weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
  EXPECT_LT(
      LargestError(block.Run(batch), ExactBlock(experts, 1, batch.x, batch.ids, batch.weights, 3)),
      2e-6);
  std::fill(batch.ids.begin(), batch.ids.end(), shm::kNoExpert);
  EXPECT_EQ(block.Run(batch), std::vector<float>(batch.x.size(), 0.0f));
}

TEST(RoutedExperts, NoRowsAndLayersWithoutExperts) {
  FakeShape shape;
  const FakeExperts experts(shape, 10);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  EXPECT_TRUE(block.Run(Batch{0, 2, {}, {}, {}}).empty());
  const Batch batch = RandomBatch(shape, 5, 2, 11);
  EXPECT_EQ(block.Run(batch, 0), std::vector<float>(batch.x.size(), 0.0f));
}

TEST(RoutedExperts, NanStaysInItsRow) {
  FakeShape shape;
  const FakeExperts experts(shape, 12);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  Batch batch = RandomBatch(shape, 6, 2, 13);
  batch.x[2 * shape.hidden + 5] = std::numeric_limits<float>::quiet_NaN();
  batch.weights[4 * 2] = std::numeric_limits<float>::infinity();
  const std::vector<float> out = block.Run(batch);
  for (uint32_t r = 0; r < 6; ++r) {
    for (uint32_t c = 0; c < shape.hidden; ++c) {
      const float v = out[r * shape.hidden + c];
      EXPECT_EQ(std::isfinite(v), r != 2 && r != 4) << r << " " << c;
    }
  }
}

TEST(RoutedExperts, BF16RowsGiveWhatTheirRoundedValuesGive) {
  FakeShape shape;
  const FakeExperts experts(shape, 14);
  Block block = WholeBlock(experts, *RunnableTables().front(), 2);
  Batch batch = RandomBatch(shape, 17, 2, 15);
  const std::vector<float> narrow = block.Run(batch, 1, true);
  for (float& v : batch.x) v = Bf16ToF32(F32ToBf16(v));
  EXPECT_TRUE(SameBits(narrow, block.Run(batch)));
}

TEST(RoutedExperts, WorkersWithUnevenSharesSumToTheWhole) {
  FakeShape shape;
  shape.intermediate = 77;
  const FakeExperts experts(shape, 16);
  const KernelTable& table = *RunnableTables().front();
  const uint32_t quantum = ChooseQuantum(shape.intermediate);
  const uint32_t segments = SegmentCount(shape.intermediate, quantum);
  const Batch batch = RandomBatch(shape, 12, 3, 17);
  const auto exact = ExactBlock(experts, 1, batch.x, batch.ids, batch.weights, 3);
  const std::vector<std::vector<uint32_t>> cases = {{1, 1}, {3, 1}, {1, 1, 1}, {0, 1}, {1, 0, 5}};
  for (const auto& shares : cases) {
    std::vector<float> sum(batch.x.size(), 0.0f);
    for (uint32_t i = 0; i < shares.size(); ++i) {
      Block block(experts, table, *AssignSegments(segments, shares, i), quantum, 2);
      const std::vector<float> part = block.Run(batch);
      for (size_t j = 0; j < sum.size(); ++j) sum[j] += part[j];
    }
    EXPECT_LT(LargestError(sum, exact), 1e-5);
  }
}

TEST(RoutedExperts, WrongLimitsAreRefused) {
  FakeShape shape;
  const FakeExperts experts(shape, 18);
  Block block = WholeBlock(experts, kRefTable, 1);
  const auto code = [&](auto change) {
    shm::BatchLimits limits = block.Limits();
    change(limits);
    return block.engine().Configure(limits).code();
  };
  using L = shm::BatchLimits;
  EXPECT_EQ(code([](L& l) { l.hidden = 41; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L& l) { l.num_experts = 5; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L& l) { l.num_layers = 3; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L& l) { l.top_k = 5; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L& l) { l.top_k = 0; }), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code([](L&) {}), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace tandem::expert
