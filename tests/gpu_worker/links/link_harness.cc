#include "tests/gpu_worker/links/link_harness.h"

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "common/base/check.h"

namespace tandem::testing {

shm::BatchLimits TestLimits() {
  return {.max_rows = 64,
          .hidden = 96,
          .top_k = 4,
          .num_experts = 16,
          .num_layers = 8,
          .lanes = 2,
          .row_type = shm::RowType::kBf16};
}

TempSocketDir::TempSocketDir() {
  char name[] = "/tmp/tandem-link-XXXXXX";
  TANDEM_CHECK(mkdtemp(name) != nullptr);
  path_ = name;
}

TempSocketDir::~TempSocketDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void RunTeam(int threads, const std::function<void(int)>& fn) {
  std::vector<std::thread> team;
  for (int thread = 1; thread < threads; ++thread) team.emplace_back(fn, thread);
  fn(0);
  for (std::thread& member : team) member.join();
}

ExpertWorkerThreads::ExpertWorkerThreads(const std::string& socket_path,
                                         const std::vector<int>& cpus, shm::Placement placement,
                                         int worker, Tracer* tracer)
    : experts_(worker) {
  expert::LinkLoop::Options options;
  options.socket_path = socket_path;
  options.thread_cpus = cpus;
  options.placement = placement;
  // Tests run more threads than there are cores.
  options.spin = std::chrono::microseconds(200);
  for (size_t i = 0; tracer != nullptr && i < cpus.size(); ++i) {
    options.tracks.push_back(tracer->AddTrack("experts " + std::to_string(i)));
  }
  auto loop = expert::LinkLoop::Start(options, &experts_);
  TANDEM_CHECK(loop.ok());
  loop_ = std::move(loop).value();
  for (int thread = 0; thread < static_cast<int>(cpus.size()); ++thread) {
    threads_.emplace_back([this, thread] { loop_->RunThread(thread); });
  }
}

ExpertWorkerThreads::~ExpertWorkerThreads() {
  loop_->Stop();
  for (std::thread& thread : threads_) thread.join();
}

absl::StatusOr<shm::LinkTicket> ExpertWorkerThreads::Offer(const shm::BatchLimits& limits) {
  return loop_->Offer({.limits = limits, .model_hash = kModelHash});
}

gpu::ShmLinkOptions LinkOptions(const shm::LinkTicket& ticket, const shm::BatchLimits& limits,
                                int threads) {
  gpu::ShmLinkOptions options;
  options.ticket = ticket;
  options.model_hash = kModelHash;
  options.limits = limits;
  options.thread_cpus.assign(static_cast<size_t>(threads), -1);
  return options;
}

bool Eventually(const std::function<bool()>& condition, int seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return condition();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

int MappingsNamed(const std::string& text) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(text) != std::string::npos) ++count;
  }
  return count;
}

LinkInput RandomInput(std::mt19937_64* random, const shm::BatchLimits& limits, uint32_t lane,
                      uint32_t layer, int32_t rows, bool deferred) {
  LinkInput input{.lane = lane,
                  .layer = layer,
                  .rows = rows,
                  .x = {},
                  .ids = {},
                  .weights = {},
                  .deferred = {}};
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> id(0, static_cast<int>(limits.num_experts));
  const auto count = static_cast<size_t>(rows);
  for (size_t i = 0; i < count * limits.hidden; ++i) input.x.push_back(normal(*random));
  for (size_t i = 0; i < count * limits.top_k; ++i) {
    const int pick = id(*random);
    const bool none = pick == static_cast<int>(limits.num_experts);
    input.ids.push_back(none ? shm::kNoExpert : static_cast<uint16_t>(pick));
    input.weights.push_back(std::abs(normal(*random)));
    if (deferred) input.deferred.push_back((*random)() % 3 == 0 ? 1 : 0);
  }
  // An empty vector means no deferral; with rows = 0 there is nothing to defer either.
  return input;
}

namespace {

// [layer][lane]
using Inputs = std::vector<std::vector<LinkInput>>;

Inputs MakeInputs(const gpu::ExpertLink& link, const StepSpec& spec, uint64_t seed) {
  std::mt19937_64 random(seed);
  Inputs inputs(spec.layers);
  for (uint32_t layer = 0; layer < spec.layers; ++layer) {
    for (uint32_t lane = 0; lane < spec.rows_of_lane.size(); ++lane) {
      // Nothing may be carried out of the last layer.
      const bool deferred = spec.deferred && layer + 1 < spec.layers;
      inputs[layer].push_back(
          RandomInput(&random, link.limits(), lane, layer, spec.rows_of_lane[lane], deferred));
    }
  }
  return inputs;
}

int CountMismatches(const gpu::ExpertLink& link, const StepSpec& spec, const Inputs& inputs,
                    const std::vector<std::vector<std::vector<float>>>& outputs) {
  std::vector<ExpectedSums> expected;
  for (int worker = 0; worker < spec.workers; ++worker) {
    expected.emplace_back(link.limits(), worker);
  }
  int mismatches = 0;
  for (size_t layer = 0; layer < inputs.size(); ++layer) {
    for (size_t lane = 0; lane < inputs[layer].size(); ++lane) {
      std::vector<float> sums = expected[0].Next(inputs[layer][lane]);
      for (size_t worker = 1; worker < expected.size(); ++worker) {
        const std::vector<float> more = expected[worker].Next(inputs[layer][lane]);
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
      }
      for (size_t i = 0; i < sums.size(); ++i) {
        if (std::memcmp(&sums[i], &outputs[layer][lane][i], sizeof(float)) != 0) ++mismatches;
      }
    }
  }
  return mismatches;
}

}  // namespace

absl::Status RunStep(gpu::ExpertLink* link, const StepSpec& spec, uint64_t seed, int* mismatches) {
  const Inputs inputs = MakeInputs(*link, spec, seed);
  std::vector<std::vector<std::vector<float>>> outputs(spec.layers);
  for (uint32_t layer = 0; layer < spec.layers; ++layer) {
    for (const LinkInput& input : inputs[layer]) outputs[layer].emplace_back(input.x.size(), 7.0f);
  }
  const int threads = link->threads();
  const auto max_rows = static_cast<int32_t>(link->limits().max_rows);
  std::barrier meet(threads);
  link->BeginStep(spec.step);
  RunTeam(threads, [&](int thread) {
    for (uint32_t layer = 0; layer < spec.layers; ++layer) {
      for (const LinkInput& input : inputs[layer]) {
        const gpu::Submission submission{
            .lane = input.lane,
            .layer = layer,
            .flags = 0,
            .rows = &input.rows,
            .max_rows = max_rows,
            .x = input.x.data(),
            .ids = input.ids.data(),
            .weights = input.weights.data(),
            .deferred = input.deferred.empty() ? nullptr : input.deferred.data()};
        link->Submit(submission, thread, threads);
      }
      for (const LinkInput& input : inputs[layer]) {
        const gpu::Collection collection{.lane = input.lane,
                                         .layer = layer,
                                         .rows = &input.rows,
                                         .max_rows = max_rows,
                                         .out = outputs[layer][input.lane].data(),
                                         .gather = gpu::Gather::kStore};
        link->Wait(collection, thread, threads);
      }
      // Backends have a barrier between ops; here only every other layer, so that threads run apart
      // too.
      if (layer % 2 == 1) meet.arrive_and_wait();
    }
  });
  const absl::Status status = link->EndStep();
  if (status.ok()) *mismatches += CountMismatches(*link, spec, inputs, outputs);
  return status;
}

}  // namespace tandem::testing
