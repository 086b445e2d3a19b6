#pragma once

// What this CPU can do (with the operating system's consent), and the cap that --max-isa puts on
// it.

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/hw/isa.h"

namespace tandem {

struct CpuFeatures {
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, BW, DQ, VL
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool avx512_vbmi = false;
  bool amx_tile = false;  // and the operating system lets this process use tiles
  bool amx_int8 = false;
  bool amx_bf16 = false;
  bool waitpkg = false;

  // The best Isa these features allow.
  Isa BestIsa() const;
};

// Asks the operating system for the use of tiles where the CPU has them.
CpuFeatures DetectCpuFeatures();

std::string_view IsaName(Isa isa);
// "ref", "avx2", "avx512" or "amx". Errors: INVALID_ARGUMENT.
absl::StatusOr<Isa> ParseIsa(std::string_view name);

// "avx2 avx512 vnni ..." for start-up logs.
std::string DescribeFeatures(const CpuFeatures& features);

}  // namespace tandem
