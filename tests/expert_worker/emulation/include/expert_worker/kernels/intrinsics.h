#pragma once

// In the place of the header of this name, for kernels that are compiled against emulated
// intrinsics: SIMDe, and for what it lacks our own.

#include <cstdint>
#include <cstring>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include "tests/expert_worker/emulation/avx512_shims.inc"  // after SIMDe, whose types it names
