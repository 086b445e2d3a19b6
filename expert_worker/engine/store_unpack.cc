#include "expert_worker/engine/store_unpack.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "expert_worker/kernels/panel_layout.h"

namespace tandem::expert {
namespace {

// Row `row` on of a canonical matrix, its columns from `column` on.
kernels::UnpackTarget TargetOf(CanonicalMatrix& matrix, uint32_t row, uint32_t column) {
  const size_t first = size_t{row} * matrix.columns + column;
  return {matrix.elements.data() + first * ElementBytes(matrix.format.format), matrix.columns,
          matrix.groups.data() + size_t{row} * matrix.groups_per_row(), matrix.groups_per_row(),
          column};
}

void UnpackGateUp(const WeightStore& store, uint32_t layer, uint32_t expert, CanonicalExpert* out) {
  const uint32_t intermediate = store.manifest().intermediate;
  const uint32_t quantum = store.manifest().quantum;
  for (uint32_t s = 0; s < store.segments(); ++s) {
    const uint32_t first = (store.owned().begin + s) * quantum;
    const uint32_t width = store.segment_width(s);
    const kernels::PackedMatrix packed = store.GateUp(layer, expert, s);
    const WeightFormat format = store.format(layer).gate_up.format;
    kernels::UnpackRows(format, packed, 0, width, TargetOf(out->gate_up, first, 0));
    kernels::UnpackRows(format, packed, width, 2 * width,
                        TargetOf(out->gate_up, intermediate + first, 0));
    const float* bias = store.GateUpBias(layer, expert, s);
    if (bias == nullptr) continue;
    std::copy_n(bias, width, out->gate_up_bias.begin() + first);
    std::copy_n(bias + width, width, out->gate_up_bias.begin() + intermediate + first);
  }
}

void UnpackDown(const WeightStore& store, uint32_t layer, uint32_t expert, CanonicalExpert* out) {
  if (store.segments() == 0) return;
  const uint32_t first = store.owned().begin * store.manifest().quantum;
  kernels::UnpackRows(store.format(layer).down.format, store.Down(layer, expert), 0,
                      store.manifest().hidden, TargetOf(out->down, 0, first));
  const float* bias = store.DownBias(layer, expert);
  if (bias != nullptr) std::copy_n(bias, store.manifest().hidden, out->down_bias.begin());
}

bool SameModel(const StoreManifest& a, const StoreManifest& b) {
  return a.model_hash == b.model_hash && a.hidden == b.hidden && a.intermediate == b.intermediate &&
         a.quantum == b.quantum && a.experts == b.experts && a.biases == b.biases &&
         std::memcmp(a.layer, b.layer, sizeof(a.layer)) == 0;
}

}  // namespace

absl::Status CheckComplete(std::span<const WeightStore* const> stores) {
  if (stores.empty()) return absl::FailedPreconditionError("no weight store is there");
  const StoreManifest& first = stores[0]->manifest();
  uint32_t next = 0;
  for (const WeightStore* store : stores) {
    if (!SameModel(store->manifest(), first)) {
      return absl::FailedPreconditionError("the weight stores are of different models");
    }
    if (store->segments() == 0) continue;
    if (store->owned().begin != next) {
      return absl::FailedPreconditionError(
          absl::StrCat("segment ", next, " is in no weight store, or in several"));
    }
    next = store->owned().end;
  }
  if (next != SegmentCount(first.intermediate, first.quantum)) {
    return absl::FailedPreconditionError(absl::StrCat("segment ", next, " is in no weight store"));
  }
  return absl::OkStatus();
}

void UnpackExpert(std::span<const WeightStore* const> stores, uint32_t layer, uint32_t expert,
                  CanonicalExpert* out) {
  const StoreManifest& m = stores[0]->manifest();
  const LayerFormat& format = stores[0]->format(layer);
  out->gate_up.Reshape(format.gate_up, 2 * m.intermediate, m.hidden);
  out->down.Reshape(format.down, m.hidden, m.intermediate);
  out->gate_up_bias.resize(m.biases != 0 ? size_t{2} * m.intermediate : 0);
  out->down_bias.resize(m.biases != 0 ? m.hidden : 0);
  for (const WeightStore* store : stores) {
    UnpackGateUp(*store, layer, expert, out);
    UnpackDown(*store, layer, expert, out);
  }
}

}  // namespace tandem::expert
