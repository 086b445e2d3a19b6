#include "tests/bench/expert_runner.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/base/check.h"
#include "common/base/status.h"
#include "common/shm/unique_fd.h"
#include "tests/bench/expert_roof.h"
#include "tests/bench/measure.h"
#include "tests/bench/random_experts.h"

namespace tandem::bench {
namespace {

// Read between two passes over the same weights; three times the last level cache push everything
// else out of it.
uint64_t EvictionBytes() {
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return 3 * static_cast<uint64_t>(std::max(cache, long{32} << 20));
}

// One byte of each page, so that neither the reading nor the block that follows meets a page that
// the hypervisor has taken away: on some machines the first touch of a layer that was not used for
// a second takes as long as reading it.
constexpr uint64_t kPageBytes = 4096;
volatile char touched;

void TouchPages(std::span<const ByteRange> ranges) {
  char all = 0;
  for (const ByteRange& range : ranges) {
    const auto* data = static_cast<const char*>(range.data);
    for (uint64_t i = 0; i < range.bytes; i += kPageBytes) all ^= data[i];
  }
  touched = all;
}

constexpr int kMinSamples = 5;
constexpr int kMaxSamples = 61;

expert::StoreSpec SpecOf(const RunnerOptions& options) {
  expert::StoreSpec spec;
  spec.layers = options.layers;
  spec.moe_layers.resize(spec.layers);
  std::iota(spec.moe_layers.begin(), spec.moe_layers.end(), 0u);
  spec.experts = options.shape.experts;
  spec.hidden = options.shape.hidden;
  spec.intermediate = options.shape.intermediate;
  const expert::MatrixFormat format{options.format.format, options.format.group_columns};
  spec.formats = {{format, format}};
  spec.activation = options.shape.activation;
  spec.biases = options.shape.biases;
  spec.quantum = expert::ChooseQuantum(spec.intermediate, spec.formats);
  spec.segments = {0, expert::SegmentCount(spec.intermediate, spec.quantum)};
  return spec;
}

}  // namespace

struct ExpertRunner::Sample {
  double seconds = 0;
  double read_seconds = 0;
  double bytes = 0;
  double peak_gops = 0;
  bool disturbed = false;
};

absl::StatusOr<std::unique_ptr<ExpertRunner>> ExpertRunner::Create(const RunnerOptions& options) {
  std::unique_ptr<ExpertRunner> runner(new ExpertRunner(options));
  const expert::StoreSpec spec = SpecOf(options);
  ASSIGN_OR_RETURN(const expert::StoreManifest manifest, expert::MakeManifest(spec));
  ASSIGN_OR_RETURN(const Memfd memory,
                   CreateMemfd("expert_bench", manifest.file_bytes, options.huge_pages));
  const shm::UniqueFd fd(memory.fd);
  expert::LoadProgress progress;
  const RandomExperts source(spec.formats[0].gate_up);
  ASSIGN_OR_RETURN(runner->store_,
                   expert::WeightStore::Build(fd.get(), spec, source,
                                              {options.threads, options.huge_pages}, &progress));
  runner->engine_ = std::make_unique<expert::RoutedExperts>(
      runner->store_.get(), options.table,
      expert::RoutedExperts::Options{.threads = options.threads, .fused_rows = options.fused_rows});
  shm::BatchLimits limits;
  limits.max_rows = options.max_rows;
  limits.hidden = spec.hidden;
  limits.top_k = options.shape.top_k;
  limits.num_experts = spec.experts;
  limits.num_layers = spec.layers;
  limits.lanes = 1;
  limits.row_type = options.parity ? shm::RowType::kF32 : shm::RowType::kBf16;
  RETURN_IF_ERROR(runner->engine_->Configure(limits));
  if (options.cold) {
    ASSIGN_OR_RETURN(runner->eviction_, PageBuffer::Allocate(EvictionBytes(), HugePages::kAuto));
    std::memset(runner->eviction_.data(), 1, runner->eviction_.bytes());
  }
  return runner;
}

uint64_t ExpertRunner::expert_bytes() const {
  return store_->segment_bytes(0) * store_->segments();
}

uint64_t ExpertRunner::PackedExpertBytes(const RunnerOptions& options) {
  const expert::StoreSpec spec = SpecOf(options);
  const absl::StatusOr<expert::StoreManifest> manifest = expert::MakeManifest(spec);
  TANDEM_CHECK(manifest.ok());
  return expert::LayoutsOf(*manifest)[0].block_bytes;
}

void ExpertRunner::PickExperts(uint32_t rows) {
  const uint32_t experts = options_.shape.experts;
  std::vector<uint16_t> order(experts);
  std::iota(order.begin(), order.end(), uint16_t{0});
  std::vector<bool> picked(experts, false);
  ids_.clear();
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t k = 0; k < options_.shape.top_k; ++k) {
      std::swap(order[k], order[k + random_() % (experts - k)]);
      ids_.push_back(order[k]);
      picked[order[k]] = true;
    }
  }
  distinct_.clear();
  for (uint32_t e = 0; e < experts; ++e) {
    if (picked[e]) distinct_.push_back({store_->GateUp(layer_, e, 0).data, expert_bytes()});
  }
}

