#include "gpu_worker/backend_cpu/random.h"

#include <gtest/gtest.h>

namespace tandem::gpu {
namespace {

// Known answers of the authors' Random123 distribution (kat_vectors, philox4x32-10).
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(UniformAt, StaysInRangeAndFillsTheTenths) {
  int tenths[10] = {};
  for (int64_t position = 0; position < 10'000; ++position) {
    const double u = UniformAt(7, position);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    ++tenths[static_cast<int>(u * 10)];
  }
  // 9 degrees of freedom: chi-square below 27.9 in 999 of 1000 seeds.
  double chi = 0;
  for (const int count : tenths) chi += (count - 1000.0) * (count - 1000.0) / 1000.0;
  EXPECT_LT(chi, 27.9);
}

}  // namespace
}  // namespace tandem::gpu
