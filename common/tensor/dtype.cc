#include "common/tensor/dtype.h"

#include "common/base/check.h"

namespace tandem {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  size_t bytes;
};

constexpr DTypeInfo kDTypes[] = {
    {DType::kF64, "F64", 8},        {DType::kF32, "F32", 4},        {DType::kF16, "F16", 2},
    {DType::kBF16, "BF16", 2},      {DType::kF8E4M3, "F8_E4M3", 1}, {DType::kF8E5M2, "F8_E5M2", 1},
    {DType::kF8E8M0, "F8_E8M0", 1}, {DType::kI64, "I64", 8},        {DType::kI32, "I32", 4},
    {DType::kI16, "I16", 2},        {DType::kI8, "I8", 1},          {DType::kU64, "U64", 8},
    {DType::kU32, "U32", 4},        {DType::kU16, "U16", 2},        {DType::kU8, "U8", 1},
    {DType::kBool, "BOOL", 1},
};

const DTypeInfo& Info(DType dtype) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype == dtype) return info;
  }
  TANDEM_CHECK(false && "a DType outside its enumeration");
  return kDTypes[0];
}

}  // namespace

size_t DTypeBytes(DType dtype) { return Info(dtype).bytes; }

std::string_view DTypeName(DType dtype) { return Info(dtype).name; }

std::optional<DType> DTypeFromName(std::string_view safetensors_name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == safetensors_name) return info.dtype;
  }
  return std::nullopt;
}

}  // namespace tandem
