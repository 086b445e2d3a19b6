#include <cmath>

#include "gpu_worker/backend_cpu/ops.h"

namespace tandem::gpu::cpu {
namespace {

void RotateHalf(float* x, int half, const float* cosines, const float* sines) {
  float* y = x + half;
  for (int j = 0; j < half; ++j) {
    const float a = x[j];
    const float b = y[j];
    x[j] = a * cosines[j] - b * sines[j];
    y[j] = b * cosines[j] + a * sines[j];
  }
}

void RotatePairs(float* x, int half, const float* cosines, const float* sines) {
  for (int j = 0; j < half; ++j) {
    const float a = x[2 * j];
    const float b = x[2 * j + 1];
    x[2 * j] = a * cosines[j] - b * sines[j];
    x[2 * j + 1] = b * cosines[j] + a * sines[j];
  }
}

}  // namespace

// The angle is an F32 product, as in the models' own code; its sine and cosine are taken in F64, so
// that they are the nearest F32 values whatever the C library's float versions do.
void RopeAngles(OpContext& context, const RopeAnglesArgs& args) {
  // A sine and a cosine: about 40 ns, 300 elementary operations.
  context.ForEach(RowCount(args.rows), int64_t{300} * args.half,
                  [&](int, int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      float* out = args.out.data + row * args.out.ld;
                      const auto position = static_cast<float>(args.positions[row]);
                      for (int j = 0; j < args.half; ++j) {
                        const double angle = position * args.inv_freq[j];
                        out[j] = static_cast<float>(std::cos(angle)) * args.factor;
                        out[args.half + j] = static_cast<float>(std::sin(angle)) * args.factor;
                      }
                    }
                  });
}

void Rope(OpContext& context, const RopeArgs& args) {
  context.ForEach(RowCount(args.rows), int64_t{4} * args.half * args.heads,
                  [&](int, int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      const float* cosines = args.angles.data + row * args.angles.ld;
                      const float* sines = cosines + args.half;
                      float* x = args.x.data + row * args.x.ld + args.offset;
                      for (int head = 0; head < args.heads; ++head, x += args.head_stride) {
                        if (args.interleaved) {
                          RotatePairs(x, args.half, cosines, sines);
                        } else {
                          RotateHalf(x, args.half, cosines, sines);
                        }
                      }
                    }
                  });
}

}  // namespace tandem::gpu::cpu
