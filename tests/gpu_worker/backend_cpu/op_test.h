#pragma once

// What the tests of the CPU backend's ops share: backends of any width and instruction set, random
// inputs, golden files, comparison with a reference in F64. Ops are called through Backend, as the
// decoder calls them.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "common/checkpoint/safetensors.h"
#include "common/hw/isa.h"
#include "gpu_worker/backend_cpu/cpu_backend.h"

namespace tandem::gpu {

struct BackendConfig {
  int threads = 1;
  Isa cap = Isa::kAmx;
};

// Scratch for 256 rows, a vocabulary of 200,000 and 512 experts.
std::unique_ptr<CpuBackend> MakeBackend(BackendConfig config = {});

// Every instruction set that runs here, ref first, with 1 and 2 threads.
std::vector<BackendConfig> AllConfigs();
void PrintTo(const BackendConfig& config, std::ostream* stream);
std::string ConfigName(const ::testing::TestParamInfo<BackendConfig>& info);

// Normal values with the given deviation.
std::vector<float> RandomVector(size_t count, uint32_t seed, float deviation = 1.0f);

// max |actual - expected| <= tolerance * max |expected|.
void ExpectClose(const std::vector<float>& actual, const std::vector<double>& expected,
                 double tolerance);
void ExpectClose(const std::vector<float>& actual, const std::vector<float>& expected,
                 double tolerance);
// The same bits.
void ExpectSameBits(const std::vector<float>& actual, const std::vector<float>& expected);

inline Matrix AsMatrix(std::vector<float>& values, int64_t ld) { return {values.data(), ld}; }
inline ConstMatrix AsMatrix(const std::vector<float>& values, int64_t ld) {
  return {values.data(), ld};
}

// A linear of the F32 matrix `w` [n, k].
std::unique_ptr<LinearWeight> MakeLinear(Backend& backend, const std::vector<float>& w, int64_t n,
                                         int64_t k, DType dtype = DType::kF32);

// A file of golden/ops; null where the golden data is not present.
class Golden {
 public:
  static std::optional<Golden> Open(std::string_view name);
  std::vector<float> F32(std::string_view tensor) const;
  std::vector<int32_t> I32(std::string_view tensor) const;

 private:
  TensorView Find(std::string_view tensor) const;
  std::unique_ptr<SafetensorsFile> file_;
};

// A paged cache of one layer with sequences whose blocks lie in a shuffled order.
class TestCache {
 public:
  struct Shape {
    int sequences = 1;
    int blocks_per_sequence = 8;
    int block_tokens = 16;
    int64_t k_width = 0;
    int64_t v_width = 0;
    DType dtype = DType::kF32;
  };
  TestCache(const Shape& shape, uint32_t seed);

  PagedCache cache() const { return cache_; }
  // Rows of a step at (sequence, position), for `place`; valid until the next call.
  RowPlace Place(const std::vector<int32_t>& sequences, const std::vector<int32_t>& positions);
  // Stores the keys (and values) of positions [0, count) of a sequence.
  void Fill(Backend& backend, int sequence, const std::vector<float>& k,
            const std::vector<float>& v, int count);

 private:
  Shape shape_;
  std::vector<unsigned char> k_, v_;
  std::vector<int32_t> block_table_, sequences_, positions_;
  PagedCache cache_;
};

}  // namespace tandem::gpu
