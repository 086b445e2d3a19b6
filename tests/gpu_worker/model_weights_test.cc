// Loading of weights: what is counted, and what is refused with file and tensor named.

#include "gpu_worker/model_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "common/checkpoint/safetensors.h"
#include "common/hw/cpu_features.h"
#include "common/model/model_loader.h"
#include "expert_worker/kernels/select.h"
#include "gpu_worker/backend_cpu/cpu_backend.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem::gpu {
namespace {

using ::testing::HasSubstr;

class ModelWeightsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const auto dir = tandem::testing::SharedPath("golden/models/" + GetParam());
    if (!dir) GTEST_SKIP() << "no golden/models/" << GetParam();
    dir_ = dir->string();
  }
  absl::Status Load(const std::string& dir, const std::function<absl::Status(uint64_t)>& progress) {
    auto checkpoint = Checkpoint::Open(dir);
    if (!checkpoint.ok()) return checkpoint.status();
    auto spec = LoadModelSpec(**checkpoint);
    if (!spec.ok()) return spec.status();
    total_ = DenseBytes(**checkpoint, *spec);
    CpuBackendOptions options;
    options.kernels = kernels::SelectKernelTable(Isa::kAmx, DetectCpuFeatures());
    options.max_rows = 1;
    options.max_vocab = spec->vocab;
    options.max_experts = spec->moe.experts;
    CpuBackend backend(options);
    return LoadModelWeights(**checkpoint, *spec, backend, progress).status();
  }
  bool HasTensor(const std::string& name) {
    auto checkpoint = Checkpoint::Open(dir_);
    return checkpoint.ok() && (*checkpoint)->Find(name) != nullptr;
  }
  // A copy of the model whose last element of `tensor` is NaN.
  std::string CopyWithNan(const tandem::testing::TempDir& temp, const std::string& tensor) {
    std::string bytes = tandem::testing::ReadWholeFile(dir_ + "/model.safetensors");
    auto entries = ParseSafetensorsHeader("model", bytes, bytes.size());
    EXPECT_TRUE(entries.ok());
    for (const SafetensorsEntry& entry : *entries) {
      if (entry.name != tensor) continue;
      bytes[entry.end - 1] = 0x7F;  // BF16 0x7FFF, F32 0x7FFF....
      bytes[entry.end - 2] = static_cast<char>(0xFF);
    }
    temp.Write("model.safetensors", bytes);
    temp.Write("config.json", tandem::testing::ReadWholeFile(dir_ + "/config.json"));
    return temp.path().string();
  }

  std::string dir_;
  uint64_t total_ = 0;
};

TEST_P(ModelWeightsTest, ProgressEndsAtTheTotal) {
  uint64_t last = 0;
  const absl::Status status = Load(dir_, [&](uint64_t bytes) {
    EXPECT_GE(bytes, last);
    last = bytes;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(last, total_);
}

TEST_P(ModelWeightsTest, ProgressCanEndTheLoad) {
  const absl::Status status = Load(dir_, [](uint64_t) { return absl::CancelledError("enough"); });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST_P(ModelWeightsTest, NanNamesFileAndTensor) {
  for (const std::string& tensor :
       {std::string("model.embed_tokens.weight"), std::string("model.norm.weight"),
        std::string("model.layers.1.input_layernorm.weight"),
        std::string("model.layers.1.self_attn.o_proj.weight"),
        std::string("model.layers.1.self_attn.kv_b_proj.weight"),
        std::string("model.layers.1.self_attn.q_proj.weight")}) {
    if (!HasTensor(tensor)) continue;
    const tandem::testing::TempDir temp;
    const std::string dir = CopyWithNan(temp, tensor);
    const absl::Status status = Load(dir, {});
    ASSERT_FALSE(status.ok()) << tensor;
    EXPECT_THAT(std::string(status.message()), HasSubstr(dir));
    EXPECT_THAT(std::string(status.message()), HasSubstr(tensor));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ModelWeightsTest,
                         ::testing::Values("llama", "qwen3", "deepseek_v3", "qwen3_moe_fp8"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tandem::gpu
