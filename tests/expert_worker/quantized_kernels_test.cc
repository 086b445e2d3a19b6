// Every weight format of every kernel table: packing, the exact kernel against ref bit for bit, the
// fast kernel against the exact product of what it is given.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"
#include "expert_worker/kernels/tables.h"
#include "tests/expert_worker/activation_rows.h"
#include "tests/expert_worker/random_weights.h"
#include "tests/expert_worker/tested_tables.h"

namespace tandem::kernels {
namespace {

struct Case {
  const KernelTable* table;
  WeightFormat format;
};

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const KernelTable* table : TestedTables()) {
    for (const FormatTraits& t : kFormats) cases.push_back({table, t.format});
  }
  return cases;
}

class EveryFormat : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!CanRun(table())) {
      GTEST_SKIP() << "this CPU lacks " << table().name;
    }
  }
  const KernelTable& table() const { return *GetParam().table; }
  WeightFormat format() const { return GetParam().format; }
};

INSTANTIATE_TEST_SUITE_P(Tables, EveryFormat, ::testing::ValuesIn(AllCases()),
                         [](const auto& info) {
                           return std::string(info.param.table->name) + "_" +
                                  kFormatNames[static_cast<int>(info.param.format)];
                         });

std::vector<float> RandomFloats(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> values(count);
  for (float& v : values) v = normal(rng);
  return values;
}

// A matrix cut into chunks of k_chunk inputs (k: not cut), as a store lays it out.
struct Packed {
  Packed(WeightFormat format, uint32_t group, const RandomWeights& weights, uint32_t n, uint32_t k,
         uint32_t k_chunk) {
    const size_t panel_bytes = PanelBytes(format, k_chunk, group);
    const size_t chunk_bytes = panel_bytes * PanelCount(n);
    const uint32_t chunks = (k + k_chunk - 1) / k_chunk;
    memory.resize(chunk_bytes * chunks + kPackAlignment);
    auto* base = memory.data();
    base += (kPackAlignment - reinterpret_cast<uintptr_t>(base) % kPackAlignment) % kPackAlignment;
    for (uint32_t c = 0; c < chunks; ++c) {
      PackPanels(format, group, weights.Source(0, c * k_chunk), n,
                 std::min(k_chunk, k - c * k_chunk), k_chunk, base + c * chunk_bytes);
    }
    view = {base, n, k, k_chunk, group, panel_bytes, chunk_bytes};
  }
  std::vector<char> memory;
  PackedMatrix view;
};

std::vector<float> Exact(const KernelTable& table, WeightFormat format, const PackedMatrix& w,
                         const std::vector<float>& x, uint32_t rows) {
  std::vector<float> y(size_t{rows} * w.n, -7.0f);
  GemmCall call{};
  call.x = x.data();
  call.x_stride = w.k;
  call.y = y.data();
  call.y_stride = w.n;
  call.rows = rows;
  call.panel_end = PanelCount(w.n);
  table.format(format).gemm_exact(w, call);
  return y;
}

TEST_P(EveryFormat, ExactKernelHasTheBitsOfRef) {
  const uint32_t group = UsualGroup(format());
  for (const auto& [n, k, chunk] :
       {std::array{70u, 320u, 320u}, {33u, 161u, 161u}, {5u, 64u, 64u}, {40u, 300u, 64u}}) {
    const RandomWeights weights(format(), group, n, k, n + k);
    const Packed packed(format(), group, weights, n, k, chunk);
    for (const uint32_t rows : {1u, 7u, 13u}) {
      const std::vector<float> x = RandomFloats(size_t{rows} * k, rows);
      const std::vector<float> want = Exact(kRefTable, format(), packed.view, x, rows);
      const std::vector<float> got = Exact(table(), format(), packed.view, x, rows);
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(want[i]), std::bit_cast<uint32_t>(got[i]))
            << "n " << n << " k " << k << " rows " << rows << " element " << i;
      }
    }
  }
}

