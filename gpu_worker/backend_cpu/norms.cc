#include <cmath>

#include "gpu_worker/backend_cpu/ops.h"

namespace tandem::gpu::cpu {

// The sum of squares is F64 (16 lanes, vector_table.h); the rest is F32.
void RmsNorm(OpContext& context, const RmsNormArgs& args) {
  const auto width = static_cast<size_t>(args.width);
  const int64_t items = int64_t{RowCount(args.rows)} * args.groups;
  context.ForEach(items, 4 * args.width, [&](int, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / args.groups;
      const int64_t offset = item % args.groups * args.width;
      const float* x = args.x.data + row * args.x.ld + offset;
      float* out = args.out.data + row * args.out.ld + offset;
      const double mean = context.vectors.sum_squares(x, width) / static_cast<double>(width);
      const auto scale = static_cast<float>(1.0 / std::sqrt(mean + double{args.eps}));
      const float* w = args.weight;
      for (size_t i = 0; i < width; ++i) out[i] = w[i] * (x[i] * scale);
    }
  });
}

}  // namespace tandem::gpu::cpu
