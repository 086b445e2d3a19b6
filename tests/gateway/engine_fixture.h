#pragma once

// An engine and a fake gpu_worker joined by a unix socket in a directory of their own.

#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gateway/serving_engine.h"
#include "tests/fakes/fake_gpu_worker.h"

namespace tandem::gateway {

// Keeps everything that one request got.
class Collector final : public GenerationListener {
 public:
  void OnEvent(GenerationEvent event) override;

  // Waits (at most 20 s) for the terminal event. False if it did not come.
  bool WaitFinished();
  // Waits for so many generated tokens.
  bool WaitTokens(size_t count);

  std::vector<uint32_t> tokens() const;
  std::string text() const;
  // The last event. REQUIRES: WaitFinished.
  GenerationEvent last() const;
  std::vector<TokenLogprob> logprobs() const;
  std::vector<TokenLogprob> prompt_logprobs() const;
  int terminal_events() const;
  bool finished() const { return terminal_events() > 0; }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<GenerationEvent> events_;
  std::vector<uint32_t> tokens_;
  std::string text_;
  int terminal_ = 0;
};

class EngineFixture : public ::testing::Test {
 protected:
  ~EngineFixture() override;

  // Both start; waits until the engine serves.
  void Serve(testing::FakeGpuWorkerOptions worker, EngineOptions options,
             TextSinkFactory text = nullptr);
  void Serve() { Serve({}, {}); }
  void StartWorker(testing::FakeGpuWorkerOptions worker);
  void StartEngine(EngineOptions options, TextSinkFactory text = nullptr);
  bool WaitReady();
  // Polls until `done`, at most 20 s.
  static bool Eventually(const std::function<bool()>& done);

  GenerationRequest Request(std::vector<uint32_t> prompt, uint32_t max_tokens) const;
  // Submits; the handle is kept in handle_. Fails the test if refused.
  std::shared_ptr<Collector> Submit(GenerationRequest request);
  std::vector<uint32_t> Expected(const GenerationRequest& request) const;
  // Nothing is left over: no sequence at the worker, all blocks free, nothing waits or runs.
  bool AtRest();
  // The sum of a family's samples (a histogram: of its sums), with one label value if given.
  double Metric(const std::string& name, const std::string& label = "") const;
  double MetricCount(const std::string& histogram) const;

  std::string dir_;
  std::unique_ptr<testing::FakeGpuWorker> worker_;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<Engine> engine_;
  uint64_t handle_ = 0;
};

// Skipped under ThreadSanitizer, which cannot see the locks inside the distribution's gRPC and
// takes its hand-overs for races; engine_threads_test.cc covers the engine's threads without it.
class GrpcEngineFixture : public EngineFixture {
 protected:
  void SetUp() override;
};

// Text of token n: the letter 'a' + n % 26. Finds stop strings as the real sink does.
TextSinkFactory LetterText();

}  // namespace tandem::gateway
