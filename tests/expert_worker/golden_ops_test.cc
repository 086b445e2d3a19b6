// The block and its activation against golden/ops: swiglu.safetensors and moe.safetensors.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "common/checkpoint/safetensors.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/routed_experts.h"
#include "expert_worker/kernels/tables.h"
#include "tests/expert_worker/expert_fakes.h"
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

double LargestError(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error = std::max<double>(error, std::fabs(got[i] - want[i]));
    largest = std::max<double>(largest, std::fabs(want[i]));
  }
  return error / largest;
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

TEST_F(GoldenOps, SiluTimesUp) {
  if (SharedPathOf("swiglu.safetensors").empty())
    GTEST_SKIP() << "no golden/ops/swiglu.safetensors";
  const auto file = Open("swiglu.safetensors");
  ASSERT_NE(file, nullptr);
  const auto gate = Values<float>(*file, "gate"), up = Values<float>(*file, "up");
  std::vector<float> y(gate.size());
  kRefTable.silu_mul(gate.data(), up.data(), y.data(), y.size());
  EXPECT_LT(LargestError(y, Values<float>(*file, "silu.y")), 1e-6);
}

TEST_F(GoldenOps, RoutedExpertsWithGateRowsThenUpRows) {
  if (SharedPathOf("moe.safetensors").empty()) GTEST_SKIP() << "no golden/ops/moe.safetensors";
  const auto file = Open("moe.safetensors");
  ASSERT_NE(file, nullptr);
  FakeShape shape;  // gate_up [4, 32, 32] (16 gate rows, 16 up rows), down [4, 32, 16]
  shape.experts = 4;
  shape.hidden = 32;
  shape.intermediate = 16;
  FakeExperts experts(shape, 1);
  const auto gate_up = Values<float>(*file, "gate_up"), down = Values<float>(*file, "down");
  ASSERT_EQ(gate_up.size(), 4u * 32 * 32);
  for (int e = 0; e < 4; ++e) {
    const float* from = gate_up.data() + e * 1024;
    std::copy(from, from + 512, experts.mutable_part(1, e, ExpertPart::kGate));
    std::copy(from + 512, from + 1024, experts.mutable_part(1, e, ExpertPart::kUp));
    std::copy(down.data() + e * 512, down.data() + (e + 1) * 512,
              experts.mutable_part(1, e, ExpertPart::kDown));
  }
  const shm::UniqueFd fd(memfd_create("store", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const StoreSpec spec = experts.Spec(4, {0, 4});
  LoadProgress progress;
  const auto store = WeightStore::Build(fd.get(), spec, experts, 1, &progress);
  ASSERT_TRUE(store.ok()) << store.status();
  RoutedExperts engine(store->get(), &kRefTable, {});
  shm::BatchLimits limits;
  limits.max_rows = 6;
  limits.hidden = 32;
  limits.top_k = 2;
  limits.num_experts = 4;
  limits.num_layers = shape.layers;
  ASSERT_TRUE(engine.Configure(limits).ok());
  const auto x = Values<float>(*file, "x"), weights = Values<float>(*file, "weights");
  std::vector<uint16_t> ids;
  for (int32_t id : Values<int32_t>(*file, "indices")) ids.push_back(static_cast<uint16_t>(id));
  std::vector<float> out(x.size());
  shm::ExpertBatch batch;
  batch.layer = 1;
  batch.rows = 6;
  batch.top_k = 2;
  batch.hidden = 32;
  batch.row_type = shm::RowType::kF32;
  batch.x = x.data();
  batch.ids = ids.data();
  batch.weights = weights.data();
  batch.out = out.data();
  engine.Run(batch, 0, 1);
  EXPECT_LT(LargestError(out, Values<float>(*file, "silu_gate_rows_then_up_rows.y")), 1e-6);
}

}  // namespace
}  // namespace tandem::expert
