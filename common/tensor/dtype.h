#pragma once

// Element types of tensors, as checkpoints name them and as activations use them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tandem {

enum class DType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
};

// Bytes of one element.
size_t DTypeBytes(DType dtype);

// The name that safetensors uses ("F32", "BF16", "F8_E4M3", ...).
std::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view safetensors_name);

}  // namespace tandem
