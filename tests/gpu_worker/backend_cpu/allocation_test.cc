// After construction no op allocates: every operator new of this binary is counted while ops run.

#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>

#include "tests/gpu_worker/backend_cpu/sampler_test.h"

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};

void* CountedAllocate(size_t bytes) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
  return std::malloc(bytes == 0 ? 1 : bytes);
}

// Not inlined: the compiler would take a free of what `new` returned for a mistake.
__attribute__((noinline)) void Release(void* memory) { std::free(memory); }

}  // namespace

void* operator new(size_t bytes) {
  if (void* memory = CountedAllocate(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new[](size_t bytes) { return operator new(bytes); }
// Libraries allocate with these and free with the deletes below.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return CountedAllocate(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return CountedAllocate(bytes);
}
void operator delete(void* memory) noexcept { Release(memory); }
void operator delete[](void* memory) noexcept { Release(memory); }
void operator delete(void* memory, size_t) noexcept { Release(memory); }
void operator delete[](void* memory, size_t) noexcept { Release(memory); }

namespace tandem::gpu {
namespace {

class AllocationTest : public ::testing::TestWithParam<int> {
 protected:
  template <typename Fn>
  int CountAllocations(Fn fn) {
    allocations = 0;
    counting = true;
    fn();
    counting = false;
    return allocations;
  }
};
INSTANTIATE_TEST_SUITE_P(Threads, AllocationTest, ::testing::Values(1, 2));

TEST_P(AllocationTest, CountsWhatIsAllocated) {
  EXPECT_GT(
      CountAllocations([] { std::vector<int>(100).swap(*std::make_unique<std::vector<int>>()); }),
      0);
}

TEST_P(AllocationTest, SamplingAndLogprobsDoNotAllocate) {
  auto backend = MakeBackend({.threads = GetParam()});
  const int64_t vocab = 50'000;
  SampleStep step(RandomVector(vocab, 1), {.temperature = 1});
  for (const SampleParams& p :
       {SampleParams{}, SampleParams{.temperature = 1, .top_k = 40},
        SampleParams{.temperature = 3, .top_p = 0.95f},
        SampleParams{.temperature = 1, .top_k = 2000, .top_p = 0.5f, .min_p = 0.1f}}) {
    step.AddRow(RandomVector(vocab, 2), p);
  }
  std::vector<int32_t> tokens(5), targets(5, 3), top(5, 20), ranks(5), top_ids(100);
  std::vector<float> logprobs(5), top_logprobs(100);
  const int count = CountAllocations([&] {
    SampleArgs args;
    args.rows.bound = 5;
    args.logits = AsMatrix(step.logits, vocab);
    args.vocab = vocab;
    args.params = step.params.data();
    args.tokens = tokens.data();
    backend->Sample(args);
    LogprobsArgs log;
    log.rows.bound = 5;
    log.logits = AsMatrix(step.logits, vocab);
    log.vocab = vocab;
    log.targets = targets.data();
    log.top = top.data();
    log.max_top = 20;
    log.target_logprobs = logprobs.data();
    log.target_ranks = ranks.data();
    log.top_ids = top_ids.data();
    log.top_logprobs = top_logprobs.data();
    backend->Logprobs(log);
  });
  EXPECT_EQ(count, 0);
}

TEST_P(AllocationTest, ModelOpsDoNotAllocate) {
  auto backend = MakeBackend({.threads = GetParam()});
  const int rows = 40, heads = 8, dim = 32, width = heads * dim;
  const auto weight = MakeLinear(*backend, RandomVector(width * width, 1), width, width);
  std::vector<float> x = RandomVector(rows * width, 2), y(rows * width), norm(width, 1.0f);
  TestCache cache({.sequences = 1,
                   .blocks_per_sequence = 4,
                   .block_tokens = 16,
                   .k_width = width,
                   .v_width = width},
                  3);
  std::vector<int32_t> positions(rows);
  std::iota(positions.begin(), positions.end(), 0);
  const RowPlace place = cache.Place(std::vector<int32_t>(rows, 0), positions);
  std::vector<uint16_t> ids(rows * 4);
  std::vector<float> weights(rows * 4);
  const int count = CountAllocations([&] {
    const Rows step{.bound = rows};
    backend->RmsNorm({step, AsMatrix(x, width), AsMatrix(x, width), norm.data(), width, 1, 1e-6f});
    backend->Linear({step, weight.get(), nullptr, AsMatrix(x, width), AsMatrix(y, width)});
    backend->CacheWrite({step, place, AsMatrix(x, width), AsMatrix(y, width), cache.cache()});
    AttentionArgs attention;
    attention.rows = step;
    attention.place = place;
    attention.cache = cache.cache();
    attention.q = AsMatrix(x, width);
    attention.out = AsMatrix(y, width);
    attention.heads = attention.kv_heads = heads;
    attention.head_dim = dim;
    attention.scale = 0.2f;
    backend->Attention(attention);
    backend->SiluMul({step, AsMatrix(x, width), AsMatrix(y, width), AsMatrix(y, width), width});
    RouterArgs router;
    router.rows = step;
    router.logits = AsMatrix(y, width);
    router.experts = width;
    router.top_k = 4;
    router.ids = ids.data();
    router.weights = weights.data();
    backend->Router(router);
  });
  EXPECT_EQ(count, 0);
}

}  // namespace
}  // namespace tandem::gpu
