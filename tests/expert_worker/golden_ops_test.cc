// The block and its activation against golden/ops: swiglu.safetensors and moe.safetensors.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "common/checkpoint/safetensors.h"
#include "expert_worker/kernels/tables.h"
#include "tests/expert_worker/expert_fakes.h"
#include "tests/expert_worker/test_block.h"
#include "tests/testing/shared_data.h"

namespace tandem::expert {
namespace {

using kernels::kRefTable;

template <typename T>
std::vector<T> Values(const SafetensorsFile& file, const std::string& name) {
  for (const SafetensorsEntry& entry : file.entries()) {
    if (entry.name != name) continue;
    std::vector<T> values((entry.end - entry.begin) / sizeof(T));
    std::memcpy(values.data(), file.View(entry).data, entry.end - entry.begin);
    return values;
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

class GoldenOps : public ::testing::Test {
 protected:
  std::unique_ptr<SafetensorsFile> Open(const std::string& name) {
    const auto path = SharedPathOf(name);
    if (path.empty()) return nullptr;
    auto file = SafetensorsFile::Open(path);
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? std::move(*file) : nullptr;
  }
  static std::string SharedPathOf(const std::string& name) {
    const auto path = tandem::testing::SharedPath("golden/ops/" + name);
    return path ? path->string() : "";
  }
};

TEST_F(GoldenOps, ActivationsOfGateAndUp) {
  if (SharedPathOf("swiglu.safetensors").empty()) {
    GTEST_SKIP() << "no golden/ops/swiglu.safetensors";
  }
  const auto file = Open("swiglu.safetensors");
  ASSERT_NE(file, nullptr);
  const auto gate = Values<float>(*file, "gate"), up = Values<float>(*file, "up");
  std::vector<float> y(gate.size());
  kRefTable.silu_mul(gate.data(), up.data(), y.data(), y.size());
  EXPECT_LT(LargestError(y, Values<float>(*file, "silu.y")), 1e-6);
  kRefTable.clamped_swiglu({10, 1, 0}, gate.data(), up.data(), y.data(), y.size());
  EXPECT_LT(LargestError(y, Values<float>(*file, "silu_clamped_limit10.y")), 1e-6);
  kRefTable.clamped_swiglu({7, 1.702f, 1}, gate.data(), up.data(), y.data(), y.size());
  EXPECT_LT(LargestError(y, Values<float>(*file, "swiglu_oai_limit7_alpha1.702.y")), 1e-6);
}

// gate_up [4, 32, 32], down [4, 32, 16] and their biases.
class GoldenMoe : public GoldenOps {
 protected:
  void SetUp() override {
    if (SharedPathOf("moe.safetensors").empty()) GTEST_SKIP() << "no golden/ops/moe.safetensors";
    file_ = Open("moe.safetensors");
    ASSERT_NE(file_, nullptr);
    shape_.experts = 4;
    shape_.hidden = 32;
    shape_.intermediate = 16;
  }

  // Row r of gate is row `gate_row(r)` of gate_up.
  template <typename GateRow, typename UpRow>
  void Fill(FakeExperts& experts, GateRow gate_row, UpRow up_row) {
    const auto gate_up = Values<float>(*file_, "gate_up"), down = Values<float>(*file_, "down");
    const auto gate_up_bias = Values<float>(*file_, "gate_up_bias");
    const auto down_bias = Values<float>(*file_, "down_bias");
    for (int e = 0; e < 4; ++e) {
      for (int r = 0; r < 16; ++r) {
        const auto copy = [&](ExpertPart part, int from) {
          const float* row = gate_up.data() + (e * 32 + from) * 32;
          std::copy(row, row + 32, experts.mutable_part(1, e, part) + r * 32);
          if (shape_.biases) experts.mutable_bias(1, e, part)[r] = gate_up_bias[e * 32 + from];
        };
        copy(ExpertPart::kGate, gate_row(r));
        copy(ExpertPart::kUp, up_row(r));
      }
      std::copy_n(down.data() + e * 512, 512, experts.mutable_part(1, e, ExpertPart::kDown));
      if (shape_.biases) {
        std::copy_n(down_bias.data() + e * 32, 32, experts.mutable_bias(1, e, ExpertPart::kDown));
      }
    }
  }

  Batch GoldenBatch() {
    Batch batch{.rows = 6,
                .top_k = 2,
                .x = Values<float>(*file_, "x"),
                .ids = {},
                .weights = Values<float>(*file_, "weights")};
    for (int32_t id : Values<int32_t>(*file_, "indices")) {
      batch.ids.push_back(static_cast<uint16_t>(id));
    }
    return batch;
  }

  std::unique_ptr<SafetensorsFile> file_;
  FakeShape shape_;
};

TEST_F(GoldenMoe, GateRowsThenUpRows) {
  FakeExperts experts(shape_, 1);
  Fill(
      experts, [](int r) { return r; }, [](int r) { return 16 + r; });
  Block block(experts, kRefTable, {.threads = 1});
  EXPECT_LT(LargestError(block.Run(GoldenBatch()),
                         Values<float>(*file_, "silu_gate_rows_then_up_rows.y")),
            1e-6);
}

TEST_F(GoldenMoe, GptOssInterleavedRowsWithBiases) {
  shape_.biases = true;
  shape_.activation = {.limit = 7, .alpha = 1.702f, .up_offset = 1};
  FakeExperts experts(shape_, 1);
  Fill(
      experts, [](int r) { return 2 * r; }, [](int r) { return 2 * r + 1; });
  const auto want = Values<float>(*file_, "gpt_oss_interleaved_rows_with_bias.y");
  EXPECT_LT(LargestError(Block(experts, kRefTable, {.threads = 1}).Run(GoldenBatch()), want), 1e-6);
  // Default mode rounds the rows to BF16.
  Block narrow(experts, kRefTable, {.threads = 2, .row_type = shm::RowType::kBf16});
  EXPECT_LT(LargestError(narrow.Run(GoldenBatch()), want), 0.01);
}

}  // namespace
}  // namespace tandem::expert
