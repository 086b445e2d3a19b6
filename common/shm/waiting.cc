#include "common/shm/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace tandem::shm {

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

void YieldCpu() { sched_yield(); }

// Not FUTEX_PRIVATE_FLAG: the word may be shared between processes.
void FutexWake(const uint32_t* word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

void FutexWait(const uint32_t* word, uint32_t expected, int64_t timeout_ns) {
  const timespec timeout{.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

}  // namespace tandem::shm
