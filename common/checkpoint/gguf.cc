#include "common/checkpoint/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little,
              "values are read as they lie in the file");

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = 1 << 20;
constexpr size_t kMaxKeyBytes = 65535;  // the format's own bound
constexpr size_t kMaxNameBytes = 1024;
constexpr int kMaxArrayDepth = 4;
constexpr const char* kAlignmentKey = "general.alignment";

constexpr GgufTypeInfo kTypes[] = {
    {GgufType::kF32, "F32", 1, 4},          {GgufType::kF16, "F16", 1, 2},
    {GgufType::kBf16, "BF16", 1, 2},        {GgufType::kQ4_0, "Q4_0", 32, 18},
    {GgufType::kQ4_1, "Q4_1", 32, 20},      {GgufType::kQ5_0, "Q5_0", 32, 22},
    {GgufType::kQ5_1, "Q5_1", 32, 24},      {GgufType::kQ8_0, "Q8_0", 32, 34},
    {GgufType::kQ2K, "Q2_K", 256, 84},      {GgufType::kQ3K, "Q3_K", 256, 110},
    {GgufType::kQ4K, "Q4_K", 256, 144},     {GgufType::kQ5K, "Q5_K", 256, 176},
    {GgufType::kQ6K, "Q6_K", 256, 210},     {GgufType::kIq4Nl, "IQ4_NL", 32, 18},
    {GgufType::kIq4Xs, "IQ4_XS", 256, 136}, {GgufType::kMxfp4, "MXFP4", 32, 17},
    {GgufType::kNvfp4, "NVFP4", 64, 36},
};

// Types that files may hold and this engine does not decode: for messages.
constexpr std::pair<uint32_t, const char*> kOtherTypes[] = {
    {9, "Q8_1"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
    {21, "IQ3_S"}, {22, "IQ2_S"}, {24, "I8"},      {25, "I16"},    {26, "I32"},     {27, "I64"},
    {28, "F64"},   {29, "IQ1_M"}, {34, "TQ1_0"},   {35, "TQ2_0"},
};

enum class ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};

std::optional<GgufKind> KindOf(uint32_t type) {
  switch (static_cast<ValueType>(type)) {
    case ValueType::kU8:
    case ValueType::kU16:
    case ValueType::kU32:
    case ValueType::kU64:
      return GgufKind::kUnsigned;
    case ValueType::kI8:
    case ValueType::kI16:
    case ValueType::kI32:
    case ValueType::kI64:
      return GgufKind::kSigned;
    case ValueType::kF32:
    case ValueType::kF64:
      return GgufKind::kReal;
    case ValueType::kBool:
      return GgufKind::kBool;
    case ValueType::kString:
      return GgufKind::kString;
    case ValueType::kArray:
      return GgufKind::kArray;
  }
  return std::nullopt;
}

// Bytes of the shortest value of a type: bounds an array's count by the file's size.
uint64_t LeastBytes(ValueType type) {
  switch (type) {
    case ValueType::kU8:
    case ValueType::kI8:
    case ValueType::kBool:
      return 1;
    case ValueType::kU16:
    case ValueType::kI16:
      return 2;
    case ValueType::kU32:
    case ValueType::kI32:
    case ValueType::kF32:
      return 4;
    case ValueType::kString:
    case ValueType::kU64:
    case ValueType::kI64:
    case ValueType::kF64:
      return 8;
    case ValueType::kArray:
      return 12;
  }
  return 1;
}

class Parser {
 public:
  Parser(std::string_view file, std::string_view bytes) : file_(file), bytes_(bytes) {}

  absl::StatusOr<GgufContents> Parse() {
    uint64_t tensor_count = 0;
    uint64_t value_count = 0;
    RETURN_IF_ERROR(ParseHeader(&tensor_count, &value_count));
    for (uint64_t i = 0; i < value_count; ++i) RETURN_IF_ERROR(ParseKeyValue());
    RETURN_IF_ERROR(ReadAlignment());
    contents_.tensors.reserve(tensor_count);
    for (uint64_t i = 0; i < tensor_count; ++i) RETURN_IF_ERROR(ParseTensor());
    RETURN_IF_ERROR(Place());
    return std::move(contents_);
  }

