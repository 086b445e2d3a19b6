#pragma once

// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2, and exp(r) = 1 + r + r^2 q(r).
// q is the interpolation of (exp(r) - 1 - r) / r^2 in the five Chebyshev nodes of +-0.3469; with
// the coefficients rounded to F32 the relative error is 1.04e-8 (0.17 of half an ulp). Every table
// runs the same operations in the same order, so the bits agree:
//   x = min(kExpMax, x); x = max(kExpMin, x)         (a NaN passes)
//   t = fma(x, kLog2E, kRoundMagic); n = bits(t) - bits(kRoundMagic); f = t - kRoundMagic
//   r = fma(f, -kLn2High, x); r = fma(f, -kLn2Low, r)
//   q by Horner from kExpQ[4] with fma; e = fma(r * r, q, r) + 1
//   result = e * 2^(n >> 1) * 2^(n - (n >> 1))       (both factors normal; one rounding at most)
// kLn2High has 9 significant bits, so f * kLn2High is exact.

namespace tandem::kernels {

constexpr float kExpMax = 89.0f;    // exp(88.8) overflows
constexpr float kExpMin = -105.0f;  // exp(-104) is below half of the least denormal
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.63p-1f;
constexpr float kLn2Low = -0x1.bd0106p-13f;
constexpr float kRoundMagic = 0x1.8p+23f;
constexpr float kExpQ[5] = {0x1p-1f, 0x1.5554dcp-3f, 0x1.555518p-5f, 0x1.120be2p-7f,
                            0x1.6d117cp-10f};

}  // namespace tandem::kernels
