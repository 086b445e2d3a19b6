// How the AMX kernels use tiles, by their emulation: when, how full, and that rows and panels of
// any order meet their own sums. Their results are compared with ref by the tests of every table.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "expert_worker/kernels/packed_matrix.h"
#include "tests/expert_worker/activation_rows.h"
#include "tests/expert_worker/emulation/emulated_tables.h"
#include "tests/expert_worker/emulation/emulated_tiles.h"
#include "tests/expert_worker/random_weights.h"
#include "tests/expert_worker/tested_tables.h"

namespace tandem::kernels {
namespace {

const KernelTable& Table() { return kEmulatedAmxTable; }

bool UsesTiles(WeightFormat format) {
  return format != WeightFormat::kF32 && format != WeightFormat::kF16;
}

// A product of random weights and activations.
class Product {
 public:
  Product(WeightFormat format, uint32_t group, uint32_t n, uint32_t k, uint32_t rows,
          float special = 0.0f)
      : format_(format),
        n_(n),
        rows_(rows),
        weights_(
            OwnedMatrix::Pack(format, group, RandomWeights(format, group, n, k, k).Source(), n, k)),
        x_(Random(size_t{rows} * k, special)),
        activations_(Table(), format, x_, rows, k, k) {}

  // All rows and panels into y [rows, n].
  GemmCall Call(std::vector<float>& y) const {
    GemmCall call{};
    activations_.Fill(call);
    y.assign(size_t{rows_} * n_, 3.0f);
    call.y = y.data();
    call.y_stride = n_;
    call.rows = rows_;
    call.panel_end = PanelCount(n_);
    return call;
  }

  void Run(const GemmCall& call) const {
    emulation::ResetTileCounts();
    Table().format(format_).gemm(weights_.view(), call);
    EXPECT_FALSE(emulation::TilesAreLoaded());
  }

 private:
  // With `special`, where that is not 0, in the middle row.
  static std::vector<float> Random(size_t count, float special) {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::vector<float> x(count);
    for (float& v : x) v = normal(rng);
    if (special != 0.0f) x[x.size() / 2] = special;
    return x;
  }