 private:
  absl::Status Error(std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(std::string(file_), ": ", std::string(what)));
  }
  absl::Status KeyError(std::string_view what) const {
    return Error(absl::StrCat("key ", QuoteForMessage(key_), ": ", std::string(what)));
  }
  absl::Status TensorError(std::string_view name, std::string_view what) const {
    return Error(absl::StrCat("tensor ", QuoteForMessage(name), ": ", std::string(what)));
  }
  absl::Status Truncated(std::string_view where) const {
    return absl::DataLossError(
        absl::StrCat(std::string(file_), ": truncated (interrupted download?): the file's ",
                     bytes_.size(), " bytes end within ", std::string(where)));
  }
  absl::Status TruncatedValue() const {
    return Truncated(absl::StrCat("the value of key ", QuoteForMessage(key_)));
  }

  uint64_t left() const { return bytes_.size() - at_; }

  template <typename T>
  bool Read(T* out) {
    if (left() < sizeof(T)) return false;
    std::memcpy(out, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }
  bool ReadString(std::string_view* out) {
    uint64_t length = 0;
    if (!Read(&length) || length > left()) return false;
    *out = bytes_.substr(at_, length);
    at_ += length;
    return true;
  }

  absl::Status ParseHeader(uint64_t* tensor_count, uint64_t* value_count);
  absl::Status ParseKeyValue();
  absl::Status ParseArray(int depth, GgufValue* out);
  absl::Status ParseScalar(ValueType type, GgufValue* out);
  absl::Status ParseElement(ValueType type, GgufValue* array);
  absl::Status ReadAlignment();
  absl::Status ParseTensor();
  absl::Status ParseShape(GgufTensor* tensor);
  absl::Status Place();

  const std::string_view file_;
  const std::string_view bytes_;
  uint64_t at_ = 0;
  uint64_t alignment_ = kDefaultAlignment;
  std::string_view key_;  // being read
  std::unordered_set<std::string_view> names_;
  GgufContents contents_;
};

absl::Status Parser::ParseHeader(uint64_t* tensor_count, uint64_t* value_count) {
  uint32_t magic = 0;
  if (!Read(&magic) || magic != kMagic) return Error("does not begin with \"GGUF\"");
  if (!Read(&contents_.version)) return Truncated("the header");
  const uint32_t version = contents_.version;
  if (version != 0 && (version & 0xffff) == 0) {
    return Error("is big-endian GGUF, which is not supported");
  }
  if (version != 2 && version != 3) {
    return absl::UnimplementedError(absl::StrCat(std::string(file_), ": GGUF version ", version,
                                                 " is not supported (2 and 3 are)"));
  }
  if (!Read(tensor_count) || !Read(value_count)) return Truncated("the header");
  // The least that each takes: a name's length, dimensions' count, one dimension, type, offset; a
  // key's length, type, one byte.
  constexpr uint64_t kLeastTensor = 8 + 4 + 8 + 4 + 8;
  constexpr uint64_t kLeastValue = 8 + 4 + 1;
  if (*value_count > left() / kLeastValue) {
    return Error(absl::StrCat("claims ", *value_count, " key/values, more than the file can hold"));
  }
  if (*tensor_count > left() / kLeastTensor) {
    return Error(absl::StrCat("claims ", *tensor_count, " tensors, more than the file can hold"));
  }
  return absl::OkStatus();
}

absl::Status Parser::ParseKeyValue() {
  if (!ReadString(&key_)) return Truncated("a key");
  if (key_.empty()) return Error("a key is empty");
  if (key_.size() > kMaxKeyBytes) return KeyError("is longer than 65535 bytes");
  uint32_t type = 0;
  if (!Read(&type)) return TruncatedValue();
  const std::optional<GgufKind> kind = KindOf(type);
  if (!kind) return KeyError(absl::StrCat("value type ", type, " is unknown"));
  GgufValue value;
  value.kind = *kind;
  if (*kind == GgufKind::kArray) {
    RETURN_IF_ERROR(ParseArray(0, &value));
  } else {
    RETURN_IF_ERROR(ParseScalar(static_cast<ValueType>(type), &value));
  }
  if (!contents_.values.emplace(key_, std::move(value)).second) return KeyError("occurs twice");
  return absl::OkStatus();
}

