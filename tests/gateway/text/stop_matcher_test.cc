// Stop strings: found wherever the deltas are cut, nothing lost, nothing shown too early.

#include "gateway/text/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>

namespace tandem::gateway {
namespace {

struct Outcome {
  std::string text;
  std::optional<size_t> matched;
  bool operator==(const Outcome&) const = default;
};

Outcome Feed(const StopMatcherOptions& options, const std::vector<std::string>& deltas) {
  StopMatcher matcher(options);
  Outcome outcome;
  for (const std::string& delta : deltas) {
    if (matcher.Append(delta, &outcome.text)) break;
  }
  matcher.Flush(&outcome.text);
  outcome.matched = matcher.matched();
  return outcome;
}

// By definition: the stop with the smallest end, and of those the longest.
Outcome Obvious(const StopMatcherOptions& options, const std::string& text) {
  size_t best_end = std::string::npos;
  std::optional<size_t> best;
  for (size_t i = 0; i < options.stops.size(); ++i) {
    const std::string& stop = options.stops[i];
    const size_t at = stop.empty() ? std::string::npos : text.find(stop);
    if (at == std::string::npos) continue;
    const size_t end = at + stop.size();
    if (!best || end < best_end || (end == best_end && stop.size() > options.stops[*best].size())) {
      best = i;
      best_end = end;
    }
  }
  if (!best) return {text, std::nullopt};
  const size_t cut = options.include_stop ? best_end : best_end - options.stops[*best].size();
  return {text.substr(0, cut), best};
}

TEST(StopMatcher, HoldsBackAndReleasesExactly) {
  StopMatcher matcher({.stops = {"User:"}});
  std::string out;
  EXPECT_FALSE(matcher.Append("Hi Us", &out));
  EXPECT_EQ(out, "Hi ");
  EXPECT_EQ(matcher.held_bytes(), 2u);
  EXPECT_FALSE(matcher.Append("e", &out));
  EXPECT_EQ(out, "Hi ");
  EXPECT_FALSE(matcher.Append("d", &out));
  EXPECT_EQ(out, "Hi Used");
  EXPECT_TRUE(matcher.Append(" UUser: more", &out));
  EXPECT_EQ(out, "Hi Used U");
  EXPECT_EQ(matcher.matched(), std::optional<size_t>(0));
  EXPECT_TRUE(matcher.Append("x", &out));
  matcher.Flush(&out);
  EXPECT_EQ(out, "Hi Used U");
}

TEST(StopMatcher, FlushReleasesWhatIsHeld) {
  EXPECT_EQ(Feed({.stops = {"###"}}, {"a#", "#"}), (Outcome{"a##", std::nullopt}));
}

TEST(StopMatcher, IncludesTheStopWhenAsked) {
  EXPECT_EQ(Feed({.stops = {"##"}, .include_stop = true}, {"a#", "#b"}), (Outcome{"a##", 0}));
}

TEST(StopMatcher, WithoutStopsPassesEverything) {
  EXPECT_EQ(Feed({}, {"a", "b"}), (Outcome{"ab", std::nullopt}));
  EXPECT_EQ(Feed({.stops = {""}}, {"a", "b"}), (Outcome{"ab", std::nullopt}));
}

TEST(StopMatcher, LongestOfThoseThatEndTogetherWins) {
  EXPECT_EQ(Feed({.stops = {"b", "ab"}}, {"xab"}), (Outcome{"x", 1}));
  EXPECT_EQ(Feed({.stops = {"abc", "b"}}, {"xabc"}), (Outcome{"xa", 1}));
}

TEST(StopMatcher, DoesNotDependOnTheCuts) {
  constexpr uint32_t kSeed = 7;
  SCOPED_TRACE(kSeed);
  std::mt19937 random(kSeed);
  const auto word = [&](size_t size) {
    std::string out;
    while (out.size() < size) out.push_back("ab\n"[random() % 3]);
    return out;
  };
  size_t found = 0;
  for (int round = 0; round < 5000; ++round) {
    StopMatcherOptions options;
    options.include_stop = random() % 4 == 0;
    for (size_t i = 0, n = random() % 4; i < n; ++i)
      options.stops.push_back(word(1 + random() % 6));
    const std::string text = word(random() % 40);
    std::vector<std::string> deltas;
    for (size_t i = 0; i < text.size();) {
      const size_t size = 1 + random() % 5;
      deltas.push_back(text.substr(i, size));
      i += size;
    }
    const Outcome expected = Obvious(options, text);
    found += expected.matched ? 1 : 0;
    EXPECT_EQ(Feed(options, deltas), expected) << text;
  }
  EXPECT_GT(found, 1000u);
}

// Text that can no longer become a stop is out at once.
TEST(StopMatcher, NeverHoldsMoreThanAPrefixOfAStop) {
  std::mt19937 random(3);
  StopMatcher matcher({.stops = {"aab", "abab"}});
  std::string text;
  std::string out;
  for (int i = 0; i < 1000; ++i) {
    const char c = random() % 8 == 0 ? 'c' : 'a';
    text.push_back(c);
    ASSERT_FALSE(matcher.Append(std::string(1, c), &out));
    ASSERT_EQ(out.size() + matcher.held_bytes(), text.size());
    ASSERT_LE(matcher.held_bytes(), 2u);
  }
}

}  // namespace
}  // namespace tandem::gateway
