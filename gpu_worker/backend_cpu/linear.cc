#include "gpu_worker/backend_cpu/linear.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"

namespace tandem::gpu::cpu {
namespace {

constexpr int64_t kPanel = kernels::kPanelWidth;

// Rows that one thread reads and packs at a time: about a megabyte of the source.
int64_t PanelsPerRead(int64_t row_bytes) {
  return std::max<int64_t>(1, (int64_t{1} << 20) / std::max<int64_t>(1, row_bytes * kPanel));
}

absl::Status CheckSource(const MatrixSource& source) {
  constexpr int64_t kMax = std::numeric_limits<uint32_t>::max() / 2;
  if (source.n <= 0 || source.k <= 0 || source.n > kMax || source.k > kMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("a linear of shape [", source.n, ", ", source.k, "] cannot be packed"));
  }
  if (source.dtype != DType::kF32 && source.dtype != DType::kBF16) {
    return absl::InvalidArgumentError("a linear can be packed from F32 or BF16 only");
  }
  return absl::OkStatus();
}

// Reads and packs panels [begin, end) of `weight`.
absl::Status PackPanels(const MatrixSource& source, const PackedLinear& weight, int64_t begin,
                        int64_t end, std::vector<unsigned char>& buffer) {
  const int64_t row_begin = begin * kPanel;
  const int64_t row_end = std::min(end * kPanel, source.n);
  const auto rows = static_cast<size_t>(row_end - row_begin);
  buffer.resize(rows * static_cast<size_t>(source.k) * DTypeBytes(source.dtype));
  RETURN_IF_ERROR(source.read(row_begin, row_end, buffer.data()));
  kernels::PackSource pack{};
  pack.data = buffer.data();
  pack.row_stride = static_cast<size_t>(source.k);
  pack.format = weight.format->format;
  auto* panels = static_cast<unsigned char*>(weight.memory.data()) +
                 static_cast<size_t>(begin) * weight.matrix.panel_stride_bytes;
  const auto k = static_cast<uint32_t>(source.k);
  kernels::PackPanels(pack.format, 0, pack, static_cast<uint32_t>(rows), k, k, panels);
  return absl::OkStatus();
}

absl::Status PackAll(OpContext& context, const MatrixSource& source, const PackedLinear& weight) {
  const int64_t panels = kernels::PanelCount(weight.matrix.n);
  const int64_t step = PanelsPerRead(source.k * static_cast<int64_t>(DTypeBytes(source.dtype)));
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  absl::Status first_error;
  context.pool.Run([&](int) {
    std::vector<unsigned char> buffer;
    while (true) {
      const int64_t begin = next.fetch_add(step, std::memory_order_relaxed);
      if (begin >= panels) return;
      absl::Status status =
          PackPanels(source, weight, begin, std::min(begin + step, panels), buffer);
      if (status.ok()) continue;
      next.store(panels, std::memory_order_relaxed);
      std::lock_guard lock(mutex);
      if (first_error.ok()) first_error = std::move(status);
      return;
    }
  });
  return first_error;
}

const PackedLinear& Packed(const LinearWeight* weight) {
  return *static_cast<const PackedLinear*>(weight);
}

void AddBias(const float* bias, float* y, int64_t ld, int rows, int64_t columns) {
  for (int r = 0; r < rows; ++r) {
    float* row = y + r * ld;
    for (int64_t i = 0; i < columns; ++i) row[i] += bias[i];
  }
}

// Panels [panel_begin, panel_end) of rows [row_begin, row_end).
struct Part {
  int64_t panel_begin, panel_end;
  int row_begin, row_end;
};

void RunPart(const PackedLinear& weight, const float* bias, ConstMatrix x, Matrix y, Part part) {
  if (part.panel_begin >= part.panel_end || part.row_begin >= part.row_end) return;
  const int64_t column = part.panel_begin * kPanel;
  kernels::GemmCall call{};
  call.x = x.data + part.row_begin * x.ld;
  call.x_stride = static_cast<size_t>(x.ld);
  call.y = y.data + part.row_begin * y.ld + column;
  call.y_stride = static_cast<size_t>(y.ld);
  call.rows = static_cast<uint32_t>(part.row_end - part.row_begin);
  call.panel_begin = static_cast<uint32_t>(part.panel_begin);
  call.panel_end = static_cast<uint32_t>(part.panel_end);
  weight.format->gemm_exact(weight.matrix, call);
  if (bias == nullptr) return;
  const int64_t columns = std::min(part.panel_end * kPanel, weight.n) - column;
  AddBias(bias + column, call.y, y.ld, static_cast<int>(call.rows), columns);
}

}  // namespace

