#include "common/hw/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers Cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

// Bits of XCR0: which register states the operating system saves.
uint64_t EnabledStates() {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux lets a process use tiles once it has asked (for all its threads; kernels from 5.16 on), and
// faults its first tile instruction otherwise.
bool TilesArePermitted() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

constexpr bool Bit(unsigned word, int bit) { return ((word >> bit) & 1) != 0; }

}  // namespace

CpuFeatures DetectCpuFeatures() {
  CpuFeatures f;
  const Registers leaf1 = Cpuid(1, 0);
  const bool os_saves = Bit(leaf1.ecx, 27);
  if (!os_saves) return f;
  const uint64_t states = EnabledStates();
  const bool ymm = (states & 0x6) == 0x6;
  const bool zmm = ymm && (states & 0xE0) == 0xE0;
  const bool tiles = (states & 0x60000) == 0x60000;
  const Registers leaf7 = Cpuid(7, 0);
  const Registers leaf7_1 = Cpuid(7, 1);
  f.avx2 = ymm && Bit(leaf1.ecx, 12) && Bit(leaf1.ecx, 29) && Bit(leaf7.ebx, 5);
  f.avx512 = f.avx2 && zmm && Bit(leaf7.ebx, 16) && Bit(leaf7.ebx, 17) && Bit(leaf7.ebx, 30) &&
             Bit(leaf7.ebx, 31);
  f.avx512_vnni = f.avx512 && Bit(leaf7.ecx, 11);
  f.avx512_vbmi = f.avx512 && Bit(leaf7.ecx, 1);
  f.avx512_bf16 = f.avx512 && Bit(leaf7_1.eax, 5);
  f.amx_tile = f.avx512 && tiles && Bit(leaf7.edx, 24) && TilesArePermitted();
  f.amx_int8 = f.amx_tile && Bit(leaf7.edx, 25);
  f.amx_bf16 = f.amx_tile && Bit(leaf7.edx, 22);
  f.waitpkg = Bit(leaf7.ecx, 5);
  return f;
}

Isa CpuFeatures::BestIsa() const {
  if (amx_tile && amx_int8 && amx_bf16) return Isa::kAmx;
  if (avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
  return Isa::kRef;
}

std::string_view IsaName(Isa isa) {
  switch (isa) {
    case Isa::kRef:
      return "ref";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

absl::StatusOr<Isa> ParseIsa(std::string_view name) {
  for (const Isa isa : {Isa::kRef, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
    if (name == IsaName(isa)) return isa;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown ISA \"", std::string(name), "\": use ref, avx2, avx512 or amx"));
}

std::string DescribeFeatures(const CpuFeatures& features) {
  std::string text;
  const auto add = [&text](bool present, std::string_view name) {
    if (!present) return;
    if (!text.empty()) text += ' ';
    text += name;
  };
  add(features.avx2, "avx2");
  add(features.avx512, "avx512");
  add(features.avx512_vnni, "vnni");
  add(features.avx512_bf16, "bf16");
  add(features.avx512_vbmi, "vbmi");
  add(features.amx_tile, "amx");
  add(features.amx_int8, "amx-int8");
  add(features.amx_bf16, "amx-bf16");
  add(features.waitpkg, "waitpkg");
  return text.empty() ? "none" : text;
}

}  // namespace tandem
