#include "tests/gpu_worker/backend_cpu/op_test.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "common/hw/cpu_features.h"
#include "common/tensor/convert.h"
#include "expert_worker/kernels/select.h"
#include "tests/testing/shared_data.h"

namespace tandem::gpu {

std::unique_ptr<CpuBackend> MakeBackend(BackendConfig config) {
  CpuBackendOptions options;
  options.threads = config.threads;
  options.spin = std::chrono::microseconds(20);
  options.kernels = kernels::SelectKernelTable(config.cap, DetectCpuFeatures());
  options.max_rows = 256;
  options.max_vocab = 200'000;
  options.max_experts = 512;
  return std::make_unique<CpuBackend>(options);
}

std::vector<BackendConfig> AllConfigs() {
  std::vector<BackendConfig> configs;
  for (const Isa isa : {Isa::kRef, Isa::kAvx2, Isa::kAvx512}) {
    const auto* table = kernels::SelectKernelTable(isa, DetectCpuFeatures());
    if (table->isa != isa) continue;
    for (const int threads : {1, 2}) configs.push_back({threads, isa});
  }
  return configs;
}

void PrintTo(const BackendConfig& config, std::ostream* stream) {
  *stream << IsaName(config.cap) << "_threads" << config.threads;
}

std::string ConfigName(const ::testing::TestParamInfo<BackendConfig>& info) {
  return ::testing::PrintToString(info.param);
}

std::vector<float> RandomVector(size_t count, uint32_t seed, float deviation) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

void ExpectClose(const std::vector<float>& actual, const std::vector<double>& expected,
                 double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(double{actual[i]} - expected[i]);
    if (!(error <= worst)) {
      worst = error;
      at = i;
    }
  }
  EXPECT_LE(worst, tolerance * largest)
      << "element " << at << " is " << actual[at] << ", not " << expected[at];
}

void ExpectClose(const std::vector<float>& actual, const std::vector<float>& expected,
                 double tolerance) {
  ExpectClose(actual, std::vector<double>(expected.begin(), expected.end()), tolerance);
}

void ExpectSameBits(const std::vector<float>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(actual[i]), std::bit_cast<uint32_t>(expected[i]))
        << "element " << i << ": " << actual[i] << " and " << expected[i];
  }
}

std::unique_ptr<LinearWeight> MakeLinear(Backend& backend, const std::vector<float>& w, int64_t n,
                                         int64_t k, DType dtype) {
  MatrixSource source;
  source.n = n;
  source.k = k;
  source.dtype = dtype;
  source.read = [&](int64_t begin, int64_t end, void* out) {
    const float* from = w.data() + begin * k;
    if (dtype == DType::kBF16) {
      ConvertF32ToBf16(from, (end - begin) * k, out);
    } else {
      std::memcpy(out, from, static_cast<size_t>((end - begin) * k) * sizeof(float));
    }
    return absl::OkStatus();
  };
  auto weight = backend.LoadLinear(source);
  EXPECT_TRUE(weight.ok()) << weight.status();
  return std::move(weight).value();
}

std::optional<Golden> Golden::Open(std::string_view name) {
  const auto path = testing::SharedPath("golden/ops/" + std::string(name) + ".safetensors");
  if (!path) return std::nullopt;
  auto file = SafetensorsFile::Open(path->string());
  EXPECT_TRUE(file.ok()) << file.status();
  Golden golden;
  golden.file_ = std::move(file).value();
  return golden;
}

TensorView Golden::Find(std::string_view tensor) const {
  for (const SafetensorsEntry& entry : file_->entries()) {
    if (entry.name == tensor) return file_->View(entry);
  }
  ADD_FAILURE() << "no tensor " << tensor << " in " << file_->path();
  return {};
}

std::vector<float> Golden::F32(std::string_view tensor) const {
  const TensorView view = Find(tensor);
  EXPECT_EQ(view.dtype, DType::kF32);
  std::vector<float> values(static_cast<size_t>(view.Elements()));
  std::memcpy(values.data(), view.data, values.size() * sizeof(float));
  return values;
}

std::vector<int32_t> Golden::I32(std::string_view tensor) const {
  const TensorView view = Find(tensor);
  EXPECT_EQ(view.dtype, DType::kI32);
  std::vector<int32_t> values(static_cast<size_t>(view.Elements()));
  std::memcpy(values.data(), view.data, values.size() * sizeof(int32_t));
  return values;
}

TestCache::TestCache(const Shape& shape, uint32_t seed) : shape_(shape) {
  const int blocks = shape.sequences * shape.blocks_per_sequence;
  // NaN everywhere: what was not written must not be read into a result.
  const size_t tokens = static_cast<size_t>(blocks) * static_cast<size_t>(shape.block_tokens);
  k_.assign(tokens * static_cast<size_t>(shape.k_width) * DTypeBytes(shape.dtype), 0xff);
  v_.assign(tokens * static_cast<size_t>(shape.v_width) * DTypeBytes(shape.dtype), 0xff);
  block_table_.resize(static_cast<size_t>(blocks));
  std::iota(block_table_.begin(), block_table_.end(), 0);
  std::shuffle(block_table_.begin(), block_table_.end(), std::mt19937(seed));
  cache_ = {.k = k_.data(),
            .v = v_.empty() ? nullptr : v_.data(),
            .dtype = shape.dtype,
            .block_count = blocks,
            .k_width = shape.k_width,
            .v_width = shape.v_width};
}

RowPlace TestCache::Place(const std::vector<int32_t>& sequences,
                          const std::vector<int32_t>& positions) {
  sequences_ = sequences;
  positions_ = positions;
  return {.positions = positions_.data(),
          .sequence = sequences_.data(),
          .block_table = block_table_.data(),
          .blocks_per_sequence = shape_.blocks_per_sequence,
          .block_tokens = shape_.block_tokens};
}

void TestCache::Fill(Backend& backend, int sequence, const std::vector<float>& k,
                     const std::vector<float>& v, int count) {
  std::vector<int32_t> positions(static_cast<size_t>(count));
  std::iota(positions.begin(), positions.end(), 0);
  CacheWriteArgs write;
  write.rows.bound = count;
  write.place = Place(std::vector<int32_t>(positions.size(), sequence), positions);
  write.k = AsMatrix(k, shape_.k_width);
  write.v = AsMatrix(v, shape_.v_width);
  write.cache = cache_;
  backend.CacheWrite(write);
}

}  // namespace tandem::gpu
