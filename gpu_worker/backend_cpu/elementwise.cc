#include <cstring>
#include <limits>

#include "common/base/check.h"
#include "gpu_worker/backend_cpu/ops.h"

namespace tandem::gpu::cpu {
namespace {

void EmbedRow(OpContext& context, const EmbedArgs& args, int64_t row) {
  const int64_t hidden = args.table.shape[1];
  const int64_t id = args.ids[row];
  float* out = args.out.data + row * args.out.ld;
  if (id < 0 || id >= args.table.shape[0]) {
    // The sampler's -1 of a row that is not finite: the row stays so, its neighbours are untouched.
    for (int64_t i = 0; i < hidden; ++i) out[i] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  if (args.table.dtype == DType::kBF16) {
    context.kernels.widen_bf16(args.table.As<uint16_t>() + id * hidden, out,
                               static_cast<size_t>(hidden));
  } else {
    std::memcpy(out, args.table.As<float>() + id * hidden,
                static_cast<size_t>(hidden) * sizeof(float));
  }
}

}  // namespace

void Embed(OpContext& context, const EmbedArgs& args) {
  TANDEM_DCHECK(args.table.dtype == DType::kF32 || args.table.dtype == DType::kBF16);
  context.ForEach(RowCount(args.rows), args.table.shape[1], [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) EmbedRow(context, args, row);
  });
}

void SiluMul(OpContext& context, const SiluMulArgs& args) {
  // An exp and a division: about 16 elementary operations.
  context.ForEach(RowCount(args.rows), 16 * args.width, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      context.kernels.silu_mul(args.gate.data + row * args.gate.ld, args.up.data + row * args.up.ld,
                               args.out.data + row * args.out.ld, static_cast<size_t>(args.width));
    }
  });
}

void Add(OpContext& context, const AddArgs& args) {
  context.ForEach(RowCount(args.rows), args.width, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* x = args.x.data + row * args.x.ld;
      const float* y = args.y.data + row * args.y.ld;
      for (int64_t i = 0; i < args.width; ++i) x[i] += y[i];
    }
  });
}

void GatherRows(OpContext& context, const GatherRowsArgs& args) {
  context.ForEach(RowCount(args.rows), args.width, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(args.out.data + row * args.out.ld, args.x.data + args.indices[row] * args.x.ld,
                  static_cast<size_t>(args.width) * sizeof(float));
    }
  });
}

}  // namespace tandem::gpu::cpu
