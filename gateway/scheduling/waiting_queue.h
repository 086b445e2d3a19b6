#pragma once

// The order in which waiting requests start: preempted ones first, oldest first; then one of each
// tenant in turn (or plain first come, first served).
//
// Thread safety: one owner. Its length is bounded by who admits (admission.h).

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

namespace tandem::gateway {

using RequestId = uint64_t;

class WaitingQueue {
 public:
  explicit WaitingQueue(bool tenants_in_turn) : tenants_in_turn_(tenants_in_turn) {}

  void Push(const std::string& tenant, RequestId id);
  // A preempted request comes back; smaller `age` goes first.
  void PushPreempted(uint64_t age, RequestId id) { preempted_[age] = id; }

  std::optional<RequestId> Front() const;
  // Takes Front() out. REQUIRES: not empty.
  void Pop();
  // False if `id` does not wait.
  bool Remove(RequestId id);
  void Clear();

  size_t size() const;

 private:
  struct Line {
    std::string tenant;
    std::deque<RequestId> ids;
  };

  bool tenants_in_turn_;
  std::map<uint64_t, RequestId> preempted_;
  std::deque<Line> lines_;  // none is empty; the first one's turn is next
};

}  // namespace tandem::gateway
