// GEMM of one packed matrix, far larger than any cache, by kernel table, format and rows, beside
// what bounds it: plain reads of as many bytes, and the peaks of the instructions used.
//
//   kernel_bench --benchmark_filter='read|peak|gemm/avx2/int4_bf16'
//
// Names: gemm/TABLE/FORMAT/rows (the fast kernel) and exact/TABLE/FORMAT/rows. Counters: bytes of
// weights a second; `ops` a second, two a multiply-add.

#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"
#include "expert_worker/kernels/select.h"
#include "tests/bench/peak_probes.h"
#include "tests/expert_worker/activation_rows.h"
#include "tests/expert_worker/random_weights.h"

namespace tandem::kernels {
namespace {

constexpr uint32_t kInputs = 2048;
constexpr size_t kMatrixBytes = size_t{96} << 20;  // three times an L3 of 32 MiB
constexpr int64_t kRowCounts[] = {1, 2, 4, 8, 16, 32, 64};

struct Subject {
  const KernelTable* table;
  WeightFormat format;
  bool exact;
};

// Scales as checkpoints have them: BF16 ones of 128 inputs, F8 blocks of 128.
uint32_t GroupColumns(WeightFormat format) {
  const bool wide =
      TraitsOf(format).scale == ScaleType::kBf16 || TraitsOf(format).scale == ScaleType::kF32;
  return wide ? 128 : UsualGroup(format);
}

// The matrix of the benchmark that ran last is kept: the next is often of the same format.
const OwnedMatrix& MatrixOf(WeightFormat format) {
  static OwnedMatrix matrix;
  static WeightFormat packed = WeightFormat::kCount;
  if (packed == format) return matrix;
  const uint32_t group = GroupColumns(format);
  const RandomWeights weights(format, group, 1, kInputs, 1);
  PackSource source = weights.Source();
  // Every output has the same weights; only their bytes matter.
  source.row_stride = 0;
  source.quantized.code_stride = 0;
  source.quantized.group_stride = 0;
  const auto panels = static_cast<uint32_t>(kMatrixBytes / PanelBytes(format, kInputs, group));
  matrix = OwnedMatrix();
  matrix = OwnedMatrix::Pack(format, group, source, panels * kPanelWidth, kInputs);
  packed = format;
  return matrix;
}

void BM_Gemm(benchmark::State& state, const Subject& subject) {
  const auto rows = static_cast<uint32_t>(state.range(0));
  const FormatKernels& kernels = subject.table->format(subject.format);
  const OwnedMatrix& w = MatrixOf(subject.format);
  const size_t stride = ActivationStride(kInputs);
  const std::vector<float> x(stride * rows, 0.25f);
  const ActivationRows activations(*subject.table, subject.format, x, rows, kInputs, kInputs);
  std::vector<float> y(size_t{w.view().n} * rows);
  GemmCall call{};
  activations.Fill(call);
  call.x = x.data();
  call.x_stride = stride;
  call.y = y.data();
  call.y_stride = w.view().n;
  call.rows = rows;
  call.panel_end = PanelCount(w.view().n);
  const GemmFunction gemm = subject.exact ? kernels.gemm_exact : kernels.gemm;
  for (auto _ : state) {
    gemm(w.view(), call);
    benchmark::ClobberMemory();
  }
  const auto iterations = static_cast<double>(state.iterations());
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * w.bytes()));
  state.counters["ops"] = benchmark::Counter(2.0 * rows * kInputs * w.view().n * iterations,
                                             benchmark::Counter::kIsRate);
}

// Plain loads over as many bytes: the ceiling of one thread.
void BM_Read(benchmark::State& state) {
  const std::vector<uint64_t> memory(kMatrixBytes / sizeof(uint64_t), 1);
  for (auto _ : state) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i < memory.size(); i += 8) {
      for (size_t j = 0; j < 8; ++j) sums[j] ^= memory[i + j];
    }
    benchmark::DoNotOptimize(sums);
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * kMatrixBytes));
}

void BM_Peak(benchmark::State& state, const bench::PeakProbe& probe) {
  constexpr uint64_t kIterations = 100000;
  for (auto _ : state) probe.run(kIterations);
  const double ops = probe.ops * static_cast<double>(kIterations * state.iterations());
  state.counters["ops"] = benchmark::Counter(ops, benchmark::Counter::kIsRate);
}

void RegisterPeaks(const CpuFeatures& features) {
  const auto add = [](const bench::PeakProbe& probe) {
    benchmark::RegisterBenchmark((std::string("peak/") + probe.name).c_str(),
                                 [&probe](benchmark::State& state) { BM_Peak(state, probe); });
  };
  if (features.avx2) {
    for (const bench::PeakProbe* probe :
         {&bench::kAvx2Fma, &bench::kAvx2Maddubs, &bench::kAvx2SignMaddubs, &bench::kAvx2Maddubs2,
          &bench::kAvx2Maddubs4, &bench::kAvx2Maddwd}) {
      add(*probe);
    }
  }
  if (features.avx512) add(bench::kAvx512Fma);
  if (features.avx512_vnni) add(bench::kAvx512Vpdpbusd);
  if (features.avx512_bf16) add(bench::kAvx512Vdpbf16);
}

void RegisterGemm(const Subject& subject) {
  const std::string name = std::string(subject.exact ? "exact/" : "gemm/") + subject.table->name +
                           "/" + kFormatNames[static_cast<int>(subject.format)];
  auto* benchmark = benchmark::RegisterBenchmark(
      name.c_str(), [subject](benchmark::State& state) { BM_Gemm(state, subject); });
  for (const int64_t rows : kRowCounts) benchmark->Arg(rows);
  benchmark->Unit(benchmark::kMillisecond);
}

}  // namespace
}  // namespace tandem::kernels

int main(int argc, char** argv) {
  using namespace tandem;           // NOLINT: a program's main
  using namespace tandem::kernels;  // NOLINT
  const CpuFeatures features = DetectCpuFeatures();
  benchmark::RegisterBenchmark("read", BM_Read)->Unit(benchmark::kMillisecond);
  RegisterPeaks(features);
  for (const FormatTraits& traits : kFormats) {
    for (const KernelTable* table : AllKernelTables()) {
      if (table->isa == Isa::kRef || !IsRunnable(*table, features)) continue;
      for (const bool exact : {false, true}) RegisterGemm({table, traits.format, exact});
    }
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
