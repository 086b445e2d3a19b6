#include "tests/bench/random_experts.h"

namespace tandem::bench {
namespace {

// Numerical Recipes' generator: one multiply-add a weight.
constexpr uint32_t Next(uint32_t state) { return state * 1664525u + 1013904223u; }

// Of either sign, 2^-7 <= |value| < 2^-6: a dot product with thousands of them stays small.
constexpr uint32_t SmallFloat(uint32_t state) {
  return 0x3C000000u | ((state >> 9) & 0x007F0000u) | (state & 0x80000000u);
}

}  // namespace

DType RandomExperts::native_dtype() const {
  return format_ == WeightFormat::kF32 ? DType::kF32 : DType::kBF16;
}

absl::Status RandomExperts::Read(int layer, int expert, ExpertPart part, Range rows, Range cols,
                                 DType dtype, void* out) const {
  const int64_t count = rows.size() * cols.size();
  auto state = static_cast<uint32_t>(layer * 104729 + expert * 7919 + static_cast<int>(part) * 31 +
                                     rows.begin);
  for (int64_t i = 0; i < count; ++i) {
    state = Next(state);
    if (dtype == DType::kBF16) {
      static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(SmallFloat(state) >> 16);
    } else {
      static_cast<uint32_t*>(out)[i] = SmallFloat(state);
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem::bench
