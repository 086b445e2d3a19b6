#include "tests/bench/measure.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "common/base/check.h"

namespace tandem::bench {
namespace {

// All CPUs' user, nice, system, irq and softirq time.
double BusySeconds() {
  std::ifstream in("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, soft = 0;
  in >> name >> user >> nice >> system >> idle >> wait >> irq >> soft;
  return (user + nice + system + irq + soft) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double Seconds(const timeval& t) {
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
}

double OwnSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
}

long Switches() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nivcsw;
}

}  // namespace

double Median(std::vector<double> values) {
  TANDEM_CHECK(!values.empty());
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

CoreWatch::CoreWatch(int threads)
    : threads_(threads), start_(Now()), switches_(Switches()), own_seconds_(OwnSeconds()) {}

bool CoreWatch::Disturbed() const {
  if (Switches() == switches_) return false;
  const double seconds = SecondsSince(start_);
  return seconds < 0.005 || OwnSeconds() - own_seconds_ < 0.98 * threads_ * seconds;
}

void OtherLoad::Restart() {
  start_ = Now();
  busy_seconds_ = BusySeconds();
  own_seconds_ = OwnSeconds();
}

double OtherLoad::Cores() const {
  const double others = BusySeconds() - busy_seconds_ - (OwnSeconds() - own_seconds_);
  return std::max(0.0, others / SecondsSince(start_));
}

}  // namespace tandem::bench
