#include "common/quantize/encode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/tensor/convert.h"

namespace tandem {
namespace {

using Weights = std::span<const float>;

// Ties to even. REQUIRES: |x| < 2^22. In this form it vectorizes on every x86-64.
float RoundToEven(float x) {
  constexpr float kMagic = 0x1.8p23f;
  return (x + kMagic) - kMagic;
}

// The integers low .. high.
struct IntegerGrid {
  float low;
  float high;

  float Nearest(float x) const { return std::min(std::max(RoundToEven(x), low), high); }
};

// Floating-point values of few mantissa bits, saturating at `largest`.
struct FloatGrid {
  uint32_t mantissa_bits;
  float smallest_normal;
  float largest;

  float Nearest(float x) const {
    const float magnitude = std::abs(x);
    const uint32_t exponent = std::max(std::bit_cast<uint32_t>(magnitude) & 0x7f800000u,
                                       std::bit_cast<uint32_t>(smallest_normal));
    // Its last bit is worth the last mantissa bit of x's binade.
    const float magic = 1.5f * std::bit_cast<float>(exponent + ((23u - mantissa_bits) << 23));
    return std::copysign(std::min((magnitude + magic) - magic, largest), x);
  }
};

constexpr FloatGrid kE4m3Grid = {3, 0x1p-6f, 448.0f};
constexpr FloatGrid kE2m1Grid = {1, 1.0f, 6.0f};

// What a grid value is worth, computed in one way for judging and for encoding.
template <typename Grid>
float GridValue(float weight, float inverse_scale, const Grid& grid) {
  return grid.Nearest(weight * inverse_scale);
}

template <typename Grid>
double SquaredError(Weights weights, float scale, const Grid& grid) {
  constexpr size_t kLanes = 8;    // independent sums, so that the loop vectorizes
  constexpr size_t kBlock = 512;  // few enough additions for F32 sums
  const float inverse = 1.0f / scale;
  double total = 0;
  for (size_t begin = 0; begin < weights.size(); begin += kBlock) {
    const Weights block = weights.subspan(begin, std::min(kBlock, weights.size() - begin));
    std::array<float, kLanes> sums{};
    size_t i = 0;
    for (; i + kLanes <= block.size(); i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const float weight = block[i + lane];
        const float error = weight - scale * GridValue(weight, inverse, grid);
        sums[lane] += error * error;
      }
    }
    for (; i < block.size(); ++i) {
      const float error = block[i] - scale * GridValue(block[i], inverse, grid);
      sums[0] += error * error;
    }
    for (const float sum : sums) total += sum;
  }
  return total;
}

// The scale with which the codes that `scale` gives are nearest to the weights; 0 when all are 0.
template <typename Grid>
float LeastSquaresScale(Weights weights, float scale, const Grid& grid) {
  const float inverse = 1.0f / scale;
  double product = 0;
  double square = 0;
  for (const float weight : weights) {
    const double value = GridValue(weight, inverse, grid);
    product += value * weight;
    square += value * value;
  }
  return square > 0 ? static_cast<float>(product / square) : 0.0f;
}

// Small enough for any weight that matters, large enough that its inverse is far from overflow.
constexpr float kSmallestScale = 0x1p-64f;

float Bf16Scale(float scale) { return Bf16ToF32(F32ToBf16(std::max(scale, kSmallestScale))); }

struct Choice {
  float scale = 1;
  int zero = 0;
  double error = 0;
};

template <typename Grid>
void Try(Weights weights, float scale, const Grid& grid, int zero, Choice* best, bool first) {
  const double error = SquaredError(weights, scale, grid);
  if (first || error < best->error) *best = {scale, zero, error};
}

template <typename Grid>
void Refit(Weights weights, const Grid& grid, Choice* best) {
  for (int round = 0; round < 2; ++round) {
    const float scale = LeastSquaresScale(weights, best->scale, grid);
    if (scale > 0) Try(weights, Bf16Scale(scale), grid, best->zero, best, /*first=*/false);
  }
}

// Down to half: below it no distribution of weights has its least error.
constexpr int kShrinkSteps = 16;

float ShrinkFactor(int step) { return 1.0f - static_cast<float>(step) / 32.0f; }

Choice ChooseSymmetric(Weights weights, float largest, float code_limit, ScaleSearch search) {
  const IntegerGrid grid = {-code_limit - 1, code_limit};
  const int steps = search == ScaleSearch::kNone ? 0 : kShrinkSteps;
  Choice best;
  for (int step = 0; step <= steps; ++step) {
    const float scale = Bf16Scale(ShrinkFactor(step) * largest / code_limit);
    Try(weights, scale, grid, 0, &best, step == 0);
  }
  if (search != ScaleSearch::kNone) Refit(weights, grid, &best);
  return best;
}

constexpr int kInt4Codes = 16;

IntegerGrid ZeroPointGrid(int zero) {
  return {static_cast<float>(-zero), static_cast<float>(kInt4Codes - 1 - zero)};
}

Choice ChooseWithZeroPoint(Weights weights, ScaleSearch search) {
  const auto [low, high] = std::minmax_element(weights.begin(), weights.end());
  const float bottom = std::min(*low, 0.0f);
  const float range = std::max(*high, 0.0f) - bottom;
  const int steps = search == ScaleSearch::kNone ? 0 : kShrinkSteps;
  const int neighbours = search == ScaleSearch::kNone ? 0 : 1;
  Choice best;
  bool first = true;
  for (int step = 0; step <= steps; ++step) {
    const float scale = Bf16Scale(ShrinkFactor(step) * range / (kInt4Codes - 1));
    const int middle = static_cast<int>(RoundToEven(-ShrinkFactor(step) * bottom / scale));
    // The nearest zero point first: alone it is the plain choice.
    for (const int offset : {0, -1, 1}) {
      if (std::abs(offset) > neighbours) continue;
      const int zero = std::clamp(middle + offset, 0, kInt4Codes - 1);
      Try(weights, scale, ZeroPointGrid(zero), zero, &best, first);
      first = false;
    }
  }
  if (search != ScaleSearch::kNone) Refit(weights, ZeroPointGrid(best.zero), &best);
  return best;
}

Choice ChooseFp8(Weights weights, float largest, ScaleSearch search) {
  constexpr int kOctaveSteps = 16;
  constexpr int kClippingSteps = 2;
  Choice best;
  const auto consider = [&](float factor, bool first) {
    Try(weights, Bf16Scale(factor * largest / kE4m3Grid.largest), kE4m3Grid, 0, &best, first);
  };
  consider(1.0f, /*first=*/true);
  if (search == ScaleSearch::kNone) return best;
  for (int step = 1; step < kOctaveSteps; ++step) {
    consider(std::exp2(static_cast<float>(step) / kOctaveSteps), /*first=*/false);
  }
  for (int step = 1; step <= kClippingSteps; ++step) consider(ShrinkFactor(step), /*first=*/false);
  return best;
}

Choice ChooseMxfp4(Weights weights, float largest, ScaleSearch search) {
  const int plain = std::ilogb(largest) - 2;
  Choice best;
  for (const int offset : {0, -1, 1}) {
    if (offset != 0 && search == ScaleSearch::kNone) continue;
    const int exponent = std::clamp(plain + offset, -64, 64);
    Try(weights, std::ldexp(1.0f, exponent), kE2m1Grid, 0, &best, offset == 0);
  }
  return best;
}

uint8_t E4m3Code(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const float magnitude = std::abs(value);
  if (magnitude == 0) return 0;
  const uint32_t code = magnitude < kE4m3Grid.smallest_normal
                            ? static_cast<uint32_t>(magnitude * 0x1p9f)
                            : ((bits & 0x7fffffffu) >> 20) - ((127u - 7u) << 3);
  return static_cast<uint8_t>((bits >> 31 << 7) | code);
}

uint8_t E2m1Code(float value) {
  const float magnitude = std::abs(value);
  if (magnitude == 0) return 0;
  const auto* const found =
      std::find(std::begin(kE2m1Values), std::begin(kE2m1Values) + 8, magnitude);
  return static_cast<uint8_t>((found - std::begin(kE2m1Values)) | (std::signbit(value) ? 8 : 0));
}

// How one format chooses, encodes and stores; the only list of formats here.
struct Format {
  Choice (*choose)(Weights weights, float largest, ScaleSearch search);
  uint8_t (*code)(float weight, const Choice& choice);
  uint32_t (*stored_scale)(float scale);
};

uint32_t Bf16Bits(float scale) { return F32ToBf16(scale); }

const Format* FindFormat(WeightFormat format) {
  static constexpr Format kInt8 = {
      [](Weights w, float largest, ScaleSearch s) { return ChooseSymmetric(w, largest, 127, s); },
      [](float w, const Choice& c) {
        const float value = GridValue(w, 1.0f / c.scale, IntegerGrid{-128, 127});
        return static_cast<uint8_t>(static_cast<int8_t>(value));
      },
      Bf16Bits};
  static constexpr Format kInt4 = {
      [](Weights w, float largest, ScaleSearch s) { return ChooseSymmetric(w, largest, 7, s); },
      [](float w, const Choice& c) {
        return static_cast<uint8_t>(8 + GridValue(w, 1.0f / c.scale, IntegerGrid{-8, 7}));
      },
      Bf16Bits};
  static constexpr Format kInt4Zero = {
      [](Weights w, float, ScaleSearch s) { return ChooseWithZeroPoint(w, s); },
      [](float w, const Choice& c) {
        const float value = GridValue(w, 1.0f / c.scale, ZeroPointGrid(c.zero));
        return static_cast<uint8_t>(static_cast<float>(c.zero) + value);
      },
      Bf16Bits};
  static constexpr Format kFp8 = {
      ChooseFp8,
      [](float w, const Choice& c) { return E4m3Code(GridValue(w, 1.0f / c.scale, kE4m3Grid)); },
      [](float scale) { return std::bit_cast<uint32_t>(scale); }};
  static constexpr Format kMxfp4 = {
      ChooseMxfp4,
      [](float w, const Choice& c) { return E2m1Code(GridValue(w, 1.0f / c.scale, kE2m1Grid)); },
      [](float scale) { return std::bit_cast<uint32_t>(scale) >> 23; }};
  switch (format) {
    case WeightFormat::kInt8Bf16:
      return &kInt8;
    case WeightFormat::kInt4Bf16:
      return &kInt4;
    case WeightFormat::kInt4ZeroBf16:
      return &kInt4Zero;
    case WeightFormat::kFp8:
      return &kFp8;
    case WeightFormat::kMxfp4:
      return &kMxfp4;
    default:
      return nullptr;
  }
}

absl::Status CheckWeights(const float* values, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows * cols; ++i) {
    if (std::abs(values[i]) <= kMaxWeight) continue;  // false for NaN
    return absl::InvalidArgumentError(absl::StrCat("element [", i / cols, ",", i % cols, "] is ",
                                                   values[i],
                                                   ", not a finite number of at most 2^50"));
  }
  return absl::OkStatus();
}

