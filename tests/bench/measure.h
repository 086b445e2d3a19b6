#pragma once

// Timing on a machine that is not ours alone: medians, the CPU time that other processes took
// meanwhile, and whether a sample lost its core.

#include <chrono>
#include <vector>

namespace tandem::bench {

using TimePoint = std::chrono::steady_clock::time_point;

inline TimePoint Now() { return std::chrono::steady_clock::now(); }
inline double SecondsSince(TimePoint start) {
  return std::chrono::duration<double>(Now() - start).count();
}

// REQUIRES: not empty.
double Median(std::vector<double> values);

// Tells whether `threads` busy threads of this process had their cores to themselves from
// construction on.
class CoreWatch {
 public:
  explicit CoreWatch(int threads);
  // Short samples: no involuntary switch. Long ones may have some, but no more than 2 % of their
  // cores' time may have gone elsewhere. REQUIRES: the threads were busy all the time.
  bool Disturbed() const;

 private:
  const int threads_;
  const TimePoint start_;
  const long switches_;
  const double own_seconds_;
};

// Cores that other processes kept busy since construction or Restart (from /proc/stat, in ticks of
// 10 ms: meaningful from a tenth of a second on). Not thread-safe.
class OtherLoad {
 public:
  OtherLoad() { Restart(); }
  void Restart();
  double Cores() const;

 private:
  TimePoint start_;
  double busy_seconds_ = 0;
  double own_seconds_ = 0;
};

}  // namespace tandem::bench
