// Golden models written as GGUF and run from the file in parity mode: the reference's logits and
// greedy tokens.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/gpu_worker/golden_model.h"
#include "tests/testing/gguf_convert.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem::gpu {
namespace {

constexpr uint32_t kNewTokens = 24;

class GgufGoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GgufGoldenTest, FileGivesReferenceLogitsAndTokens) {
  const auto hub = tandem::testing::SharedPath("golden/models/" + GetParam());
  if (!hub) GTEST_SKIP() << "no golden/models/" << GetParam();
  const tandem::testing::TempDir dir;
  dir.Write("model.gguf", tandem::testing::GgufConverter(*hub).Convert().Build());
  std::filesystem::copy(*hub / "expected.safetensors", dir.path() / "expected.safetensors");
  const auto model = GoldenModel::Load(dir.path(), {});
  ASSERT_TRUE(model.ok()) << model.status();
  GoldenDriver driver(**model);
  const auto tokens =
      driver.Generate({{.id = 1, .prompt = (*model)->Ids("seq0.ids")}}, 0, kNewTokens);
  EXPECT_EQ(tokens[0], (*model)->Ids("seq0.greedy.ids"));
  const std::vector<float> expected = (*model)->Floats("seq0.logits");
  const auto vocab = static_cast<size_t>((*model)->spec().vocab);
  float worst = 0;
  float largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& row = driver.trace(1).logits.at(static_cast<uint32_t>(i / vocab));
    worst = std::max(worst, std::fabs(row[i % vocab] - expected[i]));
    largest = std::max(largest, std::fabs(expected[i]));
  }
  EXPECT_LE(worst, 1e-4f * largest);
}

INSTANTIATE_TEST_SUITE_P(Families, GgufGoldenTest,
                         ::testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tandem::gpu