void ExpertRunner::MakeBatch(uint32_t rows) {
  layer_ = (layer_ + 1) % options_.layers;
  PickExperts(rows);
  // Of either sign in [0.5, 2), as BF16 or as F32.
  x_.resize(size_t{rows} * options_.shape.hidden * (options_.parity ? 2 : 1));
  for (size_t i = 0; i < x_.size(); ++i) {
    const bool low_half = options_.parity && i % 2 == 0;
    x_[i] = low_half ? 0 : static_cast<uint16_t>(0x3F00 | (random_() & 0x80FF));
  }
  weights_.assign(ids_.size(), 1.0f / static_cast<float>(options_.shape.top_k));
  out_.resize(size_t{rows} * options_.shape.hidden);
}

void ExpertRunner::Evict(expert::Pool& pool) const {
  if (!options_.cold) return;
  const ByteRange range{eviction_.data(), eviction_.bytes()};
  ReadSeconds(pool, {&range, 1});
}

ExpertRunner::Sample ExpertRunner::Take(expert::Pool& pool, uint32_t rows,
                                        const PeakProbe* instruction) {
  MakeBatch(rows);
  Sample sample;
  sample.bytes = static_cast<double>(distinct_.size() * expert_bytes());
  TouchPages(distinct_);
  Evict(pool);
  const CoreWatch reading(options_.threads);
  sample.read_seconds = ReadSeconds(pool, distinct_);
  sample.disturbed = reading.Disturbed();
  if (instruction != nullptr) sample.peak_gops = PeakGops(pool, *instruction, 0.001);
  Evict(pool);
  shm::ExpertBatch batch;
  batch.layer = layer_;
  batch.rows = rows;
  batch.top_k = options_.shape.top_k;
  batch.hidden = options_.shape.hidden;
  batch.row_type = options_.parity ? shm::RowType::kF32 : shm::RowType::kBf16;
  batch.x = x_.data();
  batch.ids = ids_.data();
  batch.weights = weights_.data();
  batch.out = out_.data();
  const CoreWatch cores(options_.threads);
  const TimePoint start = Now();
  pool.Run([&](int thread) { engine_->Run(batch, thread, options_.threads); });
  sample.seconds = SecondsSince(start);
  sample.disturbed |= cores.Disturbed();
  return sample;
}

RowResult ExpertRunner::Measure(expert::Pool& pool, uint32_t rows, const MeasureOptions& options) {
  RowResult result;
  result.rows = rows;
  const ExpertShape& shape = options_.shape;
  const double operations = 6.0 * rows * shape.top_k * shape.hidden * shape.intermediate;
  const double first = Take(pool, rows, nullptr).seconds;  // also the warm-up
  const int wanted = options.samples > 0 ? options.samples
                                         : std::clamp(static_cast<int>(options.seconds / first),
                                                      kMinSamples, kMaxSamples);
  const OtherLoad load;
  std::vector<Sample> samples, disturbed;
  while (static_cast<int>(samples.size()) < wanted &&
         static_cast<int>(samples.size() + disturbed.size()) < 3 * wanted) {
    const Sample sample = Take(pool, rows, options.instruction);
    result.peak_gops = std::max(result.peak_gops, sample.peak_gops);
    (sample.disturbed ? disturbed : samples).push_back(sample);
  }
  result.disturbed = static_cast<int>(disturbed.size());
  if (static_cast<int>(samples.size()) < kMinSamples) {
    samples.insert(samples.end(), disturbed.begin(), disturbed.end());
  }
  std::vector<double> seconds, gbps, read_gbps, roof, share;
  for (const Sample& s : samples) {
    seconds.push_back(s.seconds);
    gbps.push_back(s.bytes / s.seconds * 1e-9);
    read_gbps.push_back(s.bytes / s.read_seconds * 1e-9);
    const Roof r = RoofOf({s.bytes, read_gbps.back(), operations, result.peak_gops});
    roof.push_back(r.seconds);
    share.push_back(r.seconds / s.seconds);
  }
  result.us = Median(seconds) * 1e6;
  result.fastest_us = *std::min_element(seconds.begin(), seconds.end()) * 1e6;
  result.weights_gbps = Median(gbps);
  result.read_gbps = Median(read_gbps);
  result.gops = operations / result.us * 1e-3;
  result.roof_us = Median(roof) * 1e6;
  result.share_of_roof = Median(share);
  result.memory_bound =
      RoofOf({samples.back().bytes, result.read_gbps, operations, result.peak_gops}).memory_bound;
  result.samples = static_cast<int>(samples.size());
  result.other_cores = load.Cores();
  return result;
}

}  // namespace tandem::bench
