#include "gateway/scheduling/waiting_queue.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"

namespace tandem::gateway {

void WaitingQueue::Push(const std::string& tenant, RequestId id) {
  const std::string key = tenants_in_turn_ ? tenant : std::string();
  auto line =
      std::find_if(lines_.begin(), lines_.end(), [&](const Line& l) { return l.tenant == key; });
  if (line == lines_.end()) line = lines_.insert(lines_.end(), Line{key, {}});
  line->ids.push_back(id);
}

std::optional<RequestId> WaitingQueue::Front() const {
  if (!preempted_.empty()) return preempted_.begin()->second;
  if (!lines_.empty()) return lines_.front().ids.front();
  return std::nullopt;
}

void WaitingQueue::Pop() {
  if (!preempted_.empty()) {
    preempted_.erase(preempted_.begin());
    return;
  }
  TANDEM_CHECK(!lines_.empty());
  Line line = std::move(lines_.front());
  lines_.pop_front();
  line.ids.pop_front();
  if (!line.ids.empty()) lines_.push_back(std::move(line));
}

bool WaitingQueue::Remove(RequestId id) {
  for (auto it = preempted_.begin(); it != preempted_.end(); ++it) {
    if (it->second != id) continue;
    preempted_.erase(it);
    return true;
  }
  for (auto line = lines_.begin(); line != lines_.end(); ++line) {
    const auto it = std::find(line->ids.begin(), line->ids.end(), id);
    if (it == line->ids.end()) continue;
    line->ids.erase(it);
    if (line->ids.empty()) lines_.erase(line);
    return true;
  }
  return false;
}

void WaitingQueue::Clear() {
  preempted_.clear();
  lines_.clear();
}

size_t WaitingQueue::size() const {
  size_t count = preempted_.size();
  for (const Line& line : lines_) count += line.ids.size();
  return count;
}

}  // namespace tandem::gateway
