#include "tests/bench/expert_roof.h"

#include "expert_worker/kernels/tables.h"

namespace tandem::bench {
namespace {

// Values of IQ4 fill a signed byte as those of 8 bits do: neither's products add up in 16 bits.
const PeakProbe* Avx2Int8(const kernels::FormatTraits& format) {
  if (format.map == kernels::CodeMap::kIq4Nl) return &kAvx2SignMaddubs;
  switch (format.codes) {
    case kernels::CodeStorage::k8:
      return &kAvx2SignMaddubs;
    case kernels::CodeStorage::k6:
      return &kAvx2Maddubs2;
    default:
      return &kAvx2Maddubs4;
  }
}

}  // namespace

const PeakProbe* InstructionOf(const kernels::KernelTable& table, WeightFormat format, bool exact) {
  using kernels::ActivationForm;
  if (table.isa == Isa::kRef) return nullptr;
  const bool avx2 = table.isa == Isa::kAvx2;
  const ActivationForm form = exact ? ActivationForm::kF32 : table.format(format).form;
  switch (form) {
    case ActivationForm::kF32:
      return avx2 ? &kAvx2Fma : &kAvx512Fma;
    case ActivationForm::kBf16:
      return table.isa == Isa::kAmx ? &kAmxBf16 : &kAvx512Vdpbf16;
    case ActivationForm::kInt8:
      if (table.isa == Isa::kAmx) return &kAmxInt8;
      return avx2 || &table == &kernels::kAvx512Table ? Avx2Int8(kernels::TraitsOf(format))
                                                      : &kAvx512Vpdpbusd;
  }
  return nullptr;
}

Roof RoofOf(const RoofInput& input) {
  const double memory = input.bytes / (input.bandwidth_gbps * 1e9);
  const double compute = input.peak_gops > 0 ? input.operations / (input.peak_gops * 1e9) : 0;
  return {memory > compute ? memory : compute, memory > compute};
}

}  // namespace tandem::bench
