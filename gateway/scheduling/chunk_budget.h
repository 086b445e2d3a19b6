#pragma once

// How many prompt tokens a step may carry beside decodes, so that the step, which is the time
// between two tokens of every decoding stream, stays under a target.
//
// Learns from measured steps: the time of a step without prompt tokens, and the additional time of
// a prompt token (both as moving averages). The worker, which knows how its steps' time grows with
// their rows, may advise better (StepTiming.advised_prefill_rows). Where a plain decode step alone
// is close to the target or above it, prompt tokens may still double it: waiting prompts must get
// on.
//
// Thread safety: one owner.

#include <cstdint>

namespace tandem::gateway {

struct ChunkBudgetOptions {
  uint32_t fixed_tokens = 0;    // a fixed budget for every step; 0: by measurement
  uint32_t max_tokens = 0;      // rows of a step
  int64_t target_ns = 0;        // time of a step that has decodes
  uint32_t min_tokens = 16;     // below it a chunk costs nearly as much as a whole one
  uint32_t first_tokens = 256;  // before anything is known
};

class ChunkBudget {
 public:
  explicit ChunkBudget(ChunkBudgetOptions options) : options_(options) {}

  // Prompt tokens of the next step, which has so many decodes.
  uint32_t Tokens(uint32_t decodes) const;
  void Observe(uint32_t decodes, uint32_t prompt_tokens, int64_t duration_ns);

  // What a step with decodes may take, for the worker's advice; 0: none is wanted.
  int64_t limit_ns() const;
  // The worker's: prompt tokens beside `decodes` decodes within limit_ns(); 0: it has none.
  void Advise(uint32_t decodes, uint32_t prompt_tokens);

 private:
  ChunkBudgetOptions options_;
  double decode_step_ns_ = 0;   // 0: not known
  double prompt_token_ns_ = 0;  // 0: not known
  uint32_t advised_rows_ = 0;   // decodes among them; 0: no advice
};

}  // namespace tandem::gateway
