#pragma once

// Routed experts with random weights of any format, and their exact values.

#include <cstdint>
#include <cstring>
#include <vector>

#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"
#include "tests/expert_worker/expert_fakes.h"
#include "tests/expert_worker/random_weights.h"

namespace tandem::expert {

class QuantizedExperts final : public KnownExperts {
 public:
  QuantizedExperts(const FakeShape& shape, const MatrixFormat& gate_up, const MatrixFormat& down,
                   uint32_t seed)
      : KnownExperts(shape), gate_up_(gate_up), down_(down) {
    for (uint32_t i = 0; i < shape.layers * shape.experts * 3; ++i) {
      const bool is_down = i % 3 == 2;
      const MatrixFormat& f = is_down ? down : gate_up;
      const uint32_t n = is_down ? shape.hidden : shape.intermediate;
      const uint32_t k = is_down ? shape.intermediate : shape.hidden;
      weights_.emplace_back(f.format, f.group_columns, n, k, seed + i);
      const auto packed =
          kernels::OwnedMatrix::Pack(f.format, f.group_columns, weights_.back().Source(), n, k);
      values_.emplace_back(size_t{n} * k);
      kernels::UnpackPanels(f.format, packed.view(), values_.back().data());
    }
  }

  MatrixFormat format(const ExpertMatrix& m) const override {
    return m.part == ExpertPart::kDown ? down_ : gate_up_;
  }
  const float* part(int layer, int expert, ExpertPart which) const override {
    return values_[Index(layer, expert, which)].data();
  }

  absl::Status ReadElements(const ExpertMatrix& m, Range rows, Range cols, WeightFormat plain,
                            void* out) const override {
    if (plain != format(m).format) return absl::InternalError("not the experts' own format");
    const size_t bytes = plain == WeightFormat::kF32 ? 4 : 2;
    const kernels::PackSource source = SourceOf(m, rows, cols);
    const size_t width = static_cast<size_t>(cols.size()) * bytes;
    for (size_t r = 0; r < static_cast<size_t>(rows.size()); ++r) {
      std::memcpy(static_cast<char*>(out) + r * width,
                  static_cast<const char*>(source.data) + r * source.row_stride * bytes, width);
    }
    return absl::OkStatus();
  }
  absl::Status ReadCodes(const ExpertMatrix& m, Range rows, Range cols, uint8_t* codes,
                         GroupParameters* groups) const override {
    const QuantizedView view = SourceOf(m, rows, cols).quantized;
    const auto width = static_cast<size_t>(cols.size());
    const uint32_t touched = GroupsTouched(static_cast<uint32_t>(cols.begin),
                                           static_cast<uint32_t>(cols.end), view.group_columns);
    for (size_t r = 0; r < static_cast<size_t>(rows.size()); ++r) {
      std::memcpy(codes + r * width, view.codes + r * view.code_stride, width);
      std::copy_n(view.groups + r * view.group_stride, touched, groups + r * touched);
    }
    return absl::OkStatus();
  }

 private:
  size_t Index(int layer, int expert, ExpertPart which) const {
    return (static_cast<size_t>(layer) * shape_.experts + static_cast<size_t>(expert)) * 3 +
           static_cast<size_t>(which);
  }
  kernels::PackSource SourceOf(const ExpertMatrix& m, Range rows, Range cols) const {
    return weights_[Index(m.layer, m.expert, m.part)].Source(static_cast<uint32_t>(rows.begin),
                                                             static_cast<uint32_t>(cols.begin));
  }

  const MatrixFormat gate_up_;
  const MatrixFormat down_;
  std::vector<kernels::RandomWeights> weights_;
  std::vector<std::vector<float>> values_;
};

}  // namespace tandem::expert