  WeightFormat format_;
  uint32_t n_;
  uint32_t rows_;
  OwnedMatrix weights_;
  std::vector<float> x_;
  ActivationRows activations_;
};

class AmxTiles : public ::testing::TestWithParam<WeightFormat> {
 protected:
  void SetUp() override {
    if (!CanRun(Table())) GTEST_SKIP() << "this CPU lacks AVX2, for which the emulation is built";
  }
};

INSTANTIATE_TEST_SUITE_P(Formats, AmxTiles, ::testing::ValuesIn([] {
                           std::vector<WeightFormat> formats;
                           for (const FormatTraits& t : kFormats) formats.push_back(t.format);
                           return formats;
                         }()),
                         [](const auto& info) {
                           return std::string(kFormatNames[static_cast<int>(info.param)]);
                         });

// Scale groups worth trying: the format's own, and those that other arithmetic is chosen for.
std::vector<uint32_t> Groups(WeightFormat format) {
  const FormatTraits& t = TraitsOf(format);
  std::vector<uint32_t> groups = {UsualGroup(format)};
  const bool any = t.scale == ScaleType::kF32 || t.scale == ScaleType::kBf16 ||
                   (t.scale == ScaleType::kF16 && t.super == SuperType::kNone);
  if (any) groups.insert(groups.end(), {0, 128});
  return groups;
}

TEST_P(AmxTiles, AreFullAtMultiplesOfSixteenRows) {
  const uint32_t n = 160, k = 512;
  for (const uint32_t group : Groups(GetParam())) {
    for (const uint32_t rows : {16u, 32u, 48u}) {
      const Product product(GetParam(), group, n, k, rows);
      std::vector<float> y;
      product.Run(product.Call(y));
      const emulation::TileCounts counts = emulation::CountedTiles();
      // Multiply-adds of an instruction on whole tiles.
      const double most = 16.0 * 16 *
                          (64 * static_cast<double>(counts.int8_products) +
                           32 * static_cast<double>(counts.bf16_products));
      if (UsesTiles(GetParam())) {
        ASSERT_GT(most, 0.0) << "rows " << rows << " group " << group;
        EXPECT_GE(double{n} * k * rows / most, 0.85) << "rows " << rows << " group " << group;
      } else {
        EXPECT_EQ(most, 0.0);
      }
    }
  }
}

TEST_P(AmxTiles, ServeWholeTilesOfRowsOnly) {
  std::vector<float> y;
  const Product few(GetParam(), UsualGroup(GetParam()), 32, 64, 15);
  few.Run(few.Call(y));
  EXPECT_EQ(emulation::CountedTiles().int8_products + emulation::CountedTiles().bf16_products, 0u);
  const Product more(GetParam(), UsualGroup(GetParam()), 32, 64, 31);
  more.Run(more.Call(y));
  const uint64_t of_sixteen_rows = UsesTiles(GetParam()) ? 4 : 0;  // 2 halves, 2 steps of inputs
  EXPECT_EQ(emulation::CountedTiles().bf16_products, of_sixteen_rows);
}

TEST_P(AmxTiles, ReachAnyRowsAndPanels) {
  const uint32_t n = 161, k = 192, rows = 48, tiled = 32, tail = 6;
  for (const uint32_t group : Groups(GetParam())) {
    const Product product(GetParam(), group, n, k, rows);
    std::vector<uint32_t> reversed(tiled + tail), targets(tiled + tail);
    for (uint32_t r = 0; r < reversed.size(); ++r) {
      reversed[r] = rows - 1 - r;
      targets[r] = r + 3;
    }
    // Rows among tiles have the sums they have in another order; the tail those of few rows.
    std::vector<float> whole, few, part;
    product.Run(product.Call(whole));
    GemmCall call = product.Call(few);
    call.rows = tail;
    call.x_rows = reversed.data() + tiled;
    product.Run(call);
    call = product.Call(part);
    call.rows = tiled + tail;
    call.x_rows = reversed.data();
    call.y_rows = targets.data();
    call.panel_begin = 1;
    product.Run(call);
    for (uint32_t row = 0; row < rows; ++row) {
      for (uint32_t o = 0; o < n; ++o) {
        float want = 3.0f;
        if (row >= 3 && row < 3 + tiled + tail && o + 32 < n) {
          const uint32_t r = row - 3;
          want = r < tiled ? whole[reversed[r] * n + 32 + o] : few[(r - tiled) * n + 32 + o];
        }
        ASSERT_EQ(part[row * n + o], want) << row << " " << o << " group " << group;
      }
    }
  }
}

TEST_P(AmxTiles, KeepNanAndInfinityInTheirRows) {
  const uint32_t n = 40, k = 320, rows = 33;
  for (const uint32_t group : Groups(GetParam())) {
    for (const float special :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      const Product product(GetParam(), group, n, k, rows, special);
      std::vector<float> y;
      product.Run(product.Call(y));
      for (uint32_t i = 0; i < y.size(); ++i) {
        ASSERT_EQ(std::isfinite(y[i]), i / n != rows / 2) << i << " group " << group;
      }
    }
  }
}

// The engine prepares activations for the table; the tail of a call goes to the vector kernels.
TEST_P(AmxTiles, TakeTheActivationsOfTheVectorKernels) {
  const FormatKernels& tiles = Table().format(GetParam());
  const FormatKernels& vectors = kEmulatedAvx512VbmiTable.format(GetParam());
  EXPECT_EQ(tiles.form, vectors.form);
  EXPECT_EQ(tiles.dot_group, vectors.dot_group);
}

}  // namespace
}  // namespace tandem::kernels
