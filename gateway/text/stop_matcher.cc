#include "gateway/text/stop_matcher.h"

#include <algorithm>

namespace tandem::gateway {

StopMatcher::StopMatcher(StopMatcherOptions options) : include_stop_(options.include_stop) {
  for (size_t index = 0; index < options.stops.size(); ++index) {
    if (options.stops[index].empty()) continue;
    Pattern pattern{std::move(options.stops[index]), index, {}, 0};
    const std::string& text = pattern.text;
    pattern.fallback.assign(text.size(), 0);
    for (uint32_t i = 1, border = 0; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = pattern.fallback[border - 1];
      if (text[i] == text[border]) ++border;
      pattern.fallback[i] = border;
    }
    patterns_.push_back(std::move(pattern));
  }
}

const StopMatcher::Pattern* StopMatcher::Step(char byte) {
  const Pattern* completed = nullptr;
  for (Pattern& pattern : patterns_) {
    uint32_t state = pattern.state;
    while (state > 0 && byte != pattern.text[state]) state = pattern.fallback[state - 1];
    if (byte == pattern.text[state]) ++state;
    pattern.state = state;
    if (state == pattern.text.size() && (completed == nullptr || completed->text.size() < state)) {
      completed = &pattern;
    }
  }
  return completed;
}

bool StopMatcher::Append(std::string_view delta, std::string* out) {
  if (stopped()) return true;
  if (patterns_.empty()) {
    out->append(delta);
    return false;
  }
  for (size_t i = 0; i < delta.size(); ++i) {
    const Pattern* completed = Step(delta[i]);
    if (completed == nullptr) continue;
    matched_ = completed->index;
    held_.append(delta.substr(0, i + 1));
    if (!include_stop_) held_.resize(held_.size() - completed->text.size());
    out->append(held_);
    held_.clear();
    return true;
  }
  // The longest end of the input that a stop begins with stays; it is never longer than what is
  // there.
  uint32_t keep = 0;
  for (const Pattern& pattern : patterns_) keep = std::max(keep, pattern.state);
  held_.append(delta);
  out->append(held_, 0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return false;
}

void StopMatcher::Flush(std::string* out) {
  out->append(held_);
  held_.clear();
  // What has been released can no longer be a part of a stop.
  for (Pattern& pattern : patterns_) pattern.state = 0;
}

}  // namespace tandem::gateway
