#pragma once

// Instruction sets that kernels exist for. Plain data, for headers that may include nothing else.

#include <cstdint>

namespace tandem {

// Ordered: a cap of X allows everything up to X.
enum class Isa : uint8_t { kRef = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

}  // namespace tandem
