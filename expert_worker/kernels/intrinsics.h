#pragma once

// The compiler's x86 intrinsics, for kernels of AVX-512 and AMX. Tests compile those kernels a
// second time with an emulation in the place of this header, which an include path puts before it,
// so that machines without the instructions test the logic too. Hence kernels that use more than
// AVX2 include this and never <immintrin.h>.

#include <immintrin.h>  // IWYU pragma: export
