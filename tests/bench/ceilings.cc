#include "tests/bench/ceilings.h"

#include <emmintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/base/check.h"
#include "common/hw/pages.h"
#include "tests/bench/measure.h"

namespace tandem::bench {
namespace {

// A peak is what is reached when nothing disturbs: the best of several short runs. 4 ms are some
// ten million instructions, far above a clock's resolution.
constexpr int kPeakRuns = 9;
constexpr double kPeakSeconds = 0.004;
constexpr int kReadRuns = 9;
// What a thread claims at a time: small enough that threads end together, large enough that the
// claim (some 50 ns) vanishes beside the 10 us of reading.
constexpr uint64_t kPieceBytes = 256 * 1024;

struct Candidate {
  const PeakProbe* probe;
  bool CpuFeatures::*present;
};

constexpr Candidate kCandidates[] = {
    {&kAvx2Fma, &CpuFeatures::avx2},
    {&kAvx2Maddwd, &CpuFeatures::avx2},
    {&kAvx2Maddubs, &CpuFeatures::avx2},
    {&kAvx2SignMaddubs, &CpuFeatures::avx2},
    {&kAvx2Maddubs2, &CpuFeatures::avx2},
    {&kAvx2Maddubs4, &CpuFeatures::avx2},
    {&kAvx512Fma, &CpuFeatures::avx512},
    {&kAvx512Maddwd, &CpuFeatures::avx512},
    {&kAvx512Maddubs4, &CpuFeatures::avx512},
    {&kAvx512Vpdpbusd, &CpuFeatures::avx512_vnni},
    {&kAvx512Vdpbf16, &CpuFeatures::avx512_bf16},
    {&kAmxInt8, &CpuFeatures::amx_int8},
    {&kAmxBf16, &CpuFeatures::amx_bf16},
};

// Results of loads go here, so that the compiler keeps them.
volatile int read_sink;

void ReadPiece(const char* data, uint64_t bytes) {
  __m128i sum[4] = {};
  for (uint64_t i = 0; i + 64 <= bytes; i += 64) {
    for (uint64_t j = 0; j < 4; ++j) {
      const void* p = data + i + 16 * j;
      sum[j] = _mm_xor_si128(sum[j], _mm_loadu_si128(static_cast<const __m128i*>(p)));
    }
  }
  const __m128i all = _mm_xor_si128(_mm_xor_si128(sum[0], sum[1]), _mm_xor_si128(sum[2], sum[3]));
  read_sink = _mm_cvtsi128_si32(all);
}

double RunProbe(expert::Pool& pool, const PeakProbe& probe, int threads, uint64_t iterations) {
  const TimePoint start = Now();
  pool.Run([&](int thread) {
    if (thread < threads) probe.run(iterations);
  });
  return static_cast<double>(threads) * static_cast<double>(iterations) * probe.ops /
         SecondsSince(start) * 1e-9;
}

uint64_t IterationsFor(const PeakProbe& probe, double seconds) {
  constexpr uint64_t kTrial = 4096;
  probe.run(kTrial);  // warm-up: vector units wake, pages of the code are touched
  const TimePoint start = Now();
  probe.run(kTrial);
  return std::max<uint64_t>(kTrial, static_cast<uint64_t>(kTrial * seconds / SecondsSince(start)));
}

double BestGops(expert::Pool& pool, const PeakProbe& probe, int threads) {
  const uint64_t iterations = IterationsFor(probe, kPeakSeconds);
  double best = 0;
  for (int i = 0; i < kPeakRuns; ++i) {
    best = std::max(best, RunProbe(pool, probe, threads, iterations));
  }
  return best;
}

double ReadWith(expert::Pool& pool, int threads, std::span<const ByteRange> ranges) {
  std::atomic<uint64_t> next{0};
  std::vector<uint64_t> first_piece;  // of each range
  uint64_t pieces = 0;
  for (const ByteRange& range : ranges) {
    first_piece.push_back(pieces);
    pieces += (range.bytes + kPieceBytes - 1) / kPieceBytes;
  }
  const TimePoint start = Now();
  pool.Run([&](int thread) {
    if (thread >= threads) return;
    size_t r = 0;
    while (true) {
      const uint64_t piece = next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= pieces) return;
      while (r + 1 < ranges.size() && first_piece[r + 1] <= piece) ++r;
      const uint64_t offset = (piece - first_piece[r]) * kPieceBytes;
      ReadPiece(static_cast<const char*>(ranges[r].data) + offset,
                std::min(kPieceBytes, ranges[r].bytes - offset));
    }
  });
  return SecondsSince(start);
}

void MeasureReads(expert::Pool& pool, HugePages policy, const char* name, uint64_t bytes,
                  std::vector<ReadCeiling>& reads) {
  absl::StatusOr<PageBuffer> buffer = PageBuffer::Allocate(bytes, policy);
  TANDEM_CHECK(buffer.ok());
  // Also where the system gives huge pages to everybody.
  if (policy == HugePages::kOff) madvise(buffer->data(), buffer->bytes(), MADV_NOHUGEPAGE);
  std::memset(buffer->data(), 1, buffer->bytes());
  const ByteRange range{buffer->data(), buffer->bytes()};
  std::vector<int> threads{1};
  if (pool.threads() > 1) threads.push_back(pool.threads());
  for (int count : threads) {
    std::vector<double> gbps;
    for (int i = 0; i < kReadRuns; ++i) {
      gbps.push_back(static_cast<double>(range.bytes) / ReadWith(pool, count, {&range, 1}) * 1e-9);
    }
    reads.push_back({name, count, Median(gbps), *std::max_element(gbps.begin(), gbps.end())});
  }
}

}  // namespace

Ceilings MeasureCeilings(expert::Pool& pool, const CpuFeatures& features, uint64_t read_bytes) {
  Ceilings ceilings;
  MeasureReads(pool, HugePages::kOff, "4 KiB", read_bytes, ceilings.reads);
  MeasureReads(pool, HugePages::kAuto, "2 MiB", read_bytes, ceilings.reads);
  for (const Candidate& candidate : kCandidates) {
    if (!(features.*candidate.present)) continue;
    ceilings.peaks.push_back({candidate.probe, BestGops(pool, *candidate.probe, 1),
                              BestGops(pool, *candidate.probe, pool.threads())});
  }
  return ceilings;
}

double PeakGops(expert::Pool& pool, const PeakProbe& probe, double seconds) {
  return RunProbe(pool, probe, pool.threads(), IterationsFor(probe, seconds));
}

double ReadSeconds(expert::Pool& pool, std::span<const ByteRange> ranges) {
  return ReadWith(pool, pool.threads(), ranges);
}

}  // namespace tandem::bench
