#include <algorithm>

#include "common/base/check.h"
#include "gpu_worker/backend_cpu/ops.h"

namespace tandem::gpu::cpu {
namespace {

// Pointers of one row.
struct RowPicks {
  const uint16_t* ids;
  const float* weights;
  uint16_t* worker_ids;
  uint8_t* deferred;
};

// The lightest of the worker's picks that is not deferred yet, the later rank on ties; -1: none.
int Lightest(const RowPicks& row, int top_k) {
  int best = -1;
  for (int i = 0; i < top_k; ++i) {
    if (row.worker_ids[i] == kNoExpert || row.deferred[i] != 0) continue;
    if (best < 0 || row.weights[i] <= row.weights[best]) best = i;
  }
  return best;
}

void DeferPicks(const RowPicks& row, int top_k, const DeferralLimits& limits, PickSums* sums) {
  // In double the sums of a row's few weights are exact, so all of them are a mass of 1.
  double total = 0;
  for (int i = 0; i < top_k; ++i) total += row.ids[i] == kNoExpert ? 0.0 : double{row.weights[i]};
  if (!(total > 0)) return;
  double mass = 0;
  for (int n = 0; n < limits.max_deferred; ++n) {
    const int pick = Lightest(row, top_k);
    if (pick < 0 || mass + row.weights[pick] > double{limits.max_mass} * total) break;
    mass += row.weights[pick];
    row.deferred[pick] = 1;
    ++sums->deferred;
  }
  sums->deferred_mass = static_cast<float>(mass / total);
}

void SplitRow(const SplitPicksArgs& args, int64_t row) {
  const int64_t first = row * args.top_k;
  const RowPicks picks{args.ids + first, args.weights + first, args.worker_ids + first,
                       args.deferred == nullptr ? nullptr : args.deferred + first};
  PickSums& sums = args.sums[row];
  sums = {};
  for (int i = 0; i < args.top_k; ++i) {
    const uint16_t id = picks.ids[i];
    const bool routed = id < args.experts;
    const uint16_t slot =
        routed && args.slot_of_expert != nullptr ? args.slot_of_expert[id] : kNoExpert;
    picks.worker_ids[i] = routed && slot == kNoExpert ? id : kNoExpert;
    if (args.resident_slots != nullptr) args.resident_slots[first + i] = slot;
    sums.resident = static_cast<uint16_t>(sums.resident + (slot != kNoExpert ? 1 : 0));
  }
  if (picks.deferred == nullptr) return;
  std::fill_n(picks.deferred, args.top_k, uint8_t{0});
  const bool may = args.may_defer == nullptr || args.may_defer[row] != 0;
  if (may && args.limits != nullptr) DeferPicks(picks, args.top_k, *args.limits, &sums);
}

}  // namespace

void SplitPicks(OpContext& context, const SplitPicksArgs& args) {
  const int64_t work = int64_t{args.top_k} * args.top_k;
  context.ForEach(RowCount(args.rows), work, [&](int /*thread*/, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) SplitRow(args, row);
  });
}

}  // namespace tandem::gpu::cpu
