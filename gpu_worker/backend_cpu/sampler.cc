// One token a row. The order of the steps (temperature, top_k, top_p, min_p) is that of Hugging
// Face's processors; each works on what the one before left, renormalized:
//   logit_bias, banned ids, mask, penalties (repetition on prompt and output by HF's rule; presence
//   and frequency on the output) -> temperature -> top_k -> top_p -> min_p -> draw.
// top_p keeps the shortest prefix of the tokens by probability whose sum reaches it, min_p what is
// at least min_p times as likely as the best token. Ties go to the lower id. The draw inverts the
// cumulative distribution at UniformAt(seed, position).

#include <algorithm>
#include <limits>

#include "common/base/check.h"
#include "gpu_worker/backend_cpu/finite.h"
#include "gpu_worker/backend_cpu/ops.h"
#include "gpu_worker/backend_cpu/random.h"
#include "gpu_worker/backend_cpu/top_tokens.h"

namespace tandem::gpu::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr uint32_t kOutputCountMask = 0x00ffffffu;
// Below it exp((l - max) / T) of distinct F32 logits is 0 or 1 in all practical cases: greedy.
constexpr float kGreedyTemperature = 1e-5f;

void ApplyBias(const SampleArgs& args, const SampleParams& p, float* logits) {
  for (int32_t i = p.bias_begin; i < p.bias_end; ++i) {
    const int32_t id = args.bias_ids[i];
    if (id >= 0 && id < args.vocab) logits[id] += args.bias_values[i];
  }
  for (int32_t i = p.banned_begin; i < p.banned_end; ++i) {
    const int32_t id = args.banned_ids[i];
    if (id >= 0 && id < args.vocab) logits[id] = kMinusInfinity;
  }
}

void ApplyMask(const uint32_t* mask, int64_t vocab, float* logits) {
  for (int64_t word = 0; word * 32 < vocab; ++word) {
    if (mask[word] == 0xffffffffu) continue;
    const int64_t end = std::min(vocab, word * 32 + 32);
    for (int64_t i = word * 32; i < end; ++i) {
      if ((mask[word] >> (i - word * 32) & 1u) == 0) logits[i] = kMinusInfinity;
    }
  }
}

void ApplyPenalties(const SampleParams& p, const uint32_t* counts, int64_t vocab, float* logits) {
  for (int64_t i = 0; i < vocab; ++i) {
    if (counts[i] == 0) continue;
    if (p.repetition_penalty != 1.0f) {
      logits[i] =
          logits[i] > 0 ? logits[i] / p.repetition_penalty : logits[i] * p.repetition_penalty;
    }
    const uint32_t output = counts[i] & kOutputCountMask;
    if (output == 0) continue;
    logits[i] -= p.frequency_penalty * static_cast<float>(output);
    logits[i] -= p.presence_penalty;
  }
}

bool HasPenalties(const SampleParams& p) {
  return p.counts_row >= 0 && (p.repetition_penalty != 1.0f || p.frequency_penalty != 0.0f ||
                               p.presence_penalty != 0.0f);
}

void Adjust(const SampleArgs& args, const SampleParams& p, float* logits) {
  ApplyBias(args, p, logits);
  if (p.mask != nullptr) ApplyMask(p.mask, args.vocab, logits);
  if (HasPenalties(p)) {
    ApplyPenalties(p, args.token_counts + int64_t{p.counts_row} * args.vocab, args.vocab, logits);
  }
}

// The draw of one row, after the adjustments. Weights are exp((logit - max) / temperature), hence 1
// for the best token.
class Draw {
 public:
  Draw(const OpContext& context, const SampleParams& params, const float* logits, int64_t vocab,
       float max, ThreadScratch& scratch)
      : context_(context),
        params_(params),
        logits_(logits),
        vocab_(vocab),
        max_(max),
        scratch_(scratch) {}

  int32_t Run() {
    const double uniform = UniformAt(params_.seed, params_.position);
    if (params_.top_k > 0 && params_.top_k < vocab_) return FromTopK(uniform);
    if (params_.top_p < 1.0f) return FromTopP(uniform);
    return FromAll(uniform);
  }

 private:
  float Weight(int32_t id) const {
    float weight = (logits_[id] - max_) / params_.temperature;
    context_.kernels.exp(&weight, &weight, 1);
    return weight;
  }

  void AllWeights() {
    float* w = scratch_.weights.data();
    for (int64_t i = 0; i < vocab_; ++i) w[i] = (logits_[i] - max_) / params_.temperature;
    context_.kernels.exp(w, w, static_cast<size_t>(vocab_));
  }

  int32_t FromTopK(double uniform) {
    int64_t count = SelectTop(logits_, vocab_, params_.top_k, scratch_);
    float* w = scratch_.weights.data();
    double total = 0;
    for (int64_t i = 0; i < count; ++i) {
      w[i] = Weight(scratch_.ids[static_cast<size_t>(i)]);
      total += w[i];
    }
    if (params_.top_p < 1.0f) {
      const double wanted = total * double{params_.top_p};
      double sum = 0;
      int64_t kept = 0;
      while (kept < count && (kept == 0 || sum < wanted)) sum += w[kept++];
      count = kept;
    }
    return FromSorted(count, uniform, [&](int64_t i) { return w[i]; });
  }

