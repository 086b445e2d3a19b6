#pragma once

// A store, the routed-expert block over it and a pool, for tests; and random batches.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "common/hw/cpu_features.h"
#include "common/shm/unique_fd.h"
#include "common/tensor/convert.h"
#include "expert_worker/engine/pool.h"
#include "expert_worker/engine/routed_experts.h"
#include "expert_worker/kernels/select.h"
#include "tests/expert_worker/expert_fakes.h"

namespace tandem::expert {

struct Batch {
  uint32_t rows = 0;
  uint32_t top_k = 0;
  std::vector<float> x;
  std::vector<uint16_t> ids;
  std::vector<float> weights;
  std::vector<uint8_t> deferred = {};  // empty: no pick is
};

// Which submission a batch is.
struct Place {
  uint32_t layer = 1;
  uint32_t lane = 0;
  uint64_t step = 0;
  uint64_t epoch = 0;
};

// Rows that BF16 holds exactly.
inline Batch RandomBatch(const FakeShape& shape, uint32_t rows, uint32_t top_k, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  Batch batch{.rows = rows, .top_k = top_k, .x = {}, .ids = {}, .weights = {}};
  for (uint32_t i = 0; i < rows * shape.hidden; ++i) {
    batch.x.push_back(Bf16ToF32(F32ToBf16(normal(rng))));
  }
  for (uint32_t r = 0; r < rows; ++r) {
    std::vector<uint16_t> all(shape.experts);
    for (uint32_t e = 0; e < shape.experts; ++e) all[e] = static_cast<uint16_t>(e);
    std::shuffle(all.begin(), all.end(), rng);
    batch.ids.insert(batch.ids.end(), all.begin(), all.begin() + top_k);
  }
  for (uint32_t i = 0; i < rows * top_k; ++i) batch.weights.push_back(std::fabs(normal(rng)));
  return batch;
}

// Row `row` of a batch alone.
inline Batch OneRow(const Batch& batch, uint32_t row) {
  const size_t hidden = batch.x.size() / batch.rows;
  const auto cut = [&](const auto& all, size_t width) {
    return std::decay_t<decltype(all)>(all.begin() + static_cast<int64_t>(row * width),
                                       all.begin() + static_cast<int64_t>((row + 1) * width));
  };
  return {.rows = 1,
          .top_k = batch.top_k,
          .x = cut(batch.x, hidden),
          .ids = cut(batch.ids, batch.top_k),
          .weights = cut(batch.weights, batch.top_k)};
}

struct BlockOptions {
  int threads = 2;
  shm::RowType row_type = shm::RowType::kF32;
  int fused_rows = -1;
};

class Block {
 public:
  Block(const KnownExperts& experts, const kernels::KernelTable& table, SegmentRange range,
        uint32_t quantum, const BlockOptions& options)
      : shape_(experts.shape()),
        options_(options),
        pool_({.threads = options.threads, .spin = std::chrono::microseconds(20)}) {
    const StoreSpec spec = experts.Spec(quantum, range);
    fd_ = shm::UniqueFd(memfd_create("store", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    LoadProgress progress;
    auto store = WeightStore::Build(fd_.get(), spec, experts, {.threads = 1}, &progress);
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = std::move(*store);
    engine_ = std::make_unique<RoutedExperts>(
        store_.get(), &table,
        RoutedExperts::Options{.threads = options.threads, .fused_rows = options.fused_rows});
    EXPECT_TRUE(engine_->Configure(Limits()).ok());
  }
  // Over all segments.
  Block(const KnownExperts& experts, const kernels::KernelTable& table, const BlockOptions& options)
      : Block(experts, table, experts.all(), experts.quantum(), options) {}

  shm::BatchLimits Limits() const {
    shm::BatchLimits limits;
    limits.max_rows = 300;
    limits.hidden = shape_.hidden;
    limits.top_k = shape_.experts;
    limits.num_experts = shape_.experts;
    limits.num_layers = shape_.layers;
    limits.lanes = 2;
    limits.row_type = options_.row_type;
    return limits;
  }

  std::vector<float> Run(const Batch& batch, uint32_t layer = 1) {
    return RunAt(batch, {.layer = layer});
  }
  // Run, then RunDeferred where picks are deferred.
  std::vector<float> RunAt(const Batch& batch, const Place& place) {
    std::vector<float> out(size_t{batch.rows} * shape_.hidden, -3.0f);
    std::vector<uint16_t> narrow(batch.x.size());
    for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = F32ToBf16(batch.x[i]);
    ticks = 0;
    shm::ExpertBatch call;
    call.layer = place.layer;
    call.lane = place.lane;
    call.step = place.step;
    call.epoch = place.epoch;
    call.rows = batch.rows;
    call.top_k = batch.top_k;
    call.hidden = shape_.hidden;
    call.row_type = options_.row_type;
    call.x = options_.row_type == shm::RowType::kBf16 ? static_cast<const void*>(narrow.data())
                                                      : batch.x.data();
    call.ids = batch.ids.data();
    call.weights = batch.weights.data();
    call.out = out.data();
    call.ticks = &ticks;
    if (!batch.deferred.empty()) call.deferred = batch.deferred.data();
    pool_.Run([&](int thread) { engine_->Run(call, thread, pool_.threads()); });
    if (call.deferred != nullptr) {
      pool_.Run([&](int thread) { engine_->RunDeferred(call, thread, pool_.threads()); });
    }
    return out;
  }

  RoutedExperts& engine() { return *engine_; }
  std::atomic<uint64_t> ticks{0};

 private:
  const FakeShape shape_;
  const BlockOptions options_;
  Pool pool_;
  shm::UniqueFd fd_;
  std::unique_ptr<WeightStore> store_;
  std::unique_ptr<RoutedExperts> engine_;
};

// The largest error beside the largest magnitude.
template <typename Want>
double LargestError(const std::vector<float>& got, const std::vector<Want>& want) {
  double error = 0, largest = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    const auto w = static_cast<double>(want[i]);
    error = std::max(error, std::fabs(static_cast<double>(got[i]) - w));
    if (std::isnan(got[i])) error = INFINITY;
    largest = std::max(largest, std::fabs(w));
  }
  return error / largest;
}

inline std::vector<const kernels::KernelTable*> RunnableTables() {
  std::vector<const kernels::KernelTable*> tables;
  for (const kernels::KernelTable* table : kernels::AllKernelTables()) {
    if (kernels::IsRunnable(*table, DetectCpuFeatures())) tables.push_back(table);
#ifdef __SANITIZE_THREAD__
    // Threads share the same memory whichever table computes: the best one stands for all.
    if (!tables.empty()) break;
#endif
  }
  return tables;
}

}  // namespace tandem::expert
