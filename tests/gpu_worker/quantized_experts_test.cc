// Trials QF: routed experts of quantized checkpoints through store and engine, in one share and in
// several, in parity mode, against their values multiplied in double.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/hw/cpu_features.h"
#include "common/hw/isa.h"
#include "common/model/expert_tensors.h"
#include "expert_worker/kernels/select.h"
#include "gpu_worker/inprocess_experts.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem::gpu {
namespace {

using tandem::testing::RawBytes;
using tandem::testing::SafetensorsBuilder;
using ::testing::HasSubstr;

constexpr int kExperts = 2;
constexpr int kRows = 3;

// One MoE layer of two experts, both picked by every row.
ModelSpec OneLayer(int hidden, int intermediate, const QuantScheme& quant) {
  ModelSpec spec;
  spec.model_type = "qwen3_moe";
  spec.hidden = hidden;
  spec.moe.experts = kExperts;
  spec.moe.top_k = kExperts;
  spec.moe.intermediate = intermediate;
  spec.quant = quant;
  LayerSpec& layer = spec.layers.emplace_back();
  layer.moe = true;
  layer.expert_gate = "%d.gate.weight";
  layer.expert_up = "%d.up.weight";
  layer.expert_down = "%d.down.weight";
  return spec;
}

struct Model {
  tandem::testing::TempDir dir;
  std::unique_ptr<Checkpoint> checkpoint;
  ModelSpec spec;