  int32_t FromTopP(double uniform) {
    AllWeights();
    const float* w = scratch_.weights.data();
    const double total = context_.vectors.sum(w, static_cast<size_t>(vocab_));
    const double top_p = std::max(0.0, double{params_.top_p});
    // All tokens below (1 - p) total / vocab together weigh less than (1 - p) total, so the others
    // reach p: the prefix lies among them. Half of it leaves room for rounding.
    const auto threshold =
        static_cast<float>(0.5 * (1.0 - top_p) * total / static_cast<double>(vocab_));
    FindBlockMax(context_.vectors, w, vocab_, scratch_);
    const int64_t count = CollectAtLeast(w, vocab_, threshold, scratch_);
    const int64_t kept = SortPrefix(count, top_p * total);
    return FromSorted(kept, uniform,
                      [&](int64_t i) { return w[scratch_.ids[static_cast<size_t>(i)]]; });
  }

  // Sorts as much of scratch.ids[0, count) as it takes to reach `wanted`; returns the length of the
  // prefix that does. The first piece is small since most distributions are.
  int64_t SortPrefix(int64_t count, double wanted) {
    const float* w = scratch_.weights.data();
    const auto begin = scratch_.ids.begin();
    const ByValue order{logits_};
    double sum = 0;
    int64_t sorted = 0;
    while (sorted < count) {
      const int64_t end = std::min(count, std::max<int64_t>(64, sorted * 4));
      if (end < count) std::nth_element(begin + sorted, begin + end, begin + count, order);
      std::sort(begin + sorted, begin + end, order);
      for (; sorted < end; ++sorted) {
        if (sorted > 0 && sum >= wanted) return sorted;
        sum += w[begin[sorted]];
      }
    }
    return count;
  }

  // From the first `count` of scratch.ids, which are in order of their weights.
  template <typename WeightAt>
  int32_t FromSorted(int64_t count, double uniform, WeightAt weight_at) const {
    double total = 0;
    int64_t kept = 0;
    for (; kept < count; ++kept) {
      const float weight = weight_at(kept);
      if (kept > 0 && (weight == 0 || weight < params_.min_p)) break;
      total += weight;
    }
    double sum = 0;
    for (int64_t i = 0; i < kept; ++i) {
      sum += weight_at(i);
      if (sum > uniform * total) return scratch_.ids[static_cast<size_t>(i)];
    }
    return scratch_.ids[static_cast<size_t>(kept - 1)];
  }

  // Without top_k and top_p nothing needs an order: by id, first a block of tokens, then the token.
  int32_t FromAll(double uniform) {
    AllWeights();
    float* w = scratch_.weights.data();
    if (params_.min_p > 0) {
      for (int64_t i = 0; i < vocab_; ++i) w[i] = w[i] >= params_.min_p ? w[i] : 0.0f;
    }
    constexpr int64_t kBlock = 1024;
    const auto block_sum = [&](int64_t begin) {
      return context_.vectors.sum(w + begin, static_cast<size_t>(std::min(kBlock, vocab_ - begin)));
    };
    double total = 0;
    for (int64_t begin = 0; begin < vocab_; begin += kBlock) total += block_sum(begin);
    const double wanted = uniform * total;
    double sum = 0;
    int64_t block = 0;
    int64_t last = 0;  // of the blocks that weigh anything: rounding may leave `wanted` unreached
    for (; block < vocab_; block += kBlock) {
      const double weight = block_sum(block);
      if (weight == 0) continue;
      last = block;
      if (sum + weight > wanted) break;
      sum += weight;
    }
    return FromBlock(last, std::min(last + kBlock, vocab_), wanted - sum);
  }

  // The first token of [begin, end) at which the weights exceed `wanted`, or the last that has any.
  int32_t FromBlock(int64_t begin, int64_t end, double wanted) const {
    double sum = 0;
    int64_t last = begin;
    for (int64_t i = begin; i < end; ++i) {
      const float weight = scratch_.weights[static_cast<size_t>(i)];
      if (weight == 0) continue;
      last = i;
      sum += weight;
      if (sum > wanted) break;
    }
    return static_cast<int32_t>(last);
  }

  const OpContext& context_;
  const SampleParams& params_;
  const float* logits_;
  const int64_t vocab_;
  const float max_;
  ThreadScratch& scratch_;
};

int32_t SampleRow(OpContext& context, const SampleArgs& args, int64_t row, ThreadScratch& scratch) {
  float* logits = args.logits.data + row * args.logits.ld;
  const SampleParams& params = args.params[row];
  if (!AllFinite(logits, args.vocab)) return -1;
  Adjust(args, params, logits);
  const float max = FindBlockMax(context.vectors, logits, args.vocab, scratch);
  if (max == kMinusInfinity) return -1;  // everything is masked out
  if (params.temperature < kGreedyTemperature) {
    // The first block that holds the maximum, then the first token in it.
    int64_t i = 0;
    while (scratch.block_max[static_cast<size_t>(i)] != max) ++i;
    for (i *= kBlockTokens; logits[i] != max;) ++i;
    return static_cast<int32_t>(i);
  }
  return Draw(context, params, logits, args.vocab, max, scratch).Run();
}

}  // namespace

void Sample(OpContext& context, const SampleArgs& args) {
  TANDEM_DCHECK(args.vocab <= context.limits.max_vocab);
  // Check, adjustments, maximum, exponentials: about 16 operations a token.
  context.ForEach(
      RowCount(args.rows), 16 * args.vocab, [&](int thread, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          args.tokens[row] =
              SampleRow(context, args, row, context.scratch[static_cast<size_t>(thread)]);
        }
      });
}

}  // namespace tandem::gpu::cpu
