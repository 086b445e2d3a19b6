// The engine's threads under load: several clients submit, cancel and destroy at random while the
// worker fails now and then. Runs without gRPC, so ThreadSanitizer sees every lock.

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <thread>

#include "gateway/engine_over_port.h"
#include "tests/fakes/fake_worker_port.h"
#include "tests/gateway/engine_fixture.h"

namespace tandem::gateway {
namespace {

class EngineThreads : public EngineFixture {
 protected:
  void ServeOverPort(EngineOptions options) {
    worker_ = std::make_unique<testing::FakeGpuWorker>(testing::FakeGpuWorkerOptions{
        .groups = {{.block_tokens = 4, .block_count = 40}}, .max_sequences = 6});
    registry_ = std::make_shared<prometheus::Registry>();
    engine_ = MakeEngineOverPort(
        std::move(options), LetterText(), registry_, nullptr, [this](WorkerEventSink sink) {
          return std::make_unique<testing::FakeWorkerPort>(worker_.get(), std::move(sink));
        });
    ASSERT_TRUE(WaitReady());
  }
};

struct Client {
  int finished = 0;
  int refused = 0;
  std::vector<std::string> wrong;
};

// Submits `count` requests, one after the other, and cancels one of three.
void RunClient(Engine* engine, const testing::FakeGpuWorker* worker, uint64_t seed, int count,
               Client* client) {
  std::mt19937_64 rng(seed);
  for (int i = 0; i < count; ++i) {
    GenerationRequest request;
    request.prompt.resize(1 + rng() % 20);
    std::iota(request.prompt.begin(), request.prompt.end(), static_cast<uint32_t>(rng() % 500));
    request.stopping.max_tokens = 1 + rng() % 30;
    request.sampling.seed = rng();
    request.tenant = std::string(1, static_cast<char>('a' + seed % 3));
    const auto collector = std::make_shared<Collector>();
    const auto handle = engine->Submit(request, collector);
    if (!handle.ok()) {
      ++client->refused;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    if (rng() % 3 == 0) engine->Cancel(*handle);
    if (!collector->WaitFinished()) {
      client->wrong.push_back("no terminal event");
      return;
    }
    ++client->finished;
    const auto expected = worker->Continuation(
        request.prompt,
        {.stop_ids = {}, .max_tokens = request.stopping.max_tokens, .seed = request.sampling.seed});
    const auto tokens = collector->tokens();
    if (tokens.size() > expected.size() ||
        !std::equal(tokens.begin(), tokens.end(), expected.begin())) {
      client->wrong.push_back("other tokens");
    }
    if (collector->last().reason == FinishReason::kLength && tokens != expected) {
      client->wrong.push_back("too few tokens");
    }
  }
}

TEST_F(EngineThreads, ClientsComeAndGoWhileStepsFail) {
  ASSERT_NO_FATAL_FAILURE(ServeOverPort({}));
  constexpr int kClients = 4;
  constexpr int kRequests = 60;
  std::vector<Client> clients(kClients);
  std::atomic<bool> done{false};
  std::thread chaos([&] {
    while (!done) {
      worker_->FailNextStep("chaos");
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      worker_->set_ready(true);
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
    }
  });
  std::vector<std::thread> threads;
  for (int c = 0; c < kClients; ++c) {
    threads.emplace_back(RunClient, engine_.get(), worker_.get(), c + 1, kRequests, &clients[c]);
  }
  for (auto& thread : threads) thread.join();
  done = true;
  chaos.join();
  worker_->set_ready(true);
  int finished = 0;
  for (const Client& client : clients) {
    EXPECT_EQ(client.finished + client.refused, kRequests);
    for (const std::string& wrong : client.wrong) ADD_FAILURE() << wrong;
    finished += client.finished;
  }
  EXPECT_GT(finished, 0);
  EXPECT_TRUE(AtRest());
  EXPECT_EQ(Metric("tandem_gateway_requests_total"), finished);
}

TEST_F(EngineThreads, DestructionMeetsSubmittersHalfway) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    ASSERT_NO_FATAL_FAILURE(ServeOverPort({}));
    std::vector<std::shared_ptr<Collector>> collectors;
    for (uint32_t i = 0; i < 20; ++i) {
      collectors.push_back(Submit(Request({1, 2, i}, 50)));
    }
    engine_.reset();
    for (const auto& collector : collectors) EXPECT_EQ(collector->terminal_events(), 1);
  }
}

}  // namespace
}  // namespace tandem::gateway
