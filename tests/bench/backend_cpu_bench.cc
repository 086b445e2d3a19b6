// Ops of the CPU backend outside the packed linears, one thread unless the name says otherwise.
// Attention reports the bytes of keys and values it walks, the sampler tokens of vocabulary.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "common/hw/cpu_features.h"
#include "common/tensor/convert.h"
#include "expert_worker/kernels/select.h"
#include "gpu_worker/backend_cpu/cpu_backend.h"

namespace tandem::gpu {
namespace {

constexpr int kBlockTokens = 16;

std::unique_ptr<CpuBackend> MakeBackend(int threads) {
  CpuBackendOptions options;
  options.threads = threads;
  options.kernels = kernels::SelectKernelTable(Isa::kAmx, DetectCpuFeatures());
  options.max_rows = 512;
  options.max_vocab = 200'000;
  options.max_experts = 512;
  return std::make_unique<CpuBackend>(options);
}

std::vector<float> RandomVector(size_t count) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Random elements in the backend's own memory (huge pages).
float* MakeCache(Backend& backend, size_t count, bool bf16) {
  const std::vector<float> values = RandomVector(count);
  auto* data = static_cast<float*>(backend.Allocate(count * sizeof(float)).value());
  if (bf16) {
    ConvertF32ToBf16(values.data(), static_cast<int64_t>(count), data);
  } else {
    std::copy(values.begin(), values.end(), data);
  }
  return data;
}

// The last `rows` positions of one sequence of `tokens`.
struct Sequence {
  Sequence(int rows, int tokens)
      : positions(rows), sequence(rows, 0), blocks(tokens / kBlockTokens + 1) {
    std::iota(positions.begin(), positions.end(), tokens - rows);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937(2));
  }
  RowPlace Place() const {
    return {positions.data(), sequence.data(), blocks.data(), static_cast<int>(blocks.size()),
            kBlockTokens};
  }
  std::vector<int32_t> positions, sequence, blocks;
};

// 32 query heads on 8 KV heads of 128.
void BM_Attention(benchmark::State& state) {
  const int rows = static_cast<int>(state.range(0)), tokens = static_cast<int>(state.range(1));
  const bool bf16 = state.range(2) != 0;
  auto backend = MakeBackend(static_cast<int>(state.range(3)));
  const Sequence sequence(rows, tokens);
  const int64_t width = 8 * 128;
  const size_t cached = sequence.blocks.size() * kBlockTokens * width;
  float* k = MakeCache(*backend, cached, bf16);
  float* v = MakeCache(*backend, cached, bf16);
  std::vector<float> q = RandomVector(static_cast<size_t>(rows) * 4096), out(q.size());
  AttentionArgs args;
  args.rows.bound = rows;
  args.place = sequence.Place();
  args.cache = {
      k,     v,    bf16 ? DType::kBF16 : DType::kF32, static_cast<int>(sequence.blocks.size()),
      width, width};
  args.q = ConstMatrix(q.data(), 4096);
  args.out = {out.data(), 4096};
  args.heads = 32;
  args.kv_heads = 8;
  args.head_dim = 128;
  args.scale = 0.088f;
  for (auto _ : state) backend->Attention(args);
  state.SetBytesProcessed(state.iterations() * tokens * width * 2 * (bf16 ? 2 : 4));
  state.counters["gflops"] = benchmark::Counter(4.0 * 4096 * rows * (tokens - rows / 2.0) * 1e-9,
                                                benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Attention)
    ->ArgNames({"rows", "tokens", "bf16", "threads"})
    ->Args({1, 1024, 0, 1})
    ->Args({1, 8192, 0, 1})
    ->Args({1, 8192, 1, 1})
    ->Args({1, 8192, 0, 2})
    ->Args({256, 2048, 0, 1})
    ->Args({256, 2048, 1, 1})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

// DeepSeek's shape: 128 heads on one latent row of 512 + 64.
void BM_LatentAttention(benchmark::State& state) {
  const int tokens = static_cast<int>(state.range(0));
  auto backend = MakeBackend(1);
  const Sequence sequence(1, tokens);
  float* rows = MakeCache(*backend, sequence.blocks.size() * kBlockTokens * 576, false);
  std::vector<float> q = RandomVector(128 * 576), out(128 * 512);
  LatentAttentionArgs args;
  args.rows.bound = 1;
  args.place = sequence.Place();
  args.cache = {rows, nullptr, DType::kF32, static_cast<int>(sequence.blocks.size()), 576, 0};
  args.q_latent = ConstMatrix(q.data(), 128 * 512);
  args.q_rope = ConstMatrix(q.data() + 128 * 512, 128 * 64);
  args.q_rope_head_stride = 64;
  args.out = {out.data(), 128 * 512};
  args.heads = 128;
  args.latent_dim = 512;
  args.rope_dim = 64;
  args.scale = 0.1f;
  for (auto _ : state) backend->LatentAttention(args);
  state.counters["gflops"] = benchmark::Counter(2.0 * 128 * (576 + 512) * tokens * 1e-9,
                                                benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_LatentAttention)->Arg(2048)->Unit(benchmark::kMicrosecond);

SampleParams Params(int64_t kind) {
  switch (kind) {
    case 0:
      return {};
    case 1:
      return {.temperature = 1};
    case 2:
      return {.temperature = 0.8f, .top_k = 50};
    default:
      return {.temperature = 0.8f, .top_p = 0.95f};
  }
}

void BM_Sample(benchmark::State& state) {
  const int64_t vocab = 151'936;
  auto backend = MakeBackend(1);
  std::vector<float> logits = RandomVector(static_cast<size_t>(vocab));
  for (float& x : logits) x *= 3;
  SampleParams params = Params(state.range(0));
  int32_t token = 0;
  SampleArgs args;
  args.rows.bound = 1;
  args.logits = {logits.data(), vocab};
  args.vocab = vocab;
  args.params = &params;
  args.tokens = &token;
  for (auto _ : state) {
    ++params.position;
    backend->Sample(args);
  }
  state.SetItemsProcessed(state.iterations() * vocab);
}
BENCHMARK(BM_Sample)
    ->ArgName("greedy_plain_topk_topp")
    ->DenseRange(0, 3)
    ->Unit(benchmark::kMicrosecond);

void BM_RmsNorm(benchmark::State& state) {
  const int64_t width = 4096;
  auto backend = MakeBackend(1);
  std::vector<float> x = RandomVector(4096), w(4096, 1.0f), out(4096);
  RmsNormArgs args;
  args.rows.bound = 1;
  args.x = ConstMatrix(x.data(), width);
  args.out = {out.data(), width};
  args.weight = w.data();
  args.width = width;
  args.eps = 1e-6f;
  for (auto _ : state) backend->RmsNorm(args);
}
BENCHMARK(BM_RmsNorm);

void BM_Router(benchmark::State& state) {
  auto backend = MakeBackend(1);
  std::vector<float> logits = RandomVector(256), weights(8);
  std::vector<uint16_t> ids(8);
  RouterArgs args;
  args.rows.bound = 1;
  args.logits = ConstMatrix(logits.data(), 256);
  args.experts = 256;
  args.top_k = 8;
  args.sigmoid = true;
  args.groups = 8;
  args.groups_kept = 4;
  args.ids = ids.data();
  args.weights = weights.data();
  for (auto _ : state) backend->Router(args);
}
BENCHMARK(BM_Router);

}  // namespace
}  // namespace tandem::gpu

BENCHMARK_MAIN();
