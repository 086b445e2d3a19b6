#pragma once

// A regular expression of a tokenizer.json, run by PCRE2 (UTF and Unicode properties, JIT where the
// machine allows it).
//
// The files are written for Oniguruma. What differs is translated (\s is exactly Unicode's
// White_Space, \h a hexadecimal digit, ^ and $ match at lines) or refused (nested and intersected
// character classes, which PCRE2 would read as something else).
//
// Thread safety: Regex is immutable; Scratch has one owner. Pattern and subject are untrusted:
// size, compilation and backtracking are bounded.

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct pcre2_real_code_8;

namespace tandem::gateway {

class Regex {
 public:
  // Memory that matching needs; make one per thread or call and reuse it.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class Regex;
    struct State;
    std::unique_ptr<State> state_;
  };

  static absl::StatusOr<Regex> Compile(std::string_view pattern);
  static absl::StatusOr<Regex> CompileLiteral(std::string_view text);

  // Calls `on_match(begin, end)` for all non-empty matches from left to right, not overlapping.
  // REQUIRES: `subject` is valid UTF-8. INVALID_ARGUMENT when matching exceeds its limit.
  template <typename OnMatch>
  absl::Status ForEach(std::string_view subject, Scratch* scratch, OnMatch on_match) const {
    size_t offset = 0;
    while (offset < subject.size()) {
      size_t begin = 0;
      size_t end = 0;
      absl::Status status = Next(subject, offset, scratch, &begin, &end);
      if (!status.ok() || begin == end) return status;
      on_match(begin, end);
      offset = end;
    }
    return absl::OkStatus();
  }

 private:
  struct Deleter {
    void operator()(pcre2_real_code_8* code) const;
  };
  static absl::StatusOr<Regex> CompilePcre(const std::string& pattern, uint32_t options);

  // The next non-empty match at or after `offset`; *begin == *end when there is none.
  absl::Status Next(std::string_view subject, size_t offset, Scratch* scratch, size_t* begin,
                    size_t* end) const;

  std::unique_ptr<pcre2_real_code_8, Deleter> code_;
};

// The PCRE2 spelling of an Oniguruma pattern; UNIMPLEMENTED for syntax that has none here.
absl::StatusOr<std::string> TranslateOniguruma(std::string_view pattern);

}  // namespace tandem::gateway
