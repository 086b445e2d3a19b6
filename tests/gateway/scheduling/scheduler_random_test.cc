// Random events against the scheduler's invariants: every request ends exactly once; what a request
// got is a prefix of what the model generates after its prompt (all of it at a normal end); a block
// is written by one live sequence only; positions are contiguous; at most two steps are out; no
// sequence is in two states; all blocks are free at rest. The fake worker and the audit check most
// of these at every event (scheduler_harness.h).

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "tests/gateway/scheduling/scheduler_harness.h"

namespace tandem::gateway {
namespace {

class RandomEvents {
 public:
  explicit RandomEvents(uint64_t seed) : rng_(seed), harness_(RandomOptions(), kVocab) {}

  void Run(int events) {
    for (int i = 0; i < events; ++i) {
      OneEvent();
      ASSERT_EQ(harness_.Problem(), "") << "event " << i;
    }
    ASSERT_TRUE(harness_.RunAll()) << harness_.Problem();
    CheckEnds();
  }

 private:
  static constexpr uint32_t kVocab = 40;

  uint32_t Draw(uint32_t count) { return static_cast<uint32_t>(rng_() % count); }

  SchedulerOptions RandomOptions() {
    SchedulerOptions options;
    const uint32_t block_tokens = 1 + Draw(5);
    max_tokens_in_cache_ = 24 + Draw(100);
    for (uint32_t g = 0; g <= Draw(2); ++g) {
      options.groups.push_back({.block_tokens = block_tokens + (Draw(4) == 0 ? 1 : 0),
                                .block_count = max_tokens_in_cache_ / block_tokens + 1});
    }
    options.max_step_rows = 1 + Draw(24);
    options.max_sequences = 1 + Draw(6);
    options.chunks.fixed_tokens = Draw(3) == 0 ? 1 + Draw(6) : 0;
    options.prefix_cache = Draw(4) != 0;
    options.tenants_in_turn = Draw(2) == 0;
    return options;
  }

  std::vector<uint32_t> RandomPrompt() {
    std::vector<uint32_t> prompt;
    // Half of the prompts continue what an earlier request saw.
    const auto& requests = harness_.requests();
    if (!requests.empty() && Draw(2) == 0) {
      const HarnessRequest& earlier = std::next(requests.begin(), Draw(requests.size()))->second;
      prompt = earlier.prompt;
      prompt.insert(prompt.end(), earlier.generated.begin(), earlier.generated.end());
      prompt.resize(std::min<size_t>(prompt.size(), 1 + Draw(max_tokens_in_cache_ - 1)));
    }
    for (uint32_t n = Draw(12) + 1; n > 0 && prompt.size() < max_tokens_in_cache_; --n) {
      prompt.push_back(Draw(kVocab));
    }
    return prompt;
  }

  void AddRequest() {
    std::vector<uint32_t> prompt = RandomPrompt();
    const auto room = static_cast<uint32_t>(max_tokens_in_cache_ + 1 - prompt.size());
    const uint32_t max_tokens = Draw(room + 1);
    SchedulerHarness::AddOptions options;
    options.tenant = std::string(1, static_cast<char>('a' + Draw(3)));
    if (Draw(2) == 0) options.stop_ids = {Draw(kVocab), Draw(kVocab)};
    options.min_tokens = max_tokens == 0 ? 0 : Draw(max_tokens);
    options.seed = Draw(3);
    options.use_prefix_cache = Draw(5) != 0;
    harness_.Add(std::move(prompt), max_tokens, options);
  }

  void OneEvent() {
    const uint32_t dice = Draw(1000);
    if (dice < 150) {
      if (harness_.scheduler().waiting() < 20) AddRequest();
    } else if (dice < 560) {
      harness_.Send();
    } else if (dice < 930) {
      harness_.Receive();
    } else if (dice < 980) {
      // A client leaves, or a stop string is found.
      if (!harness_.requests().empty()) harness_.Cancel(1 + Draw(harness_.requests().size()));
    } else if (dice < 992) {
      harness_.FailStep();
    } else {
      harness_.LoseWorker(Draw(2) == 0);
    }
  }

  void CheckEnds() {
    for (const auto& [id, request] : harness_.requests()) {
      ASSERT_EQ(request.ends, 1) << "request " << id;
      const std::vector<uint32_t> expected = harness_.Expected(id);
      ASSERT_LE(request.generated.size(), expected.size()) << "request " << id;
      ASSERT_TRUE(std::equal(request.generated.begin(), request.generated.end(), expected.begin()))
          << "request " << id << " got other tokens";
      if (request.failed || request.cancelled) continue;
      ASSERT_EQ(request.generated, expected) << "request " << id;
      ASSERT_LT(request.cached_tokens, request.prompt.size()) << "request " << id;
    }
    ASSERT_EQ(harness_.model().sequences(), 0u);
  }

  std::mt19937_64 rng_;
  uint32_t max_tokens_in_cache_ = 0;
  SchedulerHarness harness_;
};

TEST(SchedulerRandom, KeepsItsInvariants) {
  const char* given = std::getenv("TANDEM_TEST_SEED");
  const uint64_t first = given ? std::strtoull(given, nullptr, 10) : 1;
  const uint64_t count = given ? 1 : 120;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("TANDEM_TEST_SEED=" + std::to_string(seed));
    RandomEvents(seed).Run(600);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tandem::gateway
