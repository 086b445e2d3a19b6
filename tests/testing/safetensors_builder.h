#pragma once

// Writes safetensors bytes for tests, well-formed or not, without the reader under test.

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem::testing {

// The 8-byte length, the header text and the data, whatever they hold.
inline std::string SafetensorsBytes(std::string_view header, std::string_view data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) {
    bytes += static_cast<char>((static_cast<uint64_t>(header.size()) >> (8 * i)) & 0xff);
  }
  return bytes.append(header).append(data);
}

template <typename T>
std::string RawBytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

class SafetensorsBuilder {
 public:
  SafetensorsBuilder& Add(std::string name, std::string_view dtype,
                          const std::vector<int64_t>& shape, std::string_view data) {
    std::string dims;
    for (int64_t dim : shape) dims += (dims.empty() ? "" : ",") + std::to_string(dim);
    const size_t begin = data_.size();
    data_.append(data);
    header_ += std::string(header_.empty() ? "" : ",") + "\"" + std::move(name) +
               "\":{\"dtype\":\"" + std::string(dtype) + "\",\"shape\":[" + dims +
               "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(data_.size()) +
               "]}";
    return *this;
  }

  std::string Build() const { return SafetensorsBytes("{" + header_ + "}", data_); }

 private:
  std::string header_;
  std::string data_;
};

}  // namespace tandem::testing
