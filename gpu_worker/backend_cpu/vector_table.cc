#include "gpu_worker/backend_cpu/vector_table.h"

namespace tandem::gpu {

const VectorTable& VectorTableFor(Isa isa) {
  switch (isa) {
    case Isa::kAmx:
    case Isa::kAvx512:
      return kVectorAvx512;
    case Isa::kAvx2:
      return kVectorAvx2;
    case Isa::kRef:
      return kVectorRef;
  }
  return kVectorRef;
}

}  // namespace tandem::gpu