float LargestMagnitude(Weights weights) {
  float largest = 0;
  for (const float weight : weights) largest = std::max(largest, std::abs(weight));
  return largest;
}

// Encodes one block of rows x columns that share a scale; `weights` is room for its values.
class BlockEncoder {
 public:
  BlockEncoder(const Format& format, ScaleSearch search, const float* values, int64_t cols,
               uint8_t* codes)
      : format_(format), search_(search), values_(values), cols_(cols), codes_(codes) {}

  GroupParameters Run(int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
    weights_.clear();
    for (int64_t row = row_begin; row < row_end; ++row) {
      const float* const from = values_ + row * cols_;
      weights_.insert(weights_.end(), from + col_begin, from + col_end);
    }
    const float largest = LargestMagnitude(weights_);
    Choice choice;  // of a group of zeros: scale 1
    if (largest > 0) choice = format_.choose(weights_, largest, search_);
    size_t i = 0;
    for (int64_t row = row_begin; row < row_end; ++row) {
      for (int64_t col = col_begin; col < col_end; ++col) {
        codes_[row * cols_ + col] = format_.code(weights_[i++], choice);
      }
    }
    loss_.squared_error += choice.error;
    for (const float weight : weights_) loss_.squared_weights += double{weight} * weight;
    return {.scale = format_.stored_scale(choice.scale),
            .min = static_cast<uint32_t>(choice.zero),
            .super = 0};
  }

