// Every kernel table against ref, bit for bit, over shapes with tails; packing; elementwise
// accuracy.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"
#include "expert_worker/kernels/select.h"
#include "expert_worker/kernels/tables.h"
#include "tests/expert_worker/tested_tables.h"

namespace tandem::kernels {
namespace {

constexpr WeightFormat kPlainFormats[] = {WeightFormat::kF32, WeightFormat::kBf16};

std::vector<float> RandomFloats(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> values(count);
  for (float& v : values) v = normal(rng);
  return values;
}

// Equal bits, except that any NaN equals any NaN.
bool SameBits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

void ExpectSameBits(const std::vector<float>& want, const std::vector<float>& got) {
  ASSERT_EQ(want.size(), got.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(SameBits(want[i], got[i]))
        << "element " << i << ": " << want[i] << " vs " << got[i];
  }
}

PackSource F32Source(const std::vector<float>& w, size_t stride) {
  PackSource source{};
  source.data = w.data();
  source.row_stride = stride;
  source.format = WeightFormat::kF32;
  return source;
}

class EveryTable : public ::testing::TestWithParam<const KernelTable*> {
 protected:
  void SetUp() override {
    if (!CanRun(*GetParam())) {
      GTEST_SKIP() << "this CPU lacks " << GetParam()->name;
    }
  }
  const KernelTable& table() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Tables, EveryTable,
                         ::testing::ValuesIn(TestedTables().begin(), TestedTables().end()),
                         [](const auto& info) { return std::string(info.param->name); });

std::vector<float> RunGemm(const KernelTable& table, WeightFormat format, const OwnedMatrix& w,
                           const std::vector<float>& x, uint32_t rows) {
  const PackedMatrix& m = w.view();
  std::vector<float> y(size_t{rows} * m.n, -7.0f);
  GemmCall call{};
  call.x = x.data();
  call.x_stride = m.k;
  call.y = y.data();
  call.y_stride = m.n;
  call.rows = rows;
  call.panel_end = PanelCount(m.n);
  table.format(format).gemm_exact(m, call);
  return y;
}

TEST_P(EveryTable, GemmHasTheBitsOfRefAtEveryShape) {
  const uint32_t outputs[] = {1, 5, 16, 17, 31, 32, 33, 64, 95, 128, 161};
  const uint32_t inputs[] = {1, 3, 16, 61, 130};
  const uint32_t row_counts[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25, 40};
  for (WeightFormat format : kPlainFormats) {
    for (uint32_t n : outputs) {
      for (uint32_t k : inputs) {
        const std::vector<float> w = RandomFloats(size_t{n} * k, n * 1000 + k);
        const std::vector<float> x = RandomFloats(size_t{40} * k, k);
        const OwnedMatrix packed = OwnedMatrix::Pack(format, 0, F32Source(w, k), n, k);
        for (uint32_t rows : row_counts) {
          SCOPED_TRACE("format " + std::to_string(static_cast<int>(format)) + " n " +
                       std::to_string(n) + " k " + std::to_string(k) + " rows " +
                       std::to_string(rows));
          ExpectSameBits(RunGemm(kRefTable, format, packed, x, rows),
                         RunGemm(table(), format, packed, x, rows));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(EveryTable, GemmDoesNotDependOnPanelRangesRowsOrIndirection) {
  const uint32_t n = 161, k = 70, rows = 13;
  const uint32_t panels = PanelCount(n);
  for (WeightFormat format : kPlainFormats) {
    const std::vector<float> w = RandomFloats(size_t{n} * k, 1);
    const std::vector<float> x = RandomFloats(size_t{rows} * k, 2);
    const OwnedMatrix packed = OwnedMatrix::Pack(format, 0, F32Source(w, k), n, k);
    const std::vector<float> whole = RunGemm(table(), format, packed, x, rows);
    for (uint32_t begin = 0; begin < panels; ++begin) {
      for (uint32_t end = begin + 1; end <= panels; ++end) {
        const uint32_t width = std::min(n, end * kPanelWidth) - begin * kPanelWidth;
        std::vector<float> part(size_t{rows} * width, 9.0f);
        // Rows in reverse, through the index list.
        std::vector<uint32_t> order(rows);
        for (uint32_t r = 0; r < rows; ++r) order[r] = rows - 1 - r;
        GemmCall call{};
        call.x = x.data();
        call.x_stride = k;
        call.x_rows = order.data();
        call.y = part.data();
        call.y_stride = width;
        call.rows = rows;
        call.panel_begin = begin;
        call.panel_end = end;
        table().format(format).gemm_exact(packed.view(), call);
        for (uint32_t r = 0; r < rows; ++r) {
          for (uint32_t o = 0; o < width; ++o) {
            ASSERT_TRUE(
                SameBits(part[r * width + o], whole[(rows - 1 - r) * n + begin * kPanelWidth + o]));
          }
        }
      }
    }
  }
}

// A matrix whose inputs lie in chunks apart gives the bits of the whole one.
TEST_P(EveryTable, GemmOverChunksEqualsTheWhole) {
  const uint32_t n = 72, k = 50, k_chunk = 16, rows = 5;
  for (WeightFormat format : kPlainFormats) {
    const FormatKernels& kernels = table().format(format);
    const std::vector<float> w = RandomFloats(size_t{n} * k, 3);
    const std::vector<float> x = RandomFloats(size_t{rows} * k, 4);
    const OwnedMatrix whole = OwnedMatrix::Pack(format, 0, F32Source(w, k), n, k);
    const size_t panel_bytes = PanelBytes(format, k_chunk, 0);
    const size_t chunk_bytes = panel_bytes * PanelCount(n) + 192;
    const uint32_t chunks = (k + k_chunk - 1) / k_chunk;
    std::vector<char> memory(chunk_bytes * chunks, 0x7F);
    for (uint32_t c = 0; c < chunks; ++c) {
      PackSource source = F32Source(w, k);
      source.data = w.data() + c * k_chunk;
      PackPanels(format, 0, source, n, std::min(k_chunk, k - c * k_chunk), k_chunk,
                 memory.data() + c * chunk_bytes);
    }
    const PackedMatrix cut{memory.data(), n, k, k_chunk, 0, panel_bytes, chunk_bytes};
    std::vector<float> y(size_t{rows} * n);
    GemmCall call{};
    call.x = x.data();
    call.x_stride = k;
    call.y = y.data();
    call.y_stride = n;
    call.rows = rows;
    call.panel_end = PanelCount(n);
    kernels.gemm_exact(cut, call);
    ExpectSameBits(RunGemm(kRefTable, format, whole, x, rows), y);
    std::vector<float> back(size_t{n} * k), want(size_t{n} * k);
    UnpackPanels(format, cut, back.data());
    UnpackPanels(format, whole.view(), want.data());
    ExpectSameBits(want, back);
  }
}

TEST_P(EveryTable, GemmAccumulatesOnlyWhenAsked) {
  const uint32_t n = 40, k = 9, rows = 3;
  const std::vector<float> w = RandomFloats(size_t{n} * k, 5);
  const std::vector<float> x = RandomFloats(size_t{rows} * k, 6);
  const FormatKernels& kernels = table().format(WeightFormat::kF32);
  const OwnedMatrix packed = OwnedMatrix::Pack(WeightFormat::kF32, 0, F32Source(w, k), n, k);
  std::vector<float> y = RandomFloats(size_t{rows} * n, 7);
  std::vector<float> want = y;
  GemmCall call{};
  call.x = x.data();
  call.x_stride = k;
  call.y_stride = n;
  call.rows = rows;
  call.panel_end = PanelCount(n);
  call.accumulate = true;
  call.y = want.data();
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t o = 0; o < n; ++o) {
      for (uint32_t j = 0; j < k; ++j) {
        want[r * n + o] = std::fma(x[r * k + j], w[o * k + j], want[r * n + o]);
      }
    }
  }
  call.y = y.data();
  kernels.gemm_exact(packed.view(), call);
  ExpectSameBits(want, y);
}

TEST_P(EveryTable, GemmCarriesNanAndInfinityToTheirOwnRowsOnly) {
  const uint32_t n = 35, k = 20, rows = 4;
  const std::vector<float> w = RandomFloats(size_t{n} * k, 8);
  std::vector<float> x = RandomFloats(size_t{rows} * k, 9);
  x[1 * k + 3] = std::numeric_limits<float>::quiet_NaN();
  x[2 * k + 19] = std::numeric_limits<float>::infinity();
  for (WeightFormat format : kPlainFormats) {
    const OwnedMatrix packed = OwnedMatrix::Pack(format, 0, F32Source(w, k), n, k);
    const std::vector<float> y = RunGemm(table(), format, packed, x, rows);
    ExpectSameBits(RunGemm(kRefTable, format, packed, x, rows), y);
    for (uint32_t o = 0; o < n; ++o) {
      EXPECT_TRUE(std::isfinite(y[o]));
      EXPECT_TRUE(std::isnan(y[n + o]));
      EXPECT_TRUE(std::isinf(y[2 * n + o]));
      EXPECT_TRUE(std::isfinite(y[3 * n + o]));
    }
  }
}

TEST_P(EveryTable, UnpackReturnsWhatWasPackedFromAnyCut) {
  const uint32_t rows = 70, columns = 41;
  std::vector<float> w = RandomFloats(size_t{rows} * columns, 10);
  std::vector<uint16_t> halves(w.size());
  table().narrow_bf16(w.data(), halves.data(), w.size());
  std::vector<float> rounded(w.size());
  table().widen_bf16(halves.data(), rounded.data(), rounded.size());
  const uint32_t r0 = 7, c0 = 5, n = 50, k = 33;
  for (WeightFormat type : {WeightFormat::kF32, WeightFormat::kBf16}) {
    for (WeightFormat format : kPlainFormats) {
      PackSource source = F32Source(w, columns);
      source.format = type;
      source.data = type == WeightFormat::kF32
                        ? static_cast<const void*>(w.data() + r0 * columns + c0)
                        : static_cast<const void*>(halves.data() + r0 * columns + c0);
      const OwnedMatrix packed = OwnedMatrix::Pack(format, 0, source, n, k);
      std::vector<float> out(size_t{n} * k);
      UnpackPanels(format, packed.view(), out.data());
      const bool exact = type == WeightFormat::kF32 && format == WeightFormat::kF32;
      for (uint32_t r = 0; r < n; ++r) {
        for (uint32_t c = 0; c < k; ++c) {
          const size_t from = (r0 + r) * columns + c0 + c;
          ASSERT_EQ(out[r * k + c], exact ? w[from] : rounded[from]);
        }
      }
    }
  }
}

// Distance in units of the last place of `want`.
double UlpError(float got, double want) {
  const float rounded = static_cast<float>(want);
  const double ulp =
      std::max<double>(std::nextafter(std::fabs(rounded), std::numeric_limits<float>::infinity()) -
                           std::fabs(rounded),
                       std::numeric_limits<float>::denorm_min());
  return std::fabs(got - want) / ulp;
}

std::vector<float> ElementwiseInputs() {
  std::vector<float> x;
  for (int i = -110000; i <= 95000; i += 7) x.push_back(static_cast<float>(i) * 1e-3f);
  for (float v :
       {0.0f, -0.0f, 1e-30f, -1e-30f, 1e-45f, 88.72f, 88.73f, -87.34f, -103.97f, 1e30f, -1e30f,
        std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    x.push_back(v);
  }
  return x;
}

TEST_P(EveryTable, ExpIsAccurateAndHasTheBitsOfRef) {
  const std::vector<float> x = ElementwiseInputs();
  std::vector<float> want(x.size()), got(x.size());
  kRefTable.exp(x.data(), want.data(), x.size());
  table().exp(x.data(), got.data(), x.size());
  ExpectSameBits(want, got);
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    if (std::isnan(x[i])) {
      EXPECT_TRUE(std::isnan(got[i]));
    } else if (static_cast<float>(exact) == std::numeric_limits<float>::infinity()) {
      EXPECT_EQ(got[i], std::numeric_limits<float>::infinity()) << x[i];
    } else {
      EXPECT_LE(UlpError(got[i], exact), 1.05) << x[i];
    }
  }
}

TEST_P(EveryTable, SiluMulIsAccurateAndHasTheBitsOfRef) {
  const std::vector<float> g = ElementwiseInputs();
  const std::vector<float> u = RandomFloats(g.size(), 11);
  std::vector<float> want(g.size()), got(g.size());
  kRefTable.silu_mul(g.data(), u.data(), want.data(), g.size());
  table().silu_mul(g.data(), u.data(), got.data(), g.size());
  ExpectSameBits(want, got);
  for (size_t i = 0; i < g.size(); ++i) {
    // Beyond -88 the denominator overflows and the product is 0, exactly as libm's float gives it.
    if (!(g[i] > -88.0f) || std::isinf(g[i])) continue;
    const double exact = static_cast<double>(g[i]) / (1 + std::exp(-static_cast<double>(g[i]))) *
                         static_cast<double>(u[i]);
    if (std::fabs(exact) < std::numeric_limits<float>::min()) continue;
    EXPECT_LE(UlpError(got[i], exact), 3.0) << g[i];
  }
}

TEST_P(EveryTable, ElementwiseTailsTouchNothingElse) {
  for (size_t n = 0; n <= 35; ++n) {
    const std::vector<float> a = RandomFloats(n, 12), b = RandomFloats(n, 13);
    std::vector<float> want(n + 1, 5.0f), got(n + 1, 5.0f);
    kRefTable.silu_mul(a.data(), b.data(), want.data(), n);
    table().silu_mul(a.data(), b.data(), got.data(), n);
    ExpectSameBits(want, got);
    kRefTable.add_scaled(0.3f, a.data(), want.data(), n);
    table().add_scaled(0.3f, a.data(), got.data(), n);
    ExpectSameBits(want, got);
    kRefTable.exp(a.data(), want.data(), n);
    table().exp(a.data(), got.data(), n);
    ExpectSameBits(want, got);
    std::vector<uint16_t> narrow_want(n + 1, 77), narrow_got(n + 1, 77);
    kRefTable.narrow_bf16(a.data(), narrow_want.data(), n);
    table().narrow_bf16(a.data(), narrow_got.data(), n);
    EXPECT_EQ(narrow_want, narrow_got);
    kRefTable.widen_bf16(narrow_want.data(), want.data(), n);
    table().widen_bf16(narrow_got.data(), got.data(), n);
    ExpectSameBits(want, got);
    EXPECT_EQ(got[n], 5.0f);
    EXPECT_EQ(narrow_got[n], 77);
  }
}

// A scale a dot group, or one for the 256 inputs of a block.
TEST_P(EveryTable, QuantizeSharesScalesAsTheFormatSays) {
  constexpr size_t kInputs = 256 + 64;
  const auto& table = *GetParam();
  for (const auto& [format, shared] : {std::pair{WeightFormat::kInt4F16, 32u},
                                       {WeightFormat::kQ5_1, 32u},
                                       {WeightFormat::kNvfp4, 256u},
                                       {WeightFormat::kQ3K, 256u},
                                       {WeightFormat::kQ4K, 256u},
                                       {WeightFormat::kQ6K, 256u}}) {
    SCOPED_TRACE(kFormatNames[static_cast<size_t>(format)]);
    const uint32_t group = TraitsOf(format).dot_group;
    std::vector<float> x = RandomFloats(kInputs, 7);
    x[300] = std::numeric_limits<float>::infinity();
    std::vector<int8_t> q(kInputs);
    std::vector<float> scale(kInputs / group), scaled_sum(kInputs / group);
    std::vector<int32_t> sum(kInputs / group);
    table.quantize(x.data(), kInputs, format, q.data(), scale.data(), scaled_sum.data(),
                   sum.data());
    for (size_t g = 0; g < scale.size(); ++g) {
      const size_t first = g * group / shared * shared;
      const size_t end = std::min(first + shared, kInputs);
      float largest = 0;
      for (size_t i = first; i < end; ++i) largest = std::max(largest, std::abs(x[i]));
      if (std::isinf(largest)) {
        EXPECT_TRUE(std::isnan(scale[g])) << g;
        continue;
      }
      EXPECT_EQ(scale[g], largest / 127.0f) << g;
      int32_t total = 0;
      for (size_t i = g * group; i < (g + 1) * group; ++i) {
        EXPECT_NEAR(static_cast<float>(q[i]), x[i] * 127.0f / largest, 0.5001f) << i;
        total += q[i];
      }
      EXPECT_EQ(sum[g], total);
      EXPECT_EQ(scaled_sum[g], scale[g] * static_cast<float>(total));
    }
  }
}

TEST_P(EveryTable, NarrowRoundsTiesToEvenAndKeepsNan) {
  const float values[] = {1.0f,
                          std::bit_cast<float>(0x3F808000u),
                          std::bit_cast<float>(0x3F818000u),
                          std::bit_cast<float>(0x7F7FFFFFu),
                          std::bit_cast<float>(0x7F800001u),
                          std::bit_cast<float>(0xFFFFFFFFu),
                          -0.0f,
                          1e-40f};
  const uint16_t want[] = {0x3F80, 0x3F80, 0x3F82, 0x7F80, 0x7FC0, 0xFFFF, 0x8000, 0x0001};
  uint16_t got[8];
  table().narrow_bf16(values, got, 8);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(got[i], want[i]) << i;
}

TEST(SelectKernelTable, TakesTheBestWithinCapAndFeatures) {
  CpuFeatures cpu;
  EXPECT_EQ(SelectKernelTable(Isa::kAmx, cpu), &kRefTable);
  cpu.avx2 = true;
  EXPECT_EQ(SelectKernelTable(Isa::kAmx, cpu), &kAvx2Table);
  cpu.avx512 = true;  // Skylake-X
  EXPECT_EQ(SelectKernelTable(Isa::kAmx, cpu), &kAvx512Table);
  cpu.avx512_vbmi = true;  // Cannon Lake
  EXPECT_EQ(SelectKernelTable(Isa::kAmx, cpu), &kAvx512Table);
  cpu.avx512_vnni = true;  // Ice Lake; Cascade Lake without VBMI
  EXPECT_EQ(SelectKernelTable(Isa::kAmx, cpu), &kAvx512VnniTable);
  cpu.avx512_vbmi = false;
  cpu.avx512_bf16 = true;  // Cooper Lake
  EXPECT_EQ(SelectKernelTable(Isa::kAmx, cpu), &kAvx512Bf16Table);
  cpu.amx_tile = cpu.amx_int8 = cpu.amx_bf16 = true;
  EXPECT_EQ(SelectKernelTable(Isa::kAmx, cpu), &kAvx512Bf16Table);  // tiles leave rows to VBMI
  cpu.avx512_vbmi = true;
  EXPECT_EQ(SelectKernelTable(Isa::kAmx, cpu), &kAmxTable);
  EXPECT_EQ(SelectKernelTable(Isa::kAvx512, cpu), &kAvx512VbmiTable);
  EXPECT_EQ(SelectKernelTable(Isa::kAvx2, cpu), &kAvx2Table);
  EXPECT_EQ(SelectKernelTable(Isa::kRef, cpu), &kRefTable);
  EXPECT_EQ(AllKernelTables().back(), &kRefTable);
}

// Each table's own kernels, and the form of what it takes over.
TEST(SelectKernelTable, FormsFollowTheInstructions) {
  const auto form = [](const KernelTable& table, WeightFormat format) {
    return table.format(format).form;
  };
  for (const KernelTable* table : AllKernelTables()) {
    if (table->isa == Isa::kRef) continue;
    SCOPED_TRACE(table->name);
    const bool bf16 = table != &kAvx2Table && table != &kAvx512Table && table != &kAvx512VnniTable;
    const bool fp8 = table == &kAvx512VbmiTable || table == &kAmxTable;
    EXPECT_EQ(form(*table, WeightFormat::kQ4K), ActivationForm::kInt8);
    EXPECT_EQ(form(*table, WeightFormat::kBf16),
              bf16 ? ActivationForm::kBf16 : ActivationForm::kF32);
    EXPECT_EQ(form(*table, WeightFormat::kFp8), fp8 ? ActivationForm::kBf16 : ActivationForm::kF32);
    EXPECT_EQ(form(*table, WeightFormat::kF16), ActivationForm::kF32);
  }
}

}  // namespace
}  // namespace tandem::kernels
