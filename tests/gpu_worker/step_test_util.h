#pragma once

// A StepRunner on the CPU backend over a tiny golden model, and short ways to write Steps.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tandem/worker/v1/gpu_worker.pb.h"
#include "tests/gpu_worker/golden_model.h"
#include "tests/testing/shared_data.h"

namespace tandem::gpu {

namespace v1 = worker::v1;

inline v1::SequenceStart& AddStart(v1::Step& step, uint64_t id) {
  v1::SequenceStart& start = *step.add_starts();
  start.set_sequence_id(id);
  start.mutable_sampling()->set_top_p(1);
  start.mutable_sampling()->set_repetition_penalty(1);
  start.mutable_sampling()->set_top_logprobs(-1);
  start.set_prompt_logprobs(-1);
  return start;
}

// Prompt tokens at `position`; `blocks` are appended.
inline v1::SequenceStep& AddTokens(v1::Step& step, uint64_t id, uint32_t position,
                                   const std::vector<uint32_t>& tokens,
                                   const std::vector<uint32_t>& blocks, bool sample) {
  v1::SequenceStep& sequence = *step.add_sequences();
  sequence.set_sequence_id(id);
  sequence.set_start_position(position);
  sequence.mutable_tokens()->mutable_ids()->Add(tokens.begin(), tokens.end());
  if (!blocks.empty()) {
    sequence.add_block_appends()->mutable_block_ids()->Add(blocks.begin(), blocks.end());
  }
  sequence.set_sample(sample);
  return sequence;
}

inline v1::SequenceStep& AddDecode(v1::Step& step, uint64_t id, uint32_t position,
                                   const std::vector<uint32_t>& blocks = {}) {
  v1::SequenceStep& sequence = AddTokens(step, id, position, {}, blocks, true);
  sequence.set_last_sampled(true);
  return sequence;
}

class StepRunnerTestBase : public ::testing::Test {
 protected:
  void Load(const std::string& name, const GoldenOptions& options) {
    const auto dir = tandem::testing::SharedPath("golden/models/" + name);
    if (!dir) GTEST_SKIP() << "no golden/models/" << name;
    auto model = GoldenModel::Load(dir->string(), options);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = std::move(*model);
  }
  v1::StepResult Run(const v1::Step& step) {
    v1::StepResult result;
    model_->runner().Run(step, result);
    return result;
  }

  std::unique_ptr<GoldenModel> model_;
};

}  // namespace tandem::gpu
