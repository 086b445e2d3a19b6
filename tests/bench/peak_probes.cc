#include "tests/bench/peak_probes.h"

#include "expert_worker/kernels/amx_tile_config.h"

namespace tandem::bench {
namespace {

// Two BF16 of 0.5, a normal F32, two 16-bit and four 8-bit integers: one operand for all.
constexpr uint32_t kOperand = 0x3F003F00;

// `body` for each of the registers 0 .. last as \r, on operands 14 and 15 (all of them kOperand)
// and sums that begin as zero; registers 8 to 13 are free where `sums` leaves them.
// (Clearing the 16 ymm registers clears the upper halves of zmm0 .. zmm15 too.)
#define TANDEM_PEAK_LOOP(wide, sums, body)                                                    \
  __asm__ volatile(                                                                           \
      ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13\n vpxor %%xmm\\r, %%xmm\\r, %%xmm\\r\n.endr\n"  \
      "vpbroadcastd %1, %%" wide "14\n vpbroadcastd %1, %%" wide                              \
      "15\n"                                                                                  \
      ".balign 64\n"                                                                          \
      "1:\n .irp r," sums "\n" body "\n.endr\n dec %0\n jnz 1b\n vzeroupper"                  \
      : "+r"(iterations)                                                                      \
      : "m"(kOperand)                                                                         \
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
        "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

// A latency of 4 cycles at two instructions a cycle needs 8 sums in flight.
#define TANDEM_TWELVE_SUMS "0,1,2,3,4,5,6,7,8,9,10,11"
#define TANDEM_EIGHT_SUMS "0,1,2,3,4,5,6,7"

void RunAvx2Fma(uint64_t iterations) {
  TANDEM_PEAK_LOOP("ymm", TANDEM_TWELVE_SUMS, "vfmadd231ps %%ymm14, %%ymm15, %%ymm\\r");
}

void RunAvx2Maddubs(uint64_t iterations) {
  TANDEM_PEAK_LOOP("ymm", TANDEM_EIGHT_SUMS,
                   "vpmaddubsw %%ymm14, %%ymm15, %%ymm8\n"
                   "vpmaddwd %%ymm14, %%ymm8, %%ymm8\n"
                   "vpaddd %%ymm8, %%ymm\\r, %%ymm\\r");
}

void RunAvx2SignMaddubs(uint64_t iterations) {
  TANDEM_PEAK_LOOP("ymm", TANDEM_EIGHT_SUMS,
                   "vpsignb %%ymm14, %%ymm15, %%ymm8\n"
                   "vpmaddubsw %%ymm8, %%ymm15, %%ymm8\n"
                   "vpmaddwd %%ymm14, %%ymm8, %%ymm8\n"
                   "vpaddd %%ymm8, %%ymm\\r, %%ymm\\r");
}

void RunAvx2Maddubs2(uint64_t iterations) {
  TANDEM_PEAK_LOOP("ymm", TANDEM_EIGHT_SUMS,
                   "vpmaddubsw %%ymm14, %%ymm15, %%ymm8\n"
                   "vpmaddubsw %%ymm14, %%ymm15, %%ymm9\n"
                   "vpaddw %%ymm9, %%ymm8, %%ymm8\n"
                   "vpmaddwd %%ymm14, %%ymm8, %%ymm8\n"
                   "vpaddd %%ymm8, %%ymm\\r, %%ymm\\r");
}

void RunAvx2Maddubs4(uint64_t iterations) {
  TANDEM_PEAK_LOOP("ymm", TANDEM_EIGHT_SUMS,
                   "vpmaddubsw %%ymm14, %%ymm15, %%ymm8\n"
                   "vpmaddubsw %%ymm14, %%ymm15, %%ymm9\n"
                   "vpmaddubsw %%ymm14, %%ymm15, %%ymm10\n"
                   "vpmaddubsw %%ymm14, %%ymm15, %%ymm11\n"
                   "vpaddw %%ymm9, %%ymm8, %%ymm8\n"
                   "vpaddw %%ymm11, %%ymm10, %%ymm10\n"
                   "vpaddw %%ymm10, %%ymm8, %%ymm8\n"
                   "vpmaddwd %%ymm14, %%ymm8, %%ymm8\n"
                   "vpaddd %%ymm8, %%ymm\\r, %%ymm\\r");
}

void RunAvx2Maddwd(uint64_t iterations) {
  TANDEM_PEAK_LOOP("ymm", TANDEM_EIGHT_SUMS,
                   "vpmaddwd %%ymm14, %%ymm15, %%ymm8\n"
                   "vpaddd %%ymm8, %%ymm\\r, %%ymm\\r");
}

void RunAvx512Fma(uint64_t iterations) {
  TANDEM_PEAK_LOOP("zmm", TANDEM_TWELVE_SUMS, "vfmadd231ps %%zmm14, %%zmm15, %%zmm\\r");
}

void RunAvx512Maddubs4(uint64_t iterations) {
  TANDEM_PEAK_LOOP("zmm", TANDEM_EIGHT_SUMS,
                   "vpmaddubsw %%zmm14, %%zmm15, %%zmm8\n"
                   "vpmaddubsw %%zmm14, %%zmm15, %%zmm9\n"
                   "vpmaddubsw %%zmm14, %%zmm15, %%zmm10\n"
                   "vpmaddubsw %%zmm14, %%zmm15, %%zmm11\n"
                   "vpaddw %%zmm9, %%zmm8, %%zmm8\n"
                   "vpaddw %%zmm11, %%zmm10, %%zmm10\n"
                   "vpaddw %%zmm10, %%zmm8, %%zmm8\n"
                   "vpmaddwd %%zmm14, %%zmm8, %%zmm8\n"
                   "vpaddd %%zmm8, %%zmm\\r, %%zmm\\r");
}

void RunAvx512Maddwd(uint64_t iterations) {
  TANDEM_PEAK_LOOP("zmm", TANDEM_EIGHT_SUMS,
                   "vpmaddwd %%zmm14, %%zmm15, %%zmm8\n"
                   "vpaddd %%zmm8, %%zmm\\r, %%zmm\\r");
}

void RunAvx512Vpdpbusd(uint64_t iterations) {
  TANDEM_PEAK_LOOP("zmm", TANDEM_TWELVE_SUMS, "vpdpbusd %%zmm14, %%zmm15, %%zmm\\r");
}

void RunAvx512Vdpbf16(uint64_t iterations) {
  TANDEM_PEAK_LOOP("zmm", TANDEM_TWELVE_SUMS, "vdpbf16ps %%zmm14, %%zmm15, %%zmm\\r");
}

#undef TANDEM_EIGHT_SUMS
#undef TANDEM_TWELVE_SUMS
#undef TANDEM_PEAK_LOOP

// Two by two tiles of sums, as a kernel holds them, in registers that no compiler of ours uses.
#define TANDEM_TILE_LOOP(instruction)                                                 \
  __asm__ volatile(                                                                   \
      "ldtilecfg %1\n"                                                                \
      ".irp t,0,1,2,3,4,5,6,7\n tilezero %%tmm\\t\n.endr\n"                           \
      ".balign 64\n"                                                                  \
      "1:\n" instruction " %%tmm6, %%tmm4, %%tmm0\n" instruction                      \
      " %%tmm7, %%tmm4, %%tmm1\n" instruction " %%tmm6, %%tmm5, %%tmm2\n" instruction \
      " %%tmm7, %%tmm5, %%tmm3\n dec %0\n jnz 1b\n tilerelease"                       \
      : "+r"(iterations)                                                              \
      : "m"(kernels::kWholeTiles)                                                     \
      : "cc")

void RunAmxInt8(uint64_t iterations) { TANDEM_TILE_LOOP("tdpbssd"); }
void RunAmxBf16(uint64_t iterations) { TANDEM_TILE_LOOP("tdpbf16ps"); }

#undef TANDEM_TILE_LOOP

}  // namespace

const PeakProbe kAvx2Fma{"avx2 vfmadd f32", 12 * 16.0, RunAvx2Fma};
const PeakProbe kAvx2Maddubs{"avx2 vpmaddubsw+vpmaddwd", 8 * 64.0, RunAvx2Maddubs};
const PeakProbe kAvx2SignMaddubs{"avx2 vpsignb+vpmaddubsw+vpmaddwd", 8 * 64.0, RunAvx2SignMaddubs};
const PeakProbe kAvx2Maddubs2{"avx2 2 vpmaddubsw+vpmaddwd", 8 * 128.0, RunAvx2Maddubs2};
const PeakProbe kAvx2Maddubs4{"avx2 4 vpmaddubsw+vpmaddwd", 8 * 256.0, RunAvx2Maddubs4};
const PeakProbe kAvx2Maddwd{"avx2 vpmaddwd", 8 * 32.0, RunAvx2Maddwd};
const PeakProbe kAvx512Fma{"avx512 vfmadd f32", 12 * 32.0, RunAvx512Fma};
const PeakProbe kAvx512Maddubs4{"avx512 4 vpmaddubsw+vpmaddwd", 8 * 512.0, RunAvx512Maddubs4};
const PeakProbe kAvx512Maddwd{"avx512 vpmaddwd", 8 * 64.0, RunAvx512Maddwd};
const PeakProbe kAvx512Vpdpbusd{"avx512 vpdpbusd", 12 * 128.0, RunAvx512Vpdpbusd};
const PeakProbe kAvx512Vdpbf16{"avx512 vdpbf16ps", 12 * 64.0, RunAvx512Vdpbf16};
const PeakProbe kAmxInt8{"amx tdpbssd", 4 * 2.0 * 16 * 16 * 64, RunAmxInt8};
const PeakProbe kAmxBf16{"amx tdpbf16ps", 4 * 2.0 * 16 * 16 * 32, RunAmxBf16};

}  // namespace tandem::bench
