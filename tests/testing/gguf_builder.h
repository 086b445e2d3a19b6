#pragma once

// Writes GGUF bytes for tests, well-formed or not, without the reader under test.

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem::testing {

template <typename T>
std::string LittleEndian(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

inline std::string GgufString(std::string_view text) {
  return LittleEndian<uint64_t>(text.size()).append(text);
}

// Value types by their number in the file.
enum class GgufWire : uint32_t {
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

class GgufBuilder {
 public:
  explicit GgufBuilder(uint64_t alignment = 32) : alignment_(alignment) {
    if (alignment != 32) U32("general.alignment", static_cast<uint32_t>(alignment));
  }

  // A value already in its bytes.
  GgufBuilder& Raw(std::string_view key, uint32_t type, std::string_view bytes) {
    values_ += GgufString(key) + LittleEndian(type) + std::string(bytes);
    ++value_count_;
    return *this;
  }
  template <typename T>
  GgufBuilder& Scalar(std::string_view key, GgufWire type, T value) {
    return Raw(key, static_cast<uint32_t>(type), LittleEndian(value));
  }
  GgufBuilder& U32(std::string_view key, uint32_t value) {
    return Scalar(key, GgufWire::kU32, value);
  }
  GgufBuilder& F32(std::string_view key, float value) { return Scalar(key, GgufWire::kF32, value); }
  GgufBuilder& Bool(std::string_view key, bool value) {
    return Scalar(key, GgufWire::kBool, static_cast<uint8_t>(value));
  }
  GgufBuilder& String(std::string_view key, std::string_view value) {
    return Raw(key, static_cast<uint32_t>(GgufWire::kString), GgufString(value));
  }
  GgufBuilder& Strings(std::string_view key, const std::vector<std::string>& values) {
    std::string bytes = LittleEndian(static_cast<uint32_t>(GgufWire::kString)) +
                        LittleEndian<uint64_t>(values.size());
    for (const std::string& value : values) bytes += GgufString(value);
    return Raw(key, static_cast<uint32_t>(GgufWire::kArray), bytes);
  }
  GgufBuilder& Ints(std::string_view key, const std::vector<int32_t>& values) {
    std::string bytes =
        LittleEndian(static_cast<uint32_t>(GgufWire::kI32)) + LittleEndian<uint64_t>(values.size());
    for (int32_t value : values) bytes += LittleEndian(value);
    return Raw(key, static_cast<uint32_t>(GgufWire::kArray), bytes);
  }

  // `shape` slowest first, as everywhere but in the file.
  GgufBuilder& Tensor(std::string_view name, std::vector<int64_t> shape, uint32_t type,
                      std::string_view data) {
    data_.resize((data_.size() + alignment_ - 1) / alignment_ * alignment_);
    TensorAt(name, std::move(shape), type, data_.size());
    data_ += data;
    return *this;
  }
  // Only the description.
  GgufBuilder& TensorAt(std::string_view name, std::vector<int64_t> shape, uint32_t type,
                        uint64_t offset) {
    tensors_ += GgufString(name) + LittleEndian(static_cast<uint32_t>(shape.size()));
    for (size_t i = shape.size(); i-- > 0;) tensors_ += LittleEndian(shape[i]);
    tensors_ += LittleEndian(type) + LittleEndian(offset);
    ++tensor_count_;
    return *this;
  }

  std::string Build(uint32_t version = 3) const {
    std::string bytes = "GGUF" + LittleEndian(version) + LittleEndian(tensor_count_) +
                        LittleEndian(value_count_) + values_ + tensors_;
    bytes.resize((bytes.size() + alignment_ - 1) / alignment_ * alignment_);
    return bytes + data_;
  }

 private:
  uint64_t alignment_;
  std::string values_, tensors_, data_;
  uint64_t value_count_ = 0;
  uint64_t tensor_count_ = 0;
};

}  // namespace tandem::testing
