// The routed-expert block at the shape of a real model, over more weights than any cache holds:
//   expert_bench [--isa NAME] [--format bf16|f32] [--hidden N] [--intermediate N] [--experts N]
//                [--top-k N] [--layers N] [--threads N]
// For each row count: median microseconds a layer, GB/s over the bytes of the distinct experts,
// their share of the read bandwidth (plain loads over the same store by the same threads,
// interleaved with the measurement), and GFLOP/s.

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/options.h"
#include "common/hw/cpu_features.h"
#include "common/hw/topology.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/pool.h"
#include "expert_worker/engine/routed_experts.h"
#include "expert_worker/kernels/select.h"

namespace tandem::expert {
namespace {

struct Flags {
  std::string isa = "amx";
  std::string format = "bf16";
  int hidden = 2048;
  int intermediate = 768;
  int experts = 128;
  int top_k = 8;
  int layers = 1;
  int threads = static_cast<int>(AllowedCpus().size());
  int repeats = 15;
};

// Weights whose bytes do not matter: a counter in the exponent range of small numbers.
class SyntheticExperts final : public ExpertSource {
 public:
  explicit SyntheticExperts(DType dtype) : dtype_(dtype) {}
  DType native_dtype() const override { return dtype_; }
  absl::Status Read(int, int expert, ExpertPart, Range rows, Range cols, DType dtype,
                    void* out) const override {
    const int64_t count = rows.size() * cols.size();
    uint32_t state = static_cast<uint32_t>(expert * 7919 + rows.begin);
    for (int64_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      const uint32_t bits = 0x3C000000u | ((state >> 9) & 0x007F0000u) | (state & 0x80000000u);
      if (dtype == DType::kBF16) {
        static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(bits >> 16);
      } else {
        static_cast<uint32_t*>(out)[i] = bits;
      }
    }
    return absl::OkStatus();
  }

 private:
  DType dtype_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

class Bench {
 public:
  explicit Bench(const Flags& flags) : flags_(flags) {
    const absl::StatusOr<Isa> isa = ParseIsa(flags.isa);
    TANDEM_CHECK(isa.ok());
    table_ = kernels::SelectKernelTable(*isa, DetectCpuFeatures());
    StoreSpec spec;
    spec.format =
        flags.format == "f32" ? kernels::WeightFormat::kF32 : kernels::WeightFormat::kBf16;
    spec.layers = static_cast<uint32_t>(flags.layers);
    spec.moe_layers.resize(spec.layers);
    std::iota(spec.moe_layers.begin(), spec.moe_layers.end(), 0u);
    spec.experts = static_cast<uint32_t>(flags.experts);
    spec.hidden = static_cast<uint32_t>(flags.hidden);
    spec.intermediate = static_cast<uint32_t>(flags.intermediate);
    spec.quantum = ChooseQuantum(spec.intermediate);
    spec.segments = {0, SegmentCount(spec.intermediate, spec.quantum)};
    const shm::UniqueFd fd(memfd_create("bench", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    LoadProgress progress;
    const auto started = std::chrono::steady_clock::now();
    auto store =
        WeightStore::Build(fd.get(), spec, table_->format(spec.format),
                           SyntheticExperts(flags.format == "f32" ? DType::kF32 : DType::kBF16),
                           flags.threads, &progress);
    TANDEM_CHECK(store.ok());
    store_ = std::move(*store);
    std::printf("table %s, %s, %d layers x %d experts, %d x %d, top %d, %d threads\n", table_->name,
                flags.format.c_str(), flags.layers, flags.experts, flags.hidden, flags.intermediate,
                flags.top_k, flags.threads);
    std::printf("packed %.2f GB in %.1f s\n", static_cast<double>(store_->data_bytes()) * 1e-9,
                Seconds(started));
    engine_ = std::make_unique<RoutedExperts>(store_.get(), table_,
                                              RoutedExperts::Options{.threads = flags.threads});
    shm::BatchLimits limits;
    limits.max_rows = 512;
    limits.hidden = spec.hidden;
    limits.top_k = static_cast<uint32_t>(flags.top_k);
    limits.num_experts = spec.experts;
    limits.num_layers = spec.layers;
    limits.lanes = 1;
    TANDEM_CHECK(engine_->Configure(limits).ok());
    // Last: it pins this thread, and oneTBB would take that for the size of the machine.
    pool_ = std::make_unique<Pool>(PoolOptions(flags));
  }

  void Run(uint32_t rows) {
    std::vector<double> block_us, block_gbps, read_gbps;
    double flops = 0;
    for (int i = 0; i < flags_.repeats; ++i) {
      MakeBatch(rows);
      const double read_seconds = ReadExperts();
      const double seconds = RunBatch(rows);
      block_us.push_back(seconds * 1e6);
      block_gbps.push_back(static_cast<double>(distinct_bytes_) / seconds * 1e-9);
      read_gbps.push_back(static_cast<double>(distinct_bytes_) / read_seconds * 1e-9);
      flops = 6.0 * rows * flags_.top_k * flags_.hidden * flags_.intermediate;
    }
    const double us = Median(block_us);
    std::printf("rows %4u  %9.0f us  %5.1f GB/s  read %5.1f GB/s  share %3.0f %%  %6.1f GFLOP/s\n",
                rows, us, Median(block_gbps), Median(read_gbps),
                100 * Median(block_gbps) / Median(read_gbps), flops / us * 1e-3);
  }

 private:
  static Pool::Options PoolOptions(const Flags& flags) {
    Pool::Options options;
    options.threads = flags.threads;
    const std::vector<int> cpus = AllowedCpus();
    if (static_cast<size_t>(flags.threads) <= cpus.size()) {
      options.cpus.assign(cpus.begin(), cpus.begin() + flags.threads);
      options.pin_caller = true;
    }
    return options;
  }

  // Random experts of the next layer, so that no cache holds them.
  void MakeBatch(uint32_t rows) {
    layer_ = (layer_ + 1) % static_cast<uint32_t>(flags_.layers);
    const size_t top_k = static_cast<size_t>(flags_.top_k);
    x_.assign(size_t{rows} * flags_.hidden, 0x3C00);
    weights_.assign(rows * top_k, 0.125f);
    out_.resize(x_.size());
    ids_.clear();
    std::vector<uint16_t> all(static_cast<size_t>(flags_.experts));
    std::iota(all.begin(), all.end(), uint16_t{0});
    std::set<uint16_t> distinct;
    for (uint32_t r = 0; r < rows; ++r) {
      std::shuffle(all.begin(), all.end(), rng_);
      ids_.insert(ids_.end(), all.begin(), all.begin() + flags_.top_k);
      distinct.insert(all.begin(), all.begin() + flags_.top_k);
    }
    distinct_.assign(distinct.begin(), distinct.end());
    distinct_bytes_ = distinct_.size() * ExpertBytes();
  }

  uint64_t ExpertBytes() const { return store_->manifest().segment_bytes * store_->segments(); }

  // Plain loads of other experts' bytes (the next layer's, or those not picked, would be as cold;
  // the same ones are taken and evicted by a pass over the rest of the store).
  double ReadExperts() {
    Evict();
    const auto started = std::chrono::steady_clock::now();
    pool_->Run([&](int thread) {
      for (uint16_t expert : distinct_) ReadShare(expert, thread);
    });
    const double seconds = Seconds(started);
    Evict();
    return seconds;
  }

  void ReadShare(uint16_t expert, int thread) {
    const uint64_t bytes = ExpertBytes() / 64 / static_cast<uint64_t>(flags_.threads) * 64;
    const char* p = static_cast<const char*>(store_->GateUp(layer_, expert, 0).data) +
                    bytes * static_cast<uint64_t>(thread);
    // Four streams, as many as the kernel has.
    const uint64_t quarter = bytes / 256 * 64;
    __m128i sum = _mm_setzero_si128();
    for (uint64_t i = 0; i + 64 <= quarter; i += 64) {
      for (uint64_t s = 0; s < 4; ++s) {
        const char* line = p + s * quarter + i;
        _mm_prefetch(line + 1024, _MM_HINT_T0);
        for (int j = 0; j < 64; j += 16) {
          sum = _mm_xor_si128(sum, _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + j)));
        }
      }
    }
    sink_[thread % 64] = _mm_cvtsi128_si32(sum);
  }

