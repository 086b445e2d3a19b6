#include "tests/bench/expert_roof.h"

namespace tandem::bench {
namespace {

const PeakProbe* Avx2Int8(kernels::CodeStorage codes) {
  switch (codes) {
    case kernels::CodeStorage::k8:
      return &kAvx2Maddwd;
    case kernels::CodeStorage::k6:
      return &kAvx2Maddubs2;
    default:
      return &kAvx2Maddubs4;
  }
}

const PeakProbe* Avx512Int8(kernels::CodeStorage codes, const CpuFeatures& features) {
  if (features.avx512_vnni) return &kAvx512Vpdpbusd;
  return codes == kernels::CodeStorage::k8 ? &kAvx512Maddwd : &kAvx512Maddubs4;
}

}  // namespace

const PeakProbe* InstructionOf(const kernels::KernelTable& table, const CpuFeatures& features,
                               WeightFormat format, bool exact) {
  using kernels::ActivationForm;
  if (table.isa == Isa::kRef) return nullptr;
  const bool avx2 = table.isa == Isa::kAvx2;
  const ActivationForm form = exact ? ActivationForm::kF32 : table.format(format).form;
  const kernels::CodeStorage codes = kernels::TraitsOf(format).codes;
  switch (form) {
    case ActivationForm::kF32:
      return avx2 ? &kAvx2Fma : &kAvx512Fma;
    case ActivationForm::kBf16:
      if (table.isa == Isa::kAmx) return &kAmxBf16;
      return features.avx512_bf16 && !avx2 ? &kAvx512Vdpbf16 : avx2 ? &kAvx2Fma : &kAvx512Fma;
    case ActivationForm::kInt8:
      if (table.isa == Isa::kAmx) return &kAmxInt8;
      return avx2 ? Avx2Int8(codes) : Avx512Int8(codes, features);
  }
  return nullptr;
}

Roof RoofOf(const RoofInput& input) {
  const double memory = input.bytes / (input.bandwidth_gbps * 1e9);
  const double compute = input.peak_gops > 0 ? input.operations / (input.peak_gops * 1e9) : 0;
  return {memory > compute ? memory : compute, memory > compute};
}

}  // namespace tandem::bench
