// Kernels touch nothing beyond their operands: every array of a call ends where an inaccessible
// page begins, so a read or write too far ends the test. (Sanitizers do not see vector kernels.)

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"
#include "expert_worker/kernels/select.h"
#include "tests/expert_worker/activation_rows.h"
#include "tests/expert_worker/random_weights.h"

namespace tandem::kernels {
namespace {

// `count` elements that end at a page which faults.
template <typename T>
class Guarded {
 public:
  explicit Guarded(size_t count, const T* values = nullptr) {
    constexpr size_t kPage = 4096;
    const size_t bytes = count * sizeof(T);
    mapped_ = RoundUpTo(bytes, kPage) + kPage;
    base_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + mapped_ - kPage, kPage, PROT_NONE);
    data_ = reinterpret_cast<T*>(base_ + mapped_ - kPage - bytes);
    if (values != nullptr && count != 0) std::memcpy(data_, values, bytes);
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  T* data() const { return data_; }

 private:
  char* base_;
  size_t mapped_;
  T* data_;
};

class KernelBounds : public ::testing::TestWithParam<const KernelTable*> {
 protected:
  void SetUp() override {
    if (!IsRunnable(*GetParam(), DetectCpuFeatures())) {
      GTEST_SKIP() << "this CPU lacks " << GetParam()->name;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Tables, KernelBounds,
                         ::testing::ValuesIn(AllKernelTables().begin(), AllKernelTables().end()),
                         [](const auto& info) { return std::string(info.param->name); });

void RunBothKernels(const KernelTable& table, WeightFormat format, uint32_t n, uint32_t k,
                    uint32_t rows) {
  const uint32_t group = UsualGroup(format);
  const RandomWeights weights(format, group, n, k, n + k);
  const size_t panel_bytes = PanelBytes(format, k, group);
  const Guarded<char> packed(panel_bytes * PanelCount(n));
  PackPanels(format, group, weights.Source(), n, k, k, packed.data());
  std::vector<float> values(size_t{rows} * k);
  std::mt19937 rng(7);
  for (float& v : values) v = static_cast<float>(rng() % 200) * 0.01f - 1.0f;
  const ActivationRows activations(table, format, values, rows, k, k);
  GemmCall call{};
  activations.Fill(call);
  const Int8Rows from = call.int8;
  const Guarded<float> x(values.size(), call.x);
  const Guarded<uint16_t> bf16(rows * call.bf16_stride, call.bf16);
  const Guarded<int8_t> q(rows * from.stride, from.q);
  const Guarded<float> scale(rows * from.group_stride, from.scale);
  const Guarded<float> scaled_sum(rows * from.group_stride, from.scaled_sum);
  const Guarded<int32_t> sum(rows * from.group_stride, from.sum);
  const Guarded<float> y(size_t{rows} * n);
  call.x = x.data();
  call.bf16 = bf16.data();
  call.int8 = {q.data(),   scale.data(), scaled_sum.data(),
               sum.data(), from.stride,  from.group_stride};
  call.y = y.data();
  call.y_stride = n;
  call.rows = rows;
  call.panel_end = PanelCount(n);
  const PackedMatrix matrix{
      packed.data(), n, k, k, group, panel_bytes, panel_bytes * PanelCount(n)};
  table.format(format).gemm(matrix, call);
  const std::vector<float> fast(y.data(), y.data() + size_t{rows} * n);
  table.format(format).gemm_exact(matrix, call);
  for (size_t i = 0; i < fast.size(); ++i) {
    ASSERT_NEAR(fast[i], y.data()[i], 2.0f * static_cast<float>(k)) << i;
  }
}

TEST_P(KernelBounds, NothingBeyondTheOperandsIsTouched) {
  for (const FormatTraits& t : kFormats) {
    SCOPED_TRACE(kFormatNames[static_cast<int>(t.format)]);
    for (const uint32_t rows : {1u, 2u, 5u, 7u, 18u}) {
      RunBothKernels(*GetParam(), t.format, 70, 320, rows);
      RunBothKernels(*GetParam(), t.format, 33, 161, rows);
    }
    RunBothKernels(*GetParam(), t.format, 1, 16, 1);
  }
}

TEST_P(KernelBounds, ElementwiseFunctionsStayInside) {
  for (const size_t n : {1u, 7u, 16u, 33u}) {
    const Guarded<float> a(n), b(n), c(n);
    const Guarded<uint16_t> halves(n);
    GetParam()->silu_mul(a.data(), b.data(), c.data(), n);
    GetParam()->exp(a.data(), c.data(), n);
    GetParam()->add_scaled(2.0f, a.data(), c.data(), n);
    GetParam()->narrow_bf16(a.data(), halves.data(), n);
    GetParam()->widen_bf16(halves.data(), c.data(), n);
    EXPECT_EQ(c.data()[n - 1], 0.0f);
  }
}

}  // namespace
}  // namespace tandem::kernels