absl::StatusOr<std::unique_ptr<LinearWeight>> LoadLinear(OpContext& context,
                                                         const MatrixSource& source) {
  RETURN_IF_ERROR(CheckSource(source));
  auto weight = std::make_unique<PackedLinear>();
  const bool bf16 = source.dtype == DType::kBF16;
  weight->n = source.n;
  weight->k = source.k;
  weight->format =
      &context.kernels.format(bf16 ? kernels::WeightFormat::kBf16 : kernels::WeightFormat::kF32);
  const auto n = static_cast<uint32_t>(source.n);
  const auto k = static_cast<uint32_t>(source.k);
  ASSIGN_OR_RETURN(weight->memory,
                   PageBuffer::Create(size_t{kernels::PanelCount(n)} *
                                      kernels::PanelBytes(weight->format->format, k, 0)));
  weight->matrix =
      kernels::MakePackedMatrix(weight->format->format, 0, weight->memory.data(), n, k);
  RETURN_IF_ERROR(PackAll(context, source, *weight));
  return weight;
}

void Linear(OpContext& context, const LinearArgs& args) {
  const int rows = RowCount(args.rows);
  if (rows == 0) return;
  const PackedLinear& weight = Packed(args.weight);
  const int64_t panels = kernels::PanelCount(weight.matrix.n);
  const int threads = context.pool.threads();
  // Panels first: each is then read by one thread. Where there are too few, the rows are cut too.
  const int64_t panel_parts = std::min<int64_t>(threads, panels);
  const int row_parts =
      std::max<int>(1, std::min<int>(threads / static_cast<int>(panel_parts), rows));
  context.ForEach(panel_parts * row_parts, rows * weight.n * weight.k / (panel_parts * row_parts),
                  [&](int, int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) {
                      const int64_t p = i % panel_parts;
                      const int r = static_cast<int>(i / panel_parts);
                      RunPart(weight, args.bias, args.x, args.y,
                              {panels * p / panel_parts, panels * (p + 1) / panel_parts,
                               rows * r / row_parts, rows * (r + 1) / row_parts});
                    }
                  });
}

void HeadLinear(OpContext& context, const HeadLinearArgs& args) {
  const int rows = RowCount(args.rows);
  if (rows == 0 || args.heads == 0) return;
  const PackedLinear& first = Packed(args.weights[0].get());
  const int64_t panels = kernels::PanelCount(first.matrix.n);
  // Items are the panels of all heads; the ones of a head that fall to one thread are one call.
  context.ForEach(args.heads * panels, rows * kPanel * first.k,
                  [&](int, int64_t begin, int64_t end) {
                    while (begin < end) {
                      const int64_t head = begin / panels;
                      const int64_t stop = std::min(end, (head + 1) * panels);
                      const ConstMatrix x(args.x.data + head * args.x_head_stride, args.x.ld);
                      const Matrix y{args.y.data + head * args.y_head_stride, args.y.ld};
                      RunPart(Packed(args.weights[head].get()), nullptr, x, y,
                              {begin - head * panels, stop - head * panels, 0, rows});
                      begin = stop;
                    }
                  });
}

}  // namespace tandem::gpu::cpu