  // Twice the largest cache of the machines that this runs on.
  void Evict() {
    if (evict_.empty()) evict_.assign(size_t{64} << 20, 1);
    int sum = 0;
    for (size_t i = 0; i < evict_.size(); i += 64) sum += evict_[i]++;
    sink_[0] = sum;
  }

  double RunBatch(uint32_t rows) {
    shm::ExpertBatch batch;
    batch.layer = layer_;
    batch.rows = rows;
    batch.top_k = static_cast<uint32_t>(flags_.top_k);
    batch.hidden = static_cast<uint32_t>(flags_.hidden);
    batch.x = x_.data();
    batch.ids = ids_.data();
    batch.weights = weights_.data();
    batch.out = out_.data();
    const auto started = std::chrono::steady_clock::now();
    pool_->Run([&](int thread) { engine_->Run(batch, thread, flags_.threads); });
    return Seconds(started);
  }

  const Flags flags_;
  std::unique_ptr<Pool> pool_;
  const kernels::KernelTable* table_ = nullptr;
  std::unique_ptr<WeightStore> store_;
  std::unique_ptr<RoutedExperts> engine_;
  std::mt19937 rng_{1};
  uint32_t layer_ = 0;
  std::vector<uint16_t> x_, ids_;
  std::vector<float> weights_, out_;
  std::vector<uint16_t> distinct_;
  uint64_t distinct_bytes_ = 0;
  std::vector<char> evict_;
  volatile int sink_[64] = {};
};

int Main(int argc, char** argv) {
  Flags flags;
  OptionParser parser("expert_bench", "Measures the routed-expert block");
  parser.AddChoice("isa", "Best instruction set", &flags.isa, {"ref", "avx2", "avx512", "amx"});
  parser.AddChoice("format", "Weights", &flags.format, {"bf16", "f32"});
  parser.Add("hidden", "Hidden size", &flags.hidden, {.min = 1, .max = 65536});
  parser.Add("intermediate", "Intermediate size", &flags.intermediate, {.min = 1, .max = 65536});
  parser.Add("experts", "Experts a layer", &flags.experts, {.min = 1, .max = 1024});
  parser.Add("top-k", "Experts a row", &flags.top_k, {.min = 1, .max = 64});
  parser.Add("layers", "Layers", &flags.layers, {.min = 1, .max = 128});
  parser.Add("threads", "Threads", &flags.threads, {.min = 1, .max = 64});
  parser.Add("repeats", "Measurements a row count", &flags.repeats, {.min = 1, .max = 1000});
  if (const auto code = parser.Parse(argc, argv)) return *code;
  Bench bench(flags);
  for (uint32_t rows : {1u, 2u, 4u, 8u, 16u, 32u, 64u, 128u, 512u}) bench.Run(rows);
  return 0;
}

}  // namespace
}  // namespace tandem::expert

int main(int argc, char** argv) { return tandem::expert::Main(argc, argv); }
