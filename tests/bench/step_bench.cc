// What a decode step of a model (the shipped one by default) takes outside of its ops: validation,
// staging, enqueueing, reading results. The experts run in process, so that no other process's time
// is in it.
//
//   step_bench [steps [model]]     prints medians over the steps, for 1 and for 16 sequences
//
// Every other step is traced (common/base/trace.h); `tracing` is what that adds outside of the ops.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "gpu_worker/resident_experts.h"
#include "tandem/worker/v1/gpu_worker.pb.h"
#include "tests/gpu_worker/golden_model.h"
#include "tests/testing/shared_data.h"

namespace tandem::gpu {
namespace {

using Clock = std::chrono::steady_clock;

double MicrosSince(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Forwards every op and adds up the time it takes (the CPU backend executes at enqueue).
class TimedBackend final : public Backend {
 public:
  explicit TimedBackend(Backend& forward) : forward_(forward) {}

  double TakeOpMicros() { return std::exchange(op_us_, 0.0); }
  int TakeOps() { return std::exchange(ops_, 0); }

  absl::StatusOr<void*> Allocate(size_t bytes) override { return forward_.Allocate(bytes); }
  absl::StatusOr<std::unique_ptr<LinearWeight>> LoadLinear(const MatrixSource& s) override {
    return forward_.LoadLinear(s);
  }
  absl::StatusOr<std::unique_ptr<ResidentExperts>> MakeResidentExperts(
      const ResidentShape& shape) override {
    return forward_.MakeResidentExperts(shape);
  }
  void GraphBegin(const GraphKey& key) override { forward_.GraphBegin(key); }
  void GraphEnd() override { forward_.GraphEnd(); }
  absl::Status Synchronize() override { return forward_.Synchronize(); }
  void CopyToDevice(void* d, const void* h, size_t n) override { forward_.CopyToDevice(d, h, n); }
  void CopyToHost(void* h, const void* d, size_t n) override { forward_.CopyToHost(h, d, n); }
  void CopyRunsToHost(const RunsToHostArgs& a) override { forward_.CopyRunsToHost(a); }
  void RecordEvent(Stream stream, int event) override { forward_.RecordEvent(stream, event); }
  void WaitEvent(Stream stream, int event) override { forward_.WaitEvent(stream, event); }
  void Stamp(int64_t* device_ns) override { forward_.Stamp(device_ns); }

  void Embed(const EmbedArgs& a) override { Timed(&Backend::Embed, a); }
  void RmsNorm(const RmsNormArgs& a) override { Timed(&Backend::RmsNorm, a); }
  void Linear(const LinearArgs& a) override { Timed(&Backend::Linear, a); }
  void HeadLinear(const HeadLinearArgs& a) override { Timed(&Backend::HeadLinear, a); }
  void RopeAngles(const RopeAnglesArgs& a) override { Timed(&Backend::RopeAngles, a); }
  void Rope(const RopeArgs& a) override { Timed(&Backend::Rope, a); }
  void CacheWrite(const CacheWriteArgs& a) override { Timed(&Backend::CacheWrite, a); }
  void Attention(const AttentionArgs& a) override { Timed(&Backend::Attention, a); }
  void LatentAttention(const LatentAttentionArgs& a) override {
    Timed(&Backend::LatentAttention, a);
  }
  void SiluMul(const SiluMulArgs& a) override { Timed(&Backend::SiluMul, a); }
  void Add(const AddArgs& a) override { Timed(&Backend::Add, a); }
  void Router(const RouterArgs& a) override { Timed(&Backend::Router, a); }
  void SplitPicks(const SplitPicksArgs& a) override { Timed(&Backend::SplitPicks, a); }
  void ExpertSubmit(const ExpertSubmitArgs& a) override { Timed(&Backend::ExpertSubmit, a); }
  void ExpertWait(const ExpertWaitArgs& a) override { Timed(&Backend::ExpertWait, a); }
  void StreamExperts(const StreamExpertsArgs& a) override { Timed(&Backend::StreamExperts, a); }
  void RunResidentExperts(const ResidentExpertsArgs& a) override {
    Timed(&Backend::RunResidentExperts, a);
  }
  void GatherRows(const GatherRowsArgs& a) override { Timed(&Backend::GatherRows, a); }
  void Sample(const SampleArgs& a) override { Timed(&Backend::Sample, a); }
  void Logprobs(const LogprobsArgs& a) override { Timed(&Backend::Logprobs, a); }
  void CopyBlocks(const BlockCopyArgs& a) override { Timed(&Backend::CopyBlocks, a); }

 private:
  template <typename Args>
  void Timed(void (Backend::*op)(const Args&), const Args& args) {
    const Clock::time_point start = Clock::now();
    (forward_.*op)(args);
    op_us_ += MicrosSince(start);
    ++ops_;
  }

  Backend& forward_;
  double op_us_ = 0;
  int ops_ = 0;
};

constexpr uint32_t kPrompt = 8;

worker::v1::Step FirstStep(int sequences, int blocks_each) {
  worker::v1::Step step;
  for (int i = 0; i < sequences; ++i) {
    worker::v1::SequenceStart& start = *step.add_starts();
    start.set_sequence_id(static_cast<uint64_t>(i) + 1);
    start.mutable_sampling()->set_top_p(1);
    start.mutable_sampling()->set_repetition_penalty(1);
    start.mutable_sampling()->set_top_logprobs(-1);
    start.mutable_stopping()->set_max_tokens(100'000);
    start.set_prompt_logprobs(-1);
    worker::v1::SequenceStep& sequence = *step.add_sequences();
    sequence.set_sequence_id(static_cast<uint64_t>(i) + 1);
    for (uint32_t t = 0; t < kPrompt; ++t) sequence.mutable_tokens()->add_ids(2 + t);
    sequence.set_sample(true);
    for (int b = 0; b < blocks_each; ++b) {
      if (b == 0) sequence.add_block_appends();
      sequence.mutable_block_appends(0)->add_block_ids(static_cast<uint32_t>(i * blocks_each + b));
    }
  }
  return step;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

int Measure(GoldenModel& model, TimedBackend& timed, Tracer& tracer, int sequences, int steps) {
  model.runner().Reset();
  worker::v1::StepResult result;
  const int blocks_each = (static_cast<int>(kPrompt) + steps) / 16 + 1;
  model.runner().Run(FirstStep(sequences, blocks_each), result);
  std::vector<double> whole;
  std::vector<double> outside_traced;
  std::vector<double> outside;
  int ops = 0;
  for (int s = 0; s < steps; ++s) {
    worker::v1::Step step;
    for (int i = 0; i < sequences; ++i) {
      worker::v1::SequenceStep& sequence = *step.add_sequences();
      sequence.set_sequence_id(static_cast<uint64_t>(i) + 1);
      sequence.set_start_position(kPrompt + static_cast<uint32_t>(s));
      sequence.set_last_sampled(true);
      sequence.set_sample(true);
    }
    const bool trace = s % 2 == 1;
    if (trace) tracer.Start().IgnoreError();
    timed.TakeOpMicros();
    timed.TakeOps();
    const Clock::time_point start = Clock::now();
    model.runner().Run(step, result);
    const double micros = MicrosSince(start);
    (trace ? outside_traced : outside).push_back(micros - timed.TakeOpMicros());
    if (!trace) whole.push_back(micros);
    if (trace) tracer.Stop();
    ops = timed.TakeOps();
    if (result.outcome() != worker::v1::STEP_OUTCOME_OK) {
      std::fprintf(stderr, "step failed: %s\n", result.error().c_str());
      return 1;
    }
  }
  const double step_us = Median(whole);
  const double tracing_us = Median(outside_traced) - Median(outside);
  std::printf(
      "sequences %2d  ops %d  step_us %.1f  outside_ops_us %.1f (%.1f %%)  tracing_us %.1f "
      "(%.2f %%)\n",
      sequences, ops, step_us, Median(outside), 100 * Median(outside) / step_us, tracing_us,
      100 * tracing_us / step_us);
  return 0;
}

int Main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 400;
  if (steps < 2 || steps > 900) {
    std::fprintf(stderr, "steps: 2 to 900\n");
    return 2;
  }
  TimedBackend* timed = nullptr;
  Tracer tracer;
  GoldenOptions options;
  options.tracer = &tracer;
  options.parity = false;
  options.max_sequences = 16;
  options.max_context = 1024;
  options.wrap = [&timed](CpuBackend& backend) {
    auto made = std::make_unique<TimedBackend>(backend);
    timed = made.get();
    return made;
  };
  const std::string shipped =
      (tandem::testing::SourceRoot() / "deploy/models/tandem-tiny").string();
  auto model = GoldenModel::Load(argc > 2 ? argv[2] : shipped, options);
  if (!model.ok()) {
    std::fprintf(stderr, "%s\n", model.status().ToString().c_str());
    return 1;
  }
  const int one = Measure(**model, *timed, tracer, 1, steps);
  return one != 0 ? one : Measure(**model, *timed, tracer, 16, steps);
}

}  // namespace
}  // namespace tandem::gpu

int main(int argc, char** argv) { return tandem::gpu::Main(argc, argv); }