  Model(const std::string& bytes, ModelSpec model) : spec(std::move(model)) {
    dir.Write("model.safetensors", bytes);
    auto opened = Checkpoint::Open(dir.path());
    EXPECT_TRUE(opened.ok()) << opened.status();
    if (opened.ok()) checkpoint = *std::move(opened);
  }
};

std::vector<float> RandomRows(int hidden, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(static_cast<size_t>(kRows * hidden));
  for (float& value : x) value = normal(random);
  return x;
}

constexpr float kWeights[kExperts] = {0.75f, 0.25f};

absl::StatusOr<std::unique_ptr<InProcessExperts>> Load(const Model& model,
                                                       const std::vector<uint32_t>& shares,
                                                       Isa isa = Isa::kAmx) {
  expert::LoadProgress progress;
  return InProcessExperts::Create(*model.checkpoint, model.spec,
                                  {.shares = shares,
                                   .kernels = kernels::SelectKernelTable(isa, DetectCpuFeatures()),
                                   .threads = 1,
                                   .max_rows = kRows,
                                   .row_type = shm::RowType::kF32},
                                  progress);
}

// What the workers of `shares` answer for the rows `x`.
std::vector<float> Answer(const Model& model, const std::vector<float>& x,
                          const std::vector<uint32_t>& shares, Isa isa = Isa::kAmx) {
  auto experts = Load(model, shares, isa);
  EXPECT_TRUE(experts.ok()) << experts.status();
  std::vector<float> out(x.size());
  if (!experts.ok()) return out;
  ExpertLink& link = *(*experts)->link();
  const int32_t rows = kRows;
  std::vector<uint16_t> ids;
  std::vector<float> weights;
  for (int row = 0; row < kRows; ++row) {
    for (int expert = 0; expert < kExperts; ++expert) {
      ids.push_back(static_cast<uint16_t>(expert));
      weights.push_back(kWeights[expert]);
    }
  }
  link.BeginStep(1);
  link.Submit({.rows = &rows,
               .max_rows = kRows,
               .x = x.data(),
               .ids = ids.data(),
               .weights = weights.data()},
              0, 1);
  link.Wait({.rows = &rows, .max_rows = kRows, .out = out.data()}, 0, 1);
  const absl::Status status = link.EndStep();
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

std::vector<double> Times(const std::vector<float>& matrix, const std::vector<double>& x) {
  std::vector<double> out(matrix.size() / x.size());
  for (size_t row = 0; row < out.size(); ++row) {
    for (size_t col = 0; col < x.size(); ++col) {
      out[row] += double{matrix[row * x.size() + col]} * x[col];
    }
  }
  return out;
}

// The same from the matrices' values in double.
std::vector<double> Expected(const Model& model, const std::vector<float>& x) {
  const auto tensors = ExpertTensors::Create(*model.checkpoint, model.spec);
  EXPECT_TRUE(tensors.ok()) << tensors.status();
  const auto hidden = static_cast<size_t>(model.spec.hidden);
  const int64_t intermediate = model.spec.moe.intermediate;
  const auto read = [&](int expert, ExpertPart part) {
    const Range wide{0, intermediate}, narrow{0, model.spec.hidden};
    const bool down = part == ExpertPart::kDown;
    std::vector<float> values(hidden * static_cast<size_t>(intermediate));
    const absl::Status status = tensors->Read(0, expert, part, down ? narrow : wide,
                                              down ? wide : narrow, DType::kF32, values.data());
    EXPECT_TRUE(status.ok()) << status;
    return values;
  };
  std::vector<double> out(x.size());
  for (int expert = 0; expert < kExperts; ++expert) {
    const auto gate = read(expert, ExpertPart::kGate), up = read(expert, ExpertPart::kUp);
    const auto down = read(expert, ExpertPart::kDown);
    for (size_t row = 0; row < kRows; ++row) {
      const auto begin = x.begin() + static_cast<std::ptrdiff_t>(row * hidden);
      const std::vector<double> input(begin, begin + static_cast<std::ptrdiff_t>(hidden));
      const auto g = Times(gate, input);
      auto h = Times(up, input);
      for (size_t i = 0; i < h.size(); ++i) h[i] *= g[i] / (1 + std::exp(-g[i]));
      const auto y = Times(down, h);
      for (size_t i = 0; i < hidden; ++i) out[row * hidden + i] += kWeights[expert] * y[i];
    }
  }
  return out;
}

void ExpectNear(const std::vector<float>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0, worst = 0;
  for (double value : want) largest = std::max(largest, std::abs(value));
  ASSERT_GT(largest, 0);
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(got[i] - want[i]);
    worst = error <= worst ? worst : error;  // a NaN stays
  }
  EXPECT_LE(worst, 1e-5 * largest);
}

TEST(QuantizedExperts, Trial_QF_1_RaggedBlocksAreReadByTheConfig) {
  const auto path = tandem::testing::SharedPath("golden/quant/fp8_block.safetensors");
  if (!path) GTEST_SKIP() << "no golden/quant/fp8_block.safetensors";
  const auto file = SafetensorsFile::Open(*path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::string codes, scales, x_bytes;
  std::vector<float> expected(200 * 272);
  for (const SafetensorsEntry& entry : (*file)->entries()) {
    const std::string bytes((*file)->View(entry).As<const char>(), entry.end - entry.begin);
    if (entry.name == "ragged.weight") codes = bytes;
    if (entry.name == "ragged.weight_scale_inv") scales = bytes;
    if (entry.name == "ragged.x") x_bytes = bytes;
    if (entry.name == "ragged.expected") std::memcpy(expected.data(), bytes.data(), bytes.size());
  }
  SafetensorsBuilder builder;
  for (const std::string expert : {"0.", "1."}) {
    for (const std::string part : {"gate.weight", "up.weight"}) {
      builder.Add(expert + part, "F8_E4M3", {200, 272}, codes)
          .Add(expert + part + "_scale_inv", "F32", {2, 3}, scales);
    }
    // The same codes as a matrix of 272 rows, three blocks high and two wide.
    builder.Add(expert + "down.weight", "F8_E4M3", {272, 200}, codes)
        .Add(expert + "down.weight_scale_inv", "F32", {3, 2}, scales);
  }
  QuantScheme fp8;
  fp8.method = QuantMethod::kFp8;
  const Model model(builder.Build(), OneLayer(272, 200, fp8));
  const auto tensors = ExpertTensors::Create(*model.checkpoint, model.spec);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  std::vector<float> up(expected.size());
  ASSERT_TRUE(
      tensors->Read(0, 1, ExpertPart::kUp, {0, 200}, {0, 272}, DType::kF32, up.data()).ok());
  ASSERT_EQ(up, expected);
  std::vector<float> x(kRows * 272);
  ASSERT_EQ(x_bytes.size(), x.size() * sizeof(float));
  std::memcpy(x.data(), x_bytes.data(), x_bytes.size());
  const auto want = Expected(model, x);
  ExpectNear(Answer(model, x, {1}), want);
  ExpectNear(Answer(model, x, {1, 1}), want);
}

SafetensorsBuilder AllCodesModel(bool with_nan) {
  std::string codes;
  for (int code = 0; code < 256; ++code) {
    codes += static_cast<char>(!with_nan && (code & 0x7f) == 0x7f ? code - 1 : code);
  }
  SafetensorsBuilder builder;
  for (const std::string expert : {"0.", "1."}) {
    for (const std::string part : {"gate.weight", "up.weight"}) {
      builder.Add(expert + part, "F8_E4M3", {4, 256}, codes + codes + codes + codes)
          .Add(expert + part + "_scale_inv", "F32", {1, 2}, RawBytes<float>({1, 1}));
    }
    builder.Add(expert + "down.weight", "F8_E4M3", {256, 4}, codes + codes + codes + codes)
        .Add(expert + "down.weight_scale_inv", "F32", {2, 1}, RawBytes<float>({1, 1}));
  }
  return builder;
}

TEST(QuantizedExperts, Trial_QF_3_NanCodesAreRefusedAndAllOthersAreExactOnEveryIsa) {
  const Model with_nan(AllCodesModel(true).Build(), OneLayer(256, 4, {}));
  const absl::Status refused = Load(with_nan, {1}).status();
  EXPECT_THAT(std::string(refused.message()), HasSubstr("model.safetensors: tensor '"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("holds a NaN code of FP8 E4M3"));
  const Model without(AllCodesModel(false).Build(), OneLayer(256, 4, {}));
  const std::vector<float> x = RandomRows(256, 3);
  const auto want = Expected(without, x);
  for (const Isa isa : {Isa::kRef, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
    SCOPED_TRACE(static_cast<int>(isa));
    ExpectNear(Answer(without, x, {1}, isa), want);
  }
}

// Experts of random 4-bit words, inputs in groups of `group`; every zero point nibble is `zero`.
enum class Layout { kAwq, kGptq };
SafetensorsBuilder IntegerModel(Layout layout, int64_t hidden, int64_t intermediate, int64_t group,
                                uint32_t zero) {
  std::mt19937 random(11);
  SafetensorsBuilder builder;
  for (const std::string expert : {"0.", "1."}) {
    for (const std::string part : {"gate", "up", "down"}) {
      const int64_t n = part == "down" ? hidden : intermediate;
      const int64_t k = part == "down" ? intermediate : hidden;
      std::vector<uint32_t> words(static_cast<size_t>(n * k / 8));
      for (uint32_t& word : words) word = static_cast<uint32_t>(random());
      std::vector<uint16_t> scales(static_cast<size_t>(k / group * n));
      // 2^-7 to just below 2^-5 as F16.
      for (uint16_t& scale : scales) scale = static_cast<uint16_t>(0x2000 + random() % 0x800);
      const std::vector<uint32_t> zeros(static_cast<size_t>(k / group * n / 8), zero * 0x11111111u);
      const bool awq = layout == Layout::kAwq;
      builder
          .Add(expert + part + ".qweight", "I32", {awq ? k : k / 8, awq ? n / 8 : n},
               RawBytes(words))
          .Add(expert + part + ".qzeros", "I32", {k / group, n / 8}, RawBytes(zeros))
          .Add(expert + part + ".scales", "F16", {k / group, n}, RawBytes(scales));
    }
  }
  return builder;
}

QuantScheme Integers(QuantMethod method, int64_t group, bool symmetric) {
  QuantScheme scheme;
  scheme.method = method;
  scheme.weights = {{4, group, symmetric}};
  return scheme;
}

TEST(QuantizedExperts, Trial_QF_7_MoreWorkersThanGroups) {
  const Model model(IntegerModel(Layout::kGptq, 256, 256, 128, 7).Build(),
                    OneLayer(256, 256, Integers(QuantMethod::kGptq, 128, true)));
  const std::vector<float> x = RandomRows(256, 7);
  const auto want = Expected(model, x);
  ExpectNear(Answer(model, x, {1}), want);
  ExpectNear(Answer(model, x, {1, 1, 1}), want);
  ExpectNear(Answer(model, x, {1, 1, 1, 1}), want);
}

TEST(QuantizedExperts, Trial_QF_9_ZeroPointsAtTheEndsOfTheirRange) {
  const std::vector<float> x = RandomRows(64, 9);
  // Nibble 15 of GPTQ v1 is the zero point 16, nibble 0 of AWQ the zero point 0.
  const Model gptq(IntegerModel(Layout::kGptq, 64, 96, 32, 15).Build(),
                   OneLayer(64, 96, Integers(QuantMethod::kGptq, 32, false)));
  ExpectNear(Answer(gptq, x, {1}), Expected(gptq, x));
  ExpectNear(Answer(gptq, x, {3, 1}), Expected(gptq, x));
  const Model awq(IntegerModel(Layout::kAwq, 64, 96, 32, 0).Build(),
                  OneLayer(64, 96, Integers(QuantMethod::kAwq, 32, false)));
  ExpectNear(Answer(awq, x, {1}), Expected(awq, x));
  ExpectNear(Answer(awq, x, {3, 1}), Expected(awq, x));
}

}  // namespace
}  // namespace tandem::gpu