// Unpacking a cut matrix gives the whole one's values: each chunk has its own copies of the scales.
TEST_P(EveryFormat, AnyCutHoldsTheSameValues) {
  const uint32_t n = 37, k = 288, group = UsualGroup(format());
  const RandomWeights weights(format(), group, n, k, 3);
  std::vector<float> whole(size_t{n} * k), cut(whole.size());
  UnpackPanels(format(), Packed(format(), group, weights, n, k, k).view, whole.data());
  for (const uint32_t chunk : {4u, 16u, 64u, 96u}) {
    if (group != 0 && chunk % group != 0 && group % chunk != 0) continue;
    const bool supers = TraitsOf(format()).super != SuperType::kNone;
    if (supers && kSuperBlockColumns % chunk != 0) continue;
    const uint32_t own = group == 0 ? 0 : std::min(group, chunk);
    const Packed packed(format(), own, weights, n, k, chunk);
    UnpackPanels(format(), packed.view, cut.data());
    for (size_t i = 0; i < whole.size(); ++i) ASSERT_EQ(whole[i], cut[i]) << chunk << " at " << i;
  }
}

struct Shape {
  uint32_t n;
  uint32_t k;
  uint32_t chunk;
  uint32_t group;
};

// What a row among the tiles of amx.cc may be off by beside the rounding of sums: its header states
// the bounds. `products` and `weights` are sums of magnitudes.
double TileError(const KernelTable& table, WeightFormat format, const Shape& shape,
                 const ActivationRows& activations, uint32_t row, double products, double weights) {
  if (table.isa != Isa::kAmx || table.format(format).form != ActivationForm::kInt8) return 0.0;
  const uint32_t group = shape.group;
  const bool long_groups = shape.chunk >= 128 && (group == 0 || group == 128 || group >= 256);
  if (table.format(format).dot_group != 32 || !long_groups) return 0x1p-8 * products;
  return weights * activations.LargestScale(row) / 2;
}

// The product of the values that the kernel is given, in double; and the sum of magnitudes, which
// bounds the rounding of F32 sums.
void ExpectNearExact(const KernelTable& table, WeightFormat format, const Shape& shape,
                     uint32_t rows, bool accumulate) {
  const auto& [n, k, chunk, group] = shape;
  SCOPED_TRACE(testing::Message() << "n " << n << " k " << k << " chunk " << chunk << " group "
                                  << group << " rows " << rows);
  const RandomWeights weights(format, group, n, k, n * 7 + k);
  const Packed packed(format, group, weights, n, k, chunk);
  const std::vector<float> x = RandomFloats(size_t{rows} * k, rows + 1);
  const ActivationRows activations(table, format, x, rows, k, chunk);
  std::vector<float> y = RandomFloats(size_t{rows} * n, 9), before = y;
  GemmCall call{};
  activations.Fill(call);
  call.y = y.data();
  call.y_stride = n;
  call.rows = rows;
  call.panel_end = PanelCount(n);
  call.accumulate = accumulate;
  table.format(format).gemm(packed.view, call);
  std::vector<float> w(size_t{n} * k);
  UnpackPanels(format, packed.view, w.data());
  const size_t padded = RoundUpTo(chunk, kStepAlign);
  const bool f32 = table.format(format).form == ActivationForm::kF32;
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t o = 0; o < n; ++o) {
      double sum = accumulate ? before[r * n + o] : 0.0, magnitude = std::fabs(sum);
      double row_weights = 0.0;
      for (uint32_t j = 0; j < k; ++j) {
        const size_t at = f32 ? j : j / chunk * padded + j % chunk;
        const double term = double{w[o * k + j]} * activations.Value(r, at);
        sum += term;
        magnitude += std::fabs(term);
        row_weights += std::fabs(w[o * k + j]);
      }
      double bound = 4e-6 * magnitude + 1e-20;
      if (r < rows / 16 * 16) {
        bound += TileError(table, format, shape, activations, r, magnitude, row_weights);
      }
      ASSERT_NEAR(y[r * n + o], sum, bound) << "row " << r << " output " << o;
    }
  }
}