absl::Status Parser::ParseScalar(ValueType type, GgufValue* out) {
  const auto number = [&](auto value) -> absl::Status {
    if (!Read(&value)) return TruncatedValue();
    using T = decltype(value);
    if constexpr (std::is_floating_point_v<T>) {
      out->real = value;
    } else if constexpr (std::is_signed_v<T>) {
      out->signed_value = value;
    } else {
      out->unsigned_value = value;
    }
    return absl::OkStatus();
  };
  switch (type) {
    case ValueType::kU8:
      return number(uint8_t{});
    case ValueType::kI8:
      return number(int8_t{});
    case ValueType::kU16:
      return number(uint16_t{});
    case ValueType::kI16:
      return number(int16_t{});
    case ValueType::kU32:
      return number(uint32_t{});
    case ValueType::kI32:
      return number(int32_t{});
    case ValueType::kU64:
      return number(uint64_t{});
    case ValueType::kI64:
      return number(int64_t{});
    case ValueType::kF32:
      return number(float{});
    case ValueType::kF64:
      return number(double{});
    case ValueType::kBool: {
      uint8_t byte = 0;
      if (!Read(&byte)) return TruncatedValue();
      if (byte > 1) return KeyError(absl::StrCat("a boolean is ", byte, ", not 0 or 1"));
      out->boolean = byte == 1;
      return absl::OkStatus();
    }
    case ValueType::kString:
      return ReadString(&out->string) ? absl::OkStatus() : TruncatedValue();
    case ValueType::kArray:
      break;
  }
  return KeyError("is an array where none can be");
}

absl::Status Parser::ParseElement(ValueType type, GgufValue* array) {
  GgufValue element;
  RETURN_IF_ERROR(ParseScalar(type, &element));
  switch (array->element_kind) {
    case GgufKind::kString:
      array->strings.push_back(element.string);
      break;
    case GgufKind::kReal:
      array->reals.push_back(element.real);
      break;
    case GgufKind::kUnsigned:
      if (element.unsigned_value > uint64_t{std::numeric_limits<int64_t>::max()}) {
        return KeyError("an element is beyond the range of int64");
      }
      array->integers.push_back(static_cast<int64_t>(element.unsigned_value));
      break;
    case GgufKind::kSigned:
      array->integers.push_back(element.signed_value);
      break;
    case GgufKind::kBool:
      array->integers.push_back(element.boolean ? 1 : 0);
      break;
    case GgufKind::kArray:
      break;
  }
  return absl::OkStatus();
}

absl::Status Parser::ParseArray(int depth, GgufValue* out) {
  uint32_t type = 0;
  uint64_t count = 0;
  if (!Read(&type) || !Read(&count)) return TruncatedValue();
  const std::optional<GgufKind> kind = KindOf(type);
  if (!kind) return KeyError(absl::StrCat("element type ", type, " is unknown"));
  if (count > left() / LeastBytes(static_cast<ValueType>(type))) {
    return KeyError(absl::StrCat("claims ", count, " elements, more than the file can hold"));
  }
  out->element_kind = *kind;
  if (*kind == GgufKind::kArray) {
    if (depth + 1 == kMaxArrayDepth) return KeyError("arrays are nested too deeply");
    for (uint64_t i = 0; i < count; ++i) {
      GgufValue dropped;
      RETURN_IF_ERROR(ParseArray(depth + 1, &dropped));
    }
    return absl::OkStatus();
  }
  if (*kind == GgufKind::kString) {
    out->strings.reserve(count);
  } else if (*kind == GgufKind::kReal) {
    out->reals.reserve(count);
  } else {
    out->integers.reserve(count);
  }
  for (uint64_t i = 0; i < count; ++i) {
    RETURN_IF_ERROR(ParseElement(static_cast<ValueType>(type), out));
  }
  return absl::OkStatus();
}

absl::Status Parser::ReadAlignment() {
  const auto it = contents_.values.find(kAlignmentKey);
  if (it == contents_.values.end()) return absl::OkStatus();
  key_ = kAlignmentKey;
  if (it->second.kind != GgufKind::kUnsigned) return KeyError("is not an unsigned integer");
  alignment_ = it->second.unsigned_value;
  if (!std::has_single_bit(alignment_) || alignment_ > kMaxAlignment) {
    return KeyError(absl::StrCat("is ", alignment_, ", not a power of two up to ", kMaxAlignment));
  }
  return absl::OkStatus();
}

absl::Status Parser::ParseShape(GgufTensor* tensor) {
  uint32_t rank = 0;
  if (!Read(&rank)) return Truncated("the tensor descriptions");
  if (rank == 0 || rank > uint32_t{GgufTensor::kMaxRank}) {
    return TensorError(tensor->name,
                       absl::StrCat("has ", rank, " dimensions, not 1 to ", GgufTensor::kMaxRank));
  }
  tensor->rank = static_cast<int>(rank);
  for (uint32_t i = 0; i < rank; ++i) {
    int64_t dim = 0;
    if (!Read(&dim)) return Truncated("the tensor descriptions");
    if (dim <= 0) {
      return TensorError(tensor->name, absl::StrCat("dimension ", i, " is ", dim));
    }
    tensor->shape[rank - 1 - i] = dim;
  }
  return absl::OkStatus();
}

