#pragma once

// A POD view of a dense row-major tensor. Does not own its memory; copies freely.

#include <array>
#include <cstdint>

#include "common/tensor/dtype.h"

namespace tandem {

struct TensorView {
  static constexpr int kMaxRank = 5;

  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape = {};

  int64_t Elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data);
  }
};

}  // namespace tandem
