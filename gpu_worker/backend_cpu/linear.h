#pragma once

// Linears over the packed matrices of expert_worker/kernels. Packing happens once, at load, with
// all threads of the pool. A result element is one fma chain over k (kernel_table.h), plus the
// bias.

#include <memory>

#include "absl/status/statusor.h"
#include "gpu_worker/backend.h"
#include "gpu_worker/backend_cpu/memory.h"
#include "gpu_worker/backend_cpu/op_context.h"

namespace tandem::gpu::cpu {

class PackedLinear : public LinearWeight {
 public:
  const kernels::FormatKernels* format = nullptr;
  kernels::PackedMatrix matrix{};
  PageBuffer memory;
};

// Errors: those of source.read; INVALID_ARGUMENT for shapes and types that cannot be packed;
// RESOURCE_EXHAUSTED.
absl::StatusOr<std::unique_ptr<LinearWeight>> LoadLinear(OpContext& context,
                                                         const MatrixSource& source);

// REQUIRES: weights made by LoadLinear.
void Linear(OpContext& context, const LinearArgs& args);
void HeadLinear(OpContext& context, const HeadLinearArgs& args);

}  // namespace tandem::gpu::cpu
