#pragma once

// Between the scheduler's plain structs and the messages of the gpu_worker.
// Thread safety: functions without state. What comes from the worker is not trusted.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/engine.h"
#include "gateway/scheduling/admission.h"
#include "gateway/scheduling/scheduler.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gateway {

// What a started sequence's request asks of the worker.
struct SequenceRules {
  const GenerationRequest* request = nullptr;
  std::span<const uint32_t> end_ids;  // of the model
  bool wants_prompt_logprobs = false;
};

// `rules_of` finds the rules of a request that starts in this step.
worker::v1::StepRequest EncodeStep(const StepPlan& plan, uint64_t epoch,
                                   const std::function<SequenceRules(RequestId)>& rules_of);

std::vector<SequenceOutcome> DecodeOutcomes(const worker::v1::StepResult& result);
TokenLogprob DecodeLogprob(const worker::v1::TokenLogprobs& message);

// The worker's limits. UNIMPLEMENTED for cache kinds that the scheduler does not know, INTERNAL for
// figures that cannot be.
absl::StatusOr<CapacityLimits> DecodeCapacity(const worker::v1::ModelInfo& info);

// Refuses what the worker would refuse, which costs every open request: INVALID_ARGUMENT naming the
// field.
absl::Status CheckRequest(const GenerationRequest& request, const ServedModel& model);

}  // namespace tandem::gateway
