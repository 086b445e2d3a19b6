#pragma once

// Finds stop strings in streamed text and holds back what may still become one.
//
//   StopMatcher matcher({.stops = {"\n\n", "User:"}});
//   std::string out;
//   if (matcher.Append(delta, &out)) { ... stopped; matcher.matched() says by which ... }
//   matcher.Flush(&out);  // end of stream without a stop: releases what was held
//
// Everything before the stop string is given out, and nothing of it (all of it with include_stop).
// The stop that ends first wins; of those that end together, the longest. The result does not
// depend on how the text is cut into deltas. Cost: O(bytes x stops), no allocation in proportion to
// the text.
//
// Thread safety: one owner. Deltas and stops are valid UTF-8, so what is given out is too.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::gateway {

struct StopMatcherOptions {
  std::vector<std::string> stops{};  // empty strings are ignored
  bool include_stop = false;
};

class StopMatcher {
 public:
  explicit StopMatcher(StopMatcherOptions options);

  // Appends to `out` what is certain. Returns true once a stop has been found; later text is
  // dropped.
  bool Append(std::string_view delta, std::string* out);
  // Appends what is held back. Nothing after a stop.
  void Flush(std::string* out);

  bool stopped() const { return matched_.has_value(); }
  // Index into options.stops.
  std::optional<size_t> matched() const { return matched_; }
  // Bytes that are held back now.
  size_t held_bytes() const { return held_.size(); }

 private:
  struct Pattern {
    std::string text;
    size_t index = 0;                // into options.stops
    std::vector<uint32_t> fallback;  // Knuth-Morris-Pratt: longest border of text[0..i]
    uint32_t state = 0;              // bytes of text that the input's end matches
  };
  // Feeds one byte to every pattern; returns the longest pattern completed by it.
  const Pattern* Step(char byte);

  std::vector<Pattern> patterns_;
  bool include_stop_;
  std::string held_;
  std::optional<size_t> matched_;
};

}  // namespace tandem::gateway
