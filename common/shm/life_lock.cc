#include "common/shm/life_lock.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "common/shm/waiting.h"

namespace tandem::shm {
namespace {

// Also bounds how long a stop can go unnoticed when its wake-up falls between look and sleep.
constexpr int64_t kSliceNs = 200'000'000;

std::atomic_ref<uint32_t> LowHalf(Line* line) { return std::atomic_ref<uint32_t>(line->word); }
const uint32_t* FutexOf(Line* line) { return &line->word; }
const uint32_t* FutexOf(const std::atomic<uint32_t>& word) {
  return reinterpret_cast<const uint32_t*>(&word);
}

}  // namespace

LifeLock::LifeLock(Options options) : options_(std::move(options)) {
  // The thread inherits the mask: it takes no signals of the process.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { ThreadMain(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  while (state_.load(std::memory_order_acquire) == kStarting) {
    FutexWait(FutexOf(state_), kStarting, kSliceNs);
  }
}

LifeLock::~LifeLock() {
  if (state_.load(std::memory_order_acquire) != kFailed) {
    SetState(kStopping);
    FutexWake(FutexOf(options_.peer), kWakeAll);
  }
  thread_.join();
}

void LifeLock::Watch() {
  uint32_t held = kHeld;
  if (state_.compare_exchange_strong(held, kWatching, std::memory_order_acq_rel)) {
    FutexWake(FutexOf(state_), kWakeAll);
  }
}

void LifeLock::SetState(State state) {
  state_.store(state, std::memory_order_release);
  FutexWake(FutexOf(state_), kWakeAll);
}

void LifeLock::ThreadMain() {
  pthread_setname_np(pthread_self(), "link-life");
  if (!Acquire()) {
    SetState(kFailed);
    return;
  }
  SetState(kHeld);
  while (state_.load(std::memory_order_acquire) == kHeld) {
    FutexWait(FutexOf(state_), kHeld, kSliceNs);
  }
  WatchPeer();
  while (state_.load(std::memory_order_acquire) != kStopping) {
    FutexWait(FutexOf(state_), kWatching, kSliceNs);
  }
  Release();
}

// The kernel finds the word at node address + futex_offset: one node, so any offset will do.
bool LifeLock::Acquire() {
  head_.list.next = &head_.list;
  head_.futex_offset =
      reinterpret_cast<char*>(&options_.own->word) - reinterpret_cast<char*>(&node_);
  head_.list_op_pending = &node_;
  if (syscall(SYS_set_robust_list, &head_, sizeof(head_)) != 0) return false;
  const auto tid = static_cast<uint32_t>(syscall(SYS_gettid));
  uint32_t free_word = 0;
  const bool taken = LowHalf(options_.own).compare_exchange_strong(free_word, tid);
  if (taken) {
    node_.next = &head_.list;
    head_.list.next = &node_;
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
  head_.list_op_pending = nullptr;
  return taken;
}

void LifeLock::Release() {
  head_.list_op_pending = &node_;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  head_.list.next = &head_.list;
  LowHalf(options_.own).store(0);
  FutexWake(FutexOf(options_.own), kWakeAll);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  head_.list_op_pending = nullptr;
}

void LifeLock::WatchPeer() {
  int64_t next_poll_ns = 0;
  while (state_.load(std::memory_order_acquire) == kWatching) {
    uint32_t word = LowHalf(options_.peer).load();
    bool gone = word == 0 || (word & FUTEX_OWNER_DIED) != 0;
    if (!gone && options_.peer_gone && NowNs() >= next_poll_ns) {
      gone = options_.peer_gone();
      next_poll_ns = NowNs() + kSliceNs;
    }
    if (gone) {
      options_.on_peer_gone();
      return;
    }
    // The kernel wakes only a word that says it has waiters.
    const uint32_t marked = word | FUTEX_WAITERS;
    if (word != marked && !LowHalf(options_.peer).compare_exchange_strong(word, marked)) continue;
    FutexWait(FutexOf(options_.peer), marked, kSliceNs);
  }
}

}  // namespace tandem::shm
