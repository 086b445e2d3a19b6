// Experts in device slots: the same bits as the CPU experts of parity mode for all formats, and a
// row's result depends on nothing but the row.

#include "gpu_worker/resident_experts.h"

#include <numeric>
#include <random>

#include "expert_worker/engine/store_unpack.h"
#include "tests/expert_worker/quantized_fakes.h"
#include "tests/expert_worker/test_block.h"
#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

using expert::FakeShape;
using expert::KnownExperts;

constexpr uint32_t kTopK = 3;

FakeShape SmallShape() {
  FakeShape shape;
  shape.layers = 3;
  shape.moe_layers = {1, 2};
  shape.experts = 6;
  shape.hidden = 70;
  shape.intermediate = 96;
  return shape;
}

ResidentShape ShapeOf(const KnownExperts& experts, int slots) {
  const FakeShape& fake = experts.shape();
  ResidentShape shape;
  shape.hidden = fake.hidden;
  shape.intermediate = fake.intermediate;
  shape.top_k = kTopK;
  const expert::StoreSpec spec = experts.Spec(4, {0, 0});
  shape.formats.assign(fake.layers, spec.formats[0]);
  shape.has_experts.assign(fake.layers, 0);
  for (const uint32_t layer : fake.moe_layers) shape.has_experts[layer] = 1;
  shape.biases = fake.biases;
  shape.activation_limit = fake.activation.limit;
  shape.activation_alpha = fake.activation.alpha;
  shape.activation_up_offset = fake.activation.up_offset;
  shape.budget_bytes = uint64_t{1} << 30;
  shape.max_slots = slots;
  return shape;
}

