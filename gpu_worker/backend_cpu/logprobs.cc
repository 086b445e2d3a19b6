// log_softmax at one target and at the largest entries of a row. The exponentials are F32 (within
// an ulp), their sum and its logarithm F64: the error is that of rounding the result.

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/base/check.h"
#include "gpu_worker/backend_cpu/ops.h"
#include "gpu_worker/backend_cpu/top_tokens.h"

namespace tandem::gpu::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Log of the sum of exp(logit - max), in blocks of a fixed size.
double LogSumExp(const OpContext& context, const float* logits, int64_t vocab, float max) {
  constexpr int64_t kBlock = 1024;
  float block[kBlock];
  double sum = 0;
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int64_t n = std::min(kBlock, vocab - begin);
    for (int64_t i = 0; i < n; ++i) block[i] = logits[begin + i] - max;
    context.kernels.exp(block, block, static_cast<size_t>(n));
    sum += context.vectors.sum(block, static_cast<size_t>(n));
  }
  return std::log(sum);
}

// Finite, or masked out; not all of them masked out.
bool IsUsable(const float* logits, int64_t vocab, float max) {
  unsigned bad = 0;
  for (int64_t i = 0; i < vocab; ++i) bad |= static_cast<unsigned>(!(logits[i] < kInfinity));
  return bad == 0 && max > -kInfinity;
}

// 1 + the tokens that come before `target`.
int32_t RankOf(const float* logits, int64_t vocab, int32_t target) {
  const float value = logits[target];
  int32_t before = 0;
  for (int64_t i = 0; i < vocab; ++i) before += logits[i] > value ? 1 : 0;
  for (int64_t i = 0; i < target; ++i) before += logits[i] == value ? 1 : 0;
  return before + 1;
}

void LogprobsRow(const OpContext& context, const LogprobsArgs& args, int64_t row,
                 ThreadScratch& scratch) {
  const float* logits = args.logits.data + row * args.logits.ld;
  const int32_t target = args.targets[row];
  const int wanted = args.top == nullptr ? 0 : std::clamp(args.top[row], 0, args.max_top);
  if (target < 0) return;
  const float max = FindBlockMax(context.vectors, logits, args.vocab, scratch);
  const bool usable = IsUsable(logits, args.vocab, max);
  const double log_sum = usable ? LogSumExp(context, logits, args.vocab, max) : 0;
  const auto logprob = [&](int32_t id) {
    return usable ? static_cast<float>(double{logits[id]} - double{max} - log_sum) : kNan;
  };
  TANDEM_DCHECK(target < args.vocab);
  args.target_logprobs[row] = logprob(target);
  args.target_ranks[row] = usable ? RankOf(logits, args.vocab, target) : 0;
  const int64_t found = usable ? SelectTop(logits, args.vocab, wanted, scratch) : 0;
  for (int i = 0; i < wanted; ++i) {
    const int32_t id = i < found ? scratch.ids[static_cast<size_t>(i)] : -1;
    args.top_ids[row * args.max_top + i] = id;
    args.top_logprobs[row * args.max_top + i] = id < 0 ? kNan : logprob(id);
  }
}

}  // namespace

// Rows whose logits are NaN or +infinity, or all masked out, get NaN, rank 0 and ids of -1.
void Logprobs(OpContext& context, const LogprobsArgs& args) {
  TANDEM_DCHECK(args.vocab <= context.limits.max_vocab);
  context.ForEach(RowCount(args.rows), 16 * args.vocab,
                  [&](int thread, int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      LogprobsRow(context, args, row, context.scratch[static_cast<size_t>(thread)]);
                    }
                  });
}

}  // namespace tandem::gpu::cpu
