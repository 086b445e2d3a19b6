#pragma once

// Loops of one instruction in registers, for its peak rate. Written in assembly, so that what runs
// is what is named, and no compiler flag lets these instructions into other code. Plain data;
// thread-safe. REQUIRES: the machine has the instruction.

#include <cstdint>

namespace tandem::bench {

struct PeakProbe {
  const char* name;
  // Operations (two a multiply-add) of one iteration of `run`.
  double ops;
  // REQUIRES: iterations > 0.
  void (*run)(uint64_t iterations);
};

extern const PeakProbe kAvx2Fma;
// 8-bit products, added in pairs to 16 bits and those to 32, one vector after the other.
extern const PeakProbe kAvx2Maddubs;
// The same of full signed 8-bit weights: their magnitudes times activations with their signs.
extern const PeakProbe kAvx2SignMaddubs;
// The first with two and with four vectors added in 16 bits first: codes of up to six and of up to
// five bits never overflow there.
extern const PeakProbe kAvx2Maddubs2;
extern const PeakProbe kAvx2Maddubs4;
// 16-bit products.
extern const PeakProbe kAvx2Maddwd;
extern const PeakProbe kAvx512Fma;
extern const PeakProbe kAvx512Maddubs4;
extern const PeakProbe kAvx512Maddwd;
extern const PeakProbe kAvx512Vpdpbusd;
extern const PeakProbe kAvx512Vdpbf16;
// These two need the kernel's permission besides, which DetectCpuFeatures asks for.
extern const PeakProbe kAmxInt8;
extern const PeakProbe kAmxBf16;

}  // namespace tandem::bench