TEST_P(EveryFormat, FastKernelIsNearTheExactProduct) {
  const uint32_t group = UsualGroup(format());
  for (const uint32_t rows : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 13u, 33u}) {
    ExpectNearExact(table(), format(), {70, 320, 320, group}, rows, rows % 2 == 1);
  }
  ExpectNearExact(table(), format(), {1, 32, 32, group}, 3, false);
  ExpectNearExact(table(), format(), {33, 161, 161, group}, 4, false);
  ExpectNearExact(table(), format(), {40, 300, 64, group}, 2, false);
  ExpectNearExact(table(), format(), {40, 300, 64, group}, 17, true);
  ExpectNearExact(table(), format(), {40, 300, 64, group}, 26, true);
  ExpectNearExact(table(), format(), {70, 96, 96, group}, 70, true);
  ExpectNearExact(table(), format(), {45, 50, 16, std::min(group, 16u)}, 2, true);
  // Chunks of an odd number of groups.
  for (const uint32_t rows : {1u, 3u, 6u, 7u}) {
    ExpectNearExact(table(), format(), {33, 300, 96, group}, rows, false);
  }
  // More inputs than a kernel gathers of its rows at once.
  ExpectNearExact(table(), format(), {33, 2208, 2208, group}, 9, false);
  ExpectNearExact(table(), format(), {33, 2200, 96, group}, 11, true);
  ExpectNearExact(table(), format(), {33, 8352, 8352, group}, 1, false);
  ExpectNearExact(table(), format(), {33, 8352, 8352, group}, 5, true);
  const FormatTraits& t = TraitsOf(format());
  if (t.scale == ScaleType::kF32 || t.scale == ScaleType::kBf16 || t.scale == ScaleType::kF16) {
    for (const uint32_t wide : {0u, 64u, 128u}) {
      if (t.super != SuperType::kNone) break;
      ExpectNearExact(table(), format(), {64, 416, 416, wide}, 1, false);
      ExpectNearExact(table(), format(), {64, 416, 416, wide}, 9, false);
      ExpectNearExact(table(), format(), {64, 416, 128, wide}, 3, false);
      ExpectNearExact(table(), format(), {50, 416, 416, wide}, 16, true);
      ExpectNearExact(table(), format(), {50, 416, 128, wide}, 18, false);
    }
  }
}

TEST_P(EveryFormat, FastKernelReachesAnyRowsAndPanels) {
  const uint32_t n = 161, k = 96, rows = 13, group = UsualGroup(format());
  const RandomWeights weights(format(), group, n, k, 5);
  const Packed packed(format(), group, weights, n, k, k);
  const std::vector<float> x = RandomFloats(size_t{rows} * k, 6);
  const ActivationRows activations(table(), format(), x, rows, k, k);
  GemmCall call{};
  activations.Fill(call);
  std::vector<float> whole(size_t{rows} * n), part(whole.size(), 3.0f);
  call.y = whole.data();
  call.y_stride = n;
  call.rows = rows;
  call.panel_end = PanelCount(n);
  table().format(format()).gemm(packed.view, call);
  // Outputs of panels 1 to 3 of every other row, from reversed rows, into other places.
  const uint32_t sources[] = {12, 10, 8, 6, 4, 2, 0};
  const uint32_t targets[] = {0, 2, 4, 6, 8, 10, 12};
  call.x_rows = sources;
  call.y_rows = targets;
  call.rows = 7;
  call.panel_begin = 1;
  call.panel_end = 4;
  call.y = part.data();
  table().format(format()).gemm(packed.view, call);
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t o = 0; o < n; ++o) {
      const bool written = r % 2 == 0 && o < 96;
      const float want = written ? whole[(12 - r) * n + 32 + o] : 3.0f;
      ASSERT_NEAR(part[r * n + o], want, 1e-5 * std::fabs(want) + 1e-5) << r << " " << o;
    }
  }
}

TEST_P(EveryFormat, FastKernelKeepsNanAndInfinityInTheirRows) {
  const uint32_t n = 35, k = 64, group = UsualGroup(format());
  const RandomWeights weights(format(), group, n, k, 8);
  const Packed packed(format(), group, weights, n, k, k);
  for (const uint32_t rows : {3u, 9u, 21u}) {
    std::vector<float> x = RandomFloats(size_t{rows} * k, 9);
    x[1 * k + 40] = std::numeric_limits<float>::quiet_NaN();
    x[2 * k + 3] = std::numeric_limits<float>::infinity();
    const ActivationRows activations(table(), format(), x, rows, k, k);
    std::vector<float> y(size_t{rows} * n);
    GemmCall call{};
    activations.Fill(call);
    call.y = y.data();
    call.y_stride = n;
    call.rows = rows;
    call.panel_end = PanelCount(n);
    table().format(format()).gemm(packed.view, call);
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t o = 0; o < n; ++o) {
        ASSERT_EQ(std::isfinite(y[r * n + o]), r != 1 && r != 2) << r << " " << o;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::kernels
