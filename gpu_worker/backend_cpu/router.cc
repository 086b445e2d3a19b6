#include <algorithm>
#include <limits>

#include "common/base/check.h"
#include "gpu_worker/backend_cpu/finite.h"
#include "gpu_worker/backend_cpu/ops.h"

namespace tandem::gpu::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Index of the largest of values[0, n), the lowest on ties; -1 where all are -infinity.
int BestOf(const float* values, int n) {
  int best = -1;
  float best_value = kMinusInfinity;
  for (int i = 0; i < n; ++i) {
    if (values[i] > best_value) {
      best_value = values[i];
      best = i;
    }
  }
  return best;
}

// Score of a group: its largest element, or the sum of its two largest.
float GroupScore(const float* selection, int n, bool max_only) {
  float first = kMinusInfinity;
  float second = kMinusInfinity;
  for (int i = 0; i < n; ++i) {
    if (selection[i] > first) {
      second = first;
      first = selection[i];
    } else if (selection[i] > second) {
      second = selection[i];
    }
  }
  return max_only || n < 2 ? first : first + second;
}

// Fills all but the best `groups_kept` groups with -infinity.
void LimitGroups(const RouterArgs& args, float* selection) {
  constexpr int kMaxGroups = 64;
  TANDEM_DCHECK(args.groups <= kMaxGroups && args.experts % args.groups == 0);
  const int size = args.experts / args.groups;
  float scores[kMaxGroups];
  bool kept[kMaxGroups] = {};
  for (int g = 0; g < args.groups; ++g) {
    scores[g] = GroupScore(selection + g * size, size, args.group_score_max);
  }
  for (int i = 0; i < args.groups_kept; ++i) {
    const int best = BestOf(scores, args.groups);
    if (best < 0) break;
    kept[best] = true;
    scores[best] = kMinusInfinity;
  }
  for (int g = 0; g < args.groups; ++g) {
    if (!kept[g]) std::fill_n(selection + g * size, size, kMinusInfinity);
  }
}

void Softmax(const OpContext& context, const float* logits, float* scores, int n) {
  const auto count = static_cast<size_t>(n);
  const float max = context.vectors.max(logits, count);
  for (int i = 0; i < n; ++i) scores[i] = logits[i] - max;
  context.kernels.exp(scores, scores, count);
  const auto sum = static_cast<float>(context.vectors.sum(scores, count));
  for (int i = 0; i < n; ++i) scores[i] /= sum;
}

void Sigmoid(const OpContext& context, const float* logits, float* scores, int n) {
  for (int i = 0; i < n; ++i) scores[i] = -logits[i];
  context.kernels.exp(scores, scores, static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + scores[i]);
}

void RouteRow(const OpContext& context, const RouterArgs& args, const float* logits, float* scores,
              float* selection, uint16_t* ids, float* weights) {
  std::fill_n(ids, args.top_k, kNoExpert);
  std::fill_n(weights, args.top_k, 0.0f);
  if (!AllFinite(logits, args.experts)) return;
  if (args.sigmoid) {
    Sigmoid(context, logits, scores, args.experts);
  } else {
    Softmax(context, logits, scores, args.experts);
  }
  for (int i = 0; i < args.experts; ++i) {
    selection[i] = args.selection_bias == nullptr ? scores[i] : scores[i] + args.selection_bias[i];
  }
  if (args.groups > 1 && args.groups_kept < args.groups) LimitGroups(args, selection);
  float sum = 0;
  for (int i = 0; i < args.top_k; ++i) {
    const int best = BestOf(selection, args.experts);
    if (best < 0) break;
    ids[i] = static_cast<uint16_t>(best);
    weights[i] = scores[best];
    sum += scores[best];
    selection[best] = kMinusInfinity;
  }
  for (int i = 0; i < args.top_k; ++i) {
    if (ids[i] == kNoExpert) break;
    if (args.renormalize) weights[i] /= sum + args.renormalize_eps;
    weights[i] *= args.factor;
  }
}

}  // namespace

void Router(OpContext& context, const RouterArgs& args) {
  TANDEM_DCHECK(args.experts <= context.limits.max_experts);
  // Scores cost about 8 operations an expert, every pick one pass.
  const int64_t work = int64_t{args.experts} * (8 + 2 * args.top_k);
  context.ForEach(RowCount(args.rows), work, [&](int thread, int64_t begin, int64_t end) {
    float* scores = context.scratch[static_cast<size_t>(thread)].weights.data();
    for (int64_t row = begin; row < end; ++row) {
      RouteRow(context, args, args.logits.data + row * args.logits.ld, scores,
               scores + args.experts, args.ids + row * args.top_k, args.weights + row * args.top_k);
    }
  });
}

}  // namespace tandem::gpu::cpu