  const EncodeLoss& loss() const { return loss_; }

 private:
  const Format& format_;
  const ScaleSearch search_;
  const float* const values_;
  const int64_t cols_;
  uint8_t* const codes_;
  std::vector<float> weights_;
  EncodeLoss loss_;
};

}  // namespace

double EncodeLoss::Relative() const {
  return squared_weights > 0 ? std::sqrt(squared_error / squared_weights) : 0;
}

absl::StatusOr<EncodeLoss> Encode(const float* values, int64_t rows, int64_t cols,
                                  const EncodeTarget& target, ScaleSearch search, uint8_t* codes,
                                  GroupParameters* groups) {
  const Format* const format = FindFormat(target.format);
  TANDEM_CHECK(format != nullptr && target.group_rows > 0);
  RETURN_IF_ERROR(CheckWeights(values, rows, cols));
  const int64_t group_columns = target.group_columns == 0 ? cols : target.group_columns;
  const int64_t groups_in_row = GroupsInRow(cols, target);
  BlockEncoder encoder(*format, search, values, cols, codes);
  for (int64_t row = 0; row < rows; row += target.group_rows) {
    const int64_t row_end = std::min(rows, row + target.group_rows);
    for (int64_t group = 0; group < groups_in_row; ++group) {
      const int64_t col = group * group_columns;
      const GroupParameters parameters =
          encoder.Run(row, row_end, col, std::min(cols, col + group_columns));
      for (int64_t r = row; r < row_end; ++r) groups[r * groups_in_row + group] = parameters;
    }
  }
  return encoder.loss();
}

}  // namespace tandem