absl::Status Parser::ParseTensor() {
  GgufTensor tensor;
  tensor.file = file_;
  if (!ReadString(&tensor.name)) return Truncated("the tensor descriptions");
  if (tensor.name.empty()) return Error("a tensor has an empty name");
  if (tensor.name.size() > kMaxNameBytes) {
    return TensorError(tensor.name, "the name is longer than 1024 bytes");
  }
  if (!names_.insert(tensor.name).second) return TensorError(tensor.name, "the name occurs twice");
  RETURN_IF_ERROR(ParseShape(&tensor));
  uint32_t number = 0;
  if (!Read(&number) || !Read(&tensor.offset)) return Truncated("the tensor descriptions");
  tensor.type = FindGgufType(number);
  if (tensor.type == nullptr) {
    const std::string_view name = GgufTypeName(number);
    return TensorError(tensor.name,
                       absl::StrCat("type ", number,
                                    name.empty() ? "" : absl::StrCat(" (", std::string(name), ")"),
                                    " is not supported"));
  }
  if (tensor.row_elements() % tensor.type->block_elements != 0) {
    return TensorError(
        tensor.name,
        absl::StrCat("rows of ", tensor.row_elements(), " elements are not whole blocks of ",
                     tensor.type->name, " (", tensor.type->block_elements, ")"));
  }
  // Capped as int64 so that every element count and byte offset later fits a signed index.
  int64_t elements = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    if (__builtin_mul_overflow(elements, tensor.shape[static_cast<size_t>(i)], &elements) ||
        elements > std::numeric_limits<int64_t>::max() / 8) {
      return TensorError(tensor.name, "the size of its shape overflows");
    }
  }
  tensor.bytes =
      static_cast<uint64_t>(elements) / tensor.type->block_elements * tensor.type->block_bytes;
  contents_.tensors.push_back(tensor);
  return absl::OkStatus();
}

// Offsets count from the data section, which begins at the next aligned byte.
absl::Status Parser::Place() {
  const uint64_t data_begin = (at_ + alignment_ - 1) / alignment_ * alignment_;
  for (GgufTensor& tensor : contents_.tensors) {
    if (tensor.offset % alignment_ != 0) {
      return TensorError(tensor.name,
                         absl::StrCat("offset ", tensor.offset,
                                      " is not a multiple of the alignment ", alignment_));
    }
    uint64_t end = 0;
    if (__builtin_add_overflow(tensor.offset, data_begin, &tensor.offset) ||
        __builtin_add_overflow(tensor.offset, tensor.bytes, &end)) {
      return TensorError(tensor.name, "its offset overflows");
    }
    if (end > bytes_.size()) {
      return absl::DataLossError(absl::StrCat(
          std::string(file_), ": truncated (interrupted download?): tensor ",
          QuoteForMessage(tensor.name), " ends at byte ", end, ", the file has ", bytes_.size()));
    }
    tensor.data = reinterpret_cast<const uint8_t*>(bytes_.data()) + tensor.offset;
  }
  std::sort(contents_.tensors.begin(), contents_.tensors.end(),
            [](const GgufTensor& a, const GgufTensor& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < contents_.tensors.size(); ++i) {
    const GgufTensor& before = contents_.tensors[i - 1];
    const GgufTensor& tensor = contents_.tensors[i];
    if (before.offset + before.bytes > tensor.offset) {
      return TensorError(tensor.name,
                         absl::StrCat("overlaps tensor ", QuoteForMessage(before.name)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

const GgufTypeInfo* FindGgufType(uint32_t number) {
  for (const GgufTypeInfo& info : kTypes) {
    if (static_cast<uint32_t>(info.type) == number) return &info;
  }
  return nullptr;
}

std::string_view GgufTypeName(uint32_t number) {
  if (const GgufTypeInfo* info = FindGgufType(number)) return info->name;
  for (const auto& [other, name] : kOtherTypes) {
    if (other == number) return name;
  }
  return {};
}

std::optional<DType> GgufElementType(const GgufTypeInfo& type) {
  switch (type.type) {
    case GgufType::kF32:
      return DType::kF32;
    case GgufType::kF16:
      return DType::kF16;
    case GgufType::kBf16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

absl::StatusOr<GgufContents> ParseGguf(std::string_view file, std::string_view bytes) {
  return Parser(file, bytes).Parse();
}

}  // namespace tandem
