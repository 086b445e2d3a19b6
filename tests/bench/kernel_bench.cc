// GEMM of one packed matrix, far larger than any cache, by kernel table, format and rows.
// Argument: rows. Counters: bytes of weights read a second; multiply-adds a second (x 2).

#include <benchmark/benchmark.h>

#include <random>
#include <string>
#include <vector>

#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/select.h"

namespace tandem::kernels {
namespace {

constexpr uint32_t kInputs = 2048;
constexpr uint32_t kOutputs = 32768;  // 128 MiB of BF16

void BM_Gemm(benchmark::State& state, const KernelTable* table, WeightFormat format) {
  const auto rows = static_cast<uint32_t>(state.range(0));
  const FormatKernels& kernels = table->format(format);
  const std::vector<float> source(kInputs * 64, 0.5f);
  PackSource pack{};
  pack.data = source.data();
  pack.row_stride = 0;  // every output has the same weights; only their bytes matter
  const OwnedMatrix w = OwnedMatrix::Pack(format, 0, pack, kOutputs, kInputs);
  const size_t stride = ActivationStride(kInputs);
  const std::vector<float> x(stride * rows, 0.25f);
  std::vector<float> y(size_t{kOutputs} * rows);
  GemmCall call{};
  call.x = x.data();
  call.x_stride = stride;
  call.y = y.data();
  call.y_stride = kOutputs;
  call.rows = rows;
  call.panel_end = PanelCount(kOutputs);
  for (auto _ : state) {
    kernels.gemm_exact(w.view(), call);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * w.bytes()));
  state.counters["flops"] =
      benchmark::Counter(2.0 * rows * kInputs * kOutputs * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}

// Plain loads over as many bytes: the ceiling of one thread.
void BM_Read(benchmark::State& state) {
  const std::vector<uint64_t> memory(size_t{kInputs} * kOutputs * 2 / 8, 1);
  for (auto _ : state) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i < memory.size(); i += 8) {
      for (size_t j = 0; j < 8; ++j) sums[j] ^= memory[i + j];
    }
    benchmark::DoNotOptimize(sums);
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * memory.size() * 8));
}

}  // namespace
}  // namespace tandem::kernels

int main(int argc, char** argv) {
  using namespace tandem;           // NOLINT: a program's main
  using namespace tandem::kernels;  // NOLINT
  benchmark::RegisterBenchmark("read", BM_Read);
  for (const KernelTable* table : AllKernelTables()) {
    if (table->isa == Isa::kRef || !IsRunnable(*table, DetectCpuFeatures())) continue;
    for (auto [format, name] :
         {std::pair{WeightFormat::kBf16, "bf16"}, {WeightFormat::kF32, "f32"}}) {
      benchmark::RegisterBenchmark((std::string("gemm/") + table->name + "/" + name).c_str(),
                                   BM_Gemm, table, format)
          ->Arg(1)
          ->Arg(2)
          ->Arg(4)
          ->Arg(8)
          ->Arg(12)
          ->Arg(64)
          ->Arg(256)
          ->Unit(benchmark::kMillisecond);
    }
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
