// The other process of link tests. `link_peer expert SOCKET THREADS apart|colocated` is an expert
// worker, `link_peer gpu THREADS` a gpu worker; both obey lines on standard input and end with it.

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "tests/gpu_worker/links/link_harness.h"
#include "tests/gpu_worker/links/peer_process.h"

namespace tandem::testing {
namespace {

void Answer(const std::string& line) { std::cout << line << std::endl; }

int ExpertMain(const std::string& socket, int threads, const std::string& placement) {
  ExpertWorkerThreads worker(
      socket, threads, placement == "apart" ? shm::Placement::kApart : shm::Placement::kColocated);
  Answer("ready");
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "offer") {
      const auto ticket = worker.Offer(TestLimits());
      Answer(ticket.ok() ? TicketToText(*ticket) : "error");
    } else if (line == "hang" || line == "unhang") {
      worker.experts().set_hang(line == "hang");
      Answer("ok");
    } else if (line.starts_with("die ")) {
      // "die PHASE STEP LANE LAYER"
      FakeExperts::Death death;
      unsigned phase = 0;
      std::istringstream(line.substr(4)) >> phase >> death.step >> death.lane >> death.layer;
      death.phase = static_cast<FakeExperts::Phase>(phase);
      worker.experts().set_death(death);
      Answer("ok");
    } else if (line == "open") {
      const auto state = worker.loop().state();
      Answer(std::to_string(OpenDescriptors()) + " " +
             std::to_string(MappingsNamed("memfd:tandem-link")) + " " +
             std::to_string(state.attached ? 1 : 0));
    }
  }
  // The handler may hang on purpose: no orderly end then.
  std::_Exit(0);
}

int GpuMain(int threads) {
  std::unique_ptr<gpu::ExpertLink> link;
  for (std::string line; std::getline(std::cin, line);) {
    if (line.starts_with("attach ")) {
      const auto ticket = TicketFromText(line.substr(7));
      if (!ticket.has_value()) return 2;
      auto attached = gpu::AttachShmExpertLink(LinkOptions(*ticket, TestLimits(), threads));
      if (!attached.ok()) {
        Answer("error " + std::string(attached.status().message()));
        continue;
      }
      link = std::move(attached).value();
      Answer("attached");
    } else if (line == "step") {
      int mismatches = 0;
      const absl::Status status =
          RunStep(link.get(), {.step = 1, .layers = 4, .rows_of_lane = {3, 2}}, 1, &mismatches);
      Answer(status.ok() && mismatches == 0 ? "ok" : "error");
    } else if (line == "run") {
      Answer("running");
      int mismatches = 0;
      for (uint64_t step = 2;; ++step) {
        const StepSpec spec{.step = step, .layers = 8, .rows_of_lane = {7, 5}};
        if (!RunStep(link.get(), spec, step, &mismatches).ok()) break;
      }
      Answer(mismatches == 0 ? "failed" : "wrong");
    } else if (line == "close") {
      link.reset();
      Answer("ok");
    }
  }
  return 0;
}

}  // namespace
}  // namespace tandem::testing

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "expert" && argc == 5) {
    return tandem::testing::ExpertMain(argv[2], std::atoi(argv[3]), argv[4]);
  }
  if (mode == "gpu" && argc == 3) return tandem::testing::GpuMain(std::atoi(argv[2]));
  std::fprintf(stderr, "usage: link_peer expert SOCKET THREADS PLACEMENT | gpu THREADS\n");
  return 2;
}