// A backend with all experts of some layer in slots 1, 2, ... in reverse order.
class Device {
 public:
  Device(const KnownExperts& experts, BackendConfig config)
      : shape_(experts.shape()), backend_(MakeBackend(config)) {
    const auto slots = static_cast<int>(shape_.experts) + 1;
    auto made = backend_->MakeResidentExperts(ShapeOf(experts, slots));
    EXPECT_TRUE(made.ok()) << made.status();
    resident_ = *std::move(made);
    EXPECT_EQ(resident_->slots(), slots);
    const shm::UniqueFd fd(memfd_create("store", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    expert::LoadProgress progress;
    store_ = *expert::WeightStore::Build(fd.get(), experts.Spec(experts.quantum(), experts.all()),
                                         experts, {.threads = 1}, &progress);
  }

  uint16_t SlotOf(uint16_t expert) const { return static_cast<uint16_t>(shape_.experts - expert); }
  void Load(uint32_t layer) {
    const expert::WeightStore* stores[] = {store_.get()};
    CanonicalExpert canonical;
    for (uint16_t e = 0; e < shape_.experts; ++e) {
      expert::UnpackExpert(stores, layer, e, &canonical);
      const absl::Status status = resident_->Write(SlotOf(e), static_cast<int>(layer), canonical);
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  // Adds to `out`.
  void Run(const expert::Batch& batch, uint32_t layer, std::vector<float>& out) {
    std::vector<uint16_t> slots;
    for (const uint16_t id : batch.ids) slots.push_back(id == kNoExpert ? id : SlotOf(id));
    const auto count = static_cast<int32_t>(batch.rows);
    backend_->RunResidentExperts({.rows = {.bound = 256, .count = &count},
                                  .experts = resident_.get(),
                                  .layer = static_cast<int>(layer),
                                  .x = AsMatrix(batch.x, shape_.hidden),
                                  .slots = slots.data(),
                                  .weights = batch.weights.data(),
                                  .out = AsMatrix(out, shape_.hidden)});
  }
  std::vector<float> Run(const expert::Batch& batch, uint32_t layer) {
    std::vector<float> out(size_t{batch.rows} * shape_.hidden, 0.0F);
    Run(batch, layer, out);
    return out;
  }
  ResidentExperts& resident() { return *resident_; }
  CpuBackend& backend() { return *backend_; }

 private:
  const FakeShape shape_;
  std::unique_ptr<CpuBackend> backend_;
  std::unique_ptr<ResidentExperts> resident_;
  std::unique_ptr<expert::WeightStore> store_;
};

class ResidentExpertsTest : public ::testing::TestWithParam<BackendConfig> {};
INSTANTIATE_TEST_SUITE_P(All, ResidentExpertsTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

void ExpectBitsOfParityMode(const KnownExperts& experts, BackendConfig config) {
  Device device(experts, config);
  const kernels::KernelTable& table = *kernels::SelectKernelTable(config.cap, DetectCpuFeatures());
  expert::Block block(experts, table, {.threads = 1});
  for (const uint32_t layer : experts.shape().moe_layers) {
    device.Load(layer);
    for (const uint32_t rows : {1U, 5U, 37U}) {
      const expert::Batch batch = expert::RandomBatch(experts.shape(), rows, kTopK, rows + layer);
      ExpectSameBits(device.Run(batch, layer), block.Run(batch, layer));
    }
  }
}

TEST_P(ResidentExpertsTest, HaveTheBitsOfTheWorkersInParityMode) {
  const expert::MatrixFormat int4{WeightFormat::kInt4F16, 32}, fp8{WeightFormat::kFp8, 0};
  const expert::MatrixFormat bf16{WeightFormat::kBf16, 0}, q6{WeightFormat::kQ6K, 16};
  ExpectBitsOfParityMode(expert::QuantizedExperts(SmallShape(), int4, int4, 1), GetParam());
  ExpectBitsOfParityMode(expert::QuantizedExperts(SmallShape(), bf16, q6, 2), GetParam());
  ExpectBitsOfParityMode(expert::QuantizedExperts(SmallShape(), fp8, bf16, 3), GetParam());
}

TEST_P(ResidentExpertsTest, BiasesAndClampedActivationsAreHonoured) {
  FakeShape shape = SmallShape();
  shape.biases = true;
  shape.activation = {7.0F, 1.702F, 1.0F};
  ExpectBitsOfParityMode(expert::FakeExperts(shape, 4), GetParam());
}

TEST_P(ResidentExpertsTest, AddToWhatIsThereAndLeaveOtherRowsAlone) {
  const expert::FakeExperts experts(SmallShape(), 5);
  Device device(experts, GetParam());
  device.Load(2);
  expert::Batch batch = expert::RandomBatch(experts.shape(), 9, kTopK, 6);
  for (uint32_t i = 0; i < kTopK; ++i) batch.ids[4 * kTopK + i] = kNoExpert;
  batch.ids[0] = kNoExpert;
  const std::vector<float> before = RandomVector(batch.x.size(), 7);
  std::vector<float> out = before;
  device.Run(batch, 2, out);
  const std::vector<float> sums = device.Run(batch, 2);
  const size_t hidden = experts.shape().hidden;
  for (size_t i = 0; i < out.size(); ++i) {
    const float want = i / hidden == 4 ? before[i] : before[i] + sums[i];
    ASSERT_EQ(out[i], want) << "row " << i / hidden;
  }
  ExpectClose(sums, expert::ExpectedBlock(experts, 2, batch.x, batch.ids, batch.weights, kTopK),
              1e-5);
}

TEST_P(ResidentExpertsTest, RowDependsOnNothingButItself) {
  const expert::FakeExperts experts(SmallShape(), 8);
  Device device(experts, GetParam());
  device.Load(1);
  expert::Batch batch = expert::RandomBatch(experts.shape(), 40, kTopK, 9);
  batch.x[3] = std::numeric_limits<float>::quiet_NaN();  // of row 0
  const std::vector<float> all = device.Run(batch, 1);
  const auto hidden = static_cast<ptrdiff_t>(experts.shape().hidden);
  for (uint32_t row = 1; row < batch.rows; ++row) {
    const auto begin = all.begin() + row * hidden;
    ExpectSameBits(std::vector<float>(begin, begin + hidden),
                   device.Run(expert::OneRow(batch, row), 1));
  }
}

TEST(ResidentExpertsMemory, SlotsAreWhatTheBudgetHoldsAtMostAsManyAsWanted) {
  const expert::FakeExperts experts(SmallShape(), 8);
  const auto backend = MakeBackend();
  ResidentShape shape = ShapeOf(experts, 100);
  const uint64_t slot_bytes = (*backend->MakeResidentExperts(shape))->slot_bytes();
  EXPECT_GE(slot_bytes, uint64_t{3} * 70 * 96 * sizeof(float));
  shape.budget_bytes = 7 * slot_bytes + slot_bytes / 2;
  EXPECT_EQ((*backend->MakeResidentExperts(shape))->slots(), 7);
  shape.budget_bytes = slot_bytes - 1;
  EXPECT_EQ((*backend->MakeResidentExperts(shape))->slots(), 0);
}

TEST(ResidentExpertsMemory, RefusesAnExpertOfAnotherFormat) {
  const expert::FakeExperts experts(SmallShape(), 8);
  Device device(experts, {});
  CanonicalExpert other;
  other.gate_up.Reshape({WeightFormat::kBf16, 0}, 192, 70);
  other.down.Reshape({WeightFormat::kF32, 0}, 70, 96);
  EXPECT_TRUE(absl::IsFailedPrecondition(device.resident().Write(0, 1, other)));
}

}  // namespace
}  // namespace tandem::gpu
