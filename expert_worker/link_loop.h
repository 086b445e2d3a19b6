// The expert worker's side of the shared-memory link: hands segments to gpu workers over a Unix
// socket and runs the SPMD loop that turns submissions into BatchHandler::Run calls. Design:
// common/shm/README.md.
//
//   auto loop = LinkLoop::Start({.socket_path = run_dir + "/expert0.link", .thread_cpus = cpus},
//   &engine); std::thread compute([&] { pool.Run([&](int thread) { loop->RunThread(thread); }); });
//   // the Attach RPC: ticket = loop->Offer({.limits = ..., .model_hash = ...})
//   loop->Stop(); compute.join();
//
// Threads: RunThread is called once by each of thread_cpus.size() threads (index 0..), which then
// belong to the loop until Stop; all else is called from any other thread. One control thread
// accepts peers and watches the current one; one life thread per attachment holds the robust futex.
// At most one gpu worker is attached; a new Offer ends the previous attachment.
//
// Idle, all threads sleep. The peer is untrusted: a bad slot is answered with an error code, a bad
// doorbell or the peer's death ends the attachment and frees its segment, and the next Offer starts
// a new one with a new epoch.
//
// A handler that hangs makes Offer fail after 5 s (UNAVAILABLE) and Stop return with the threads
// still inside: the process has to be killed then.
//
// Ownership: the handler must outlive the loop. Errors: Start and Offer return Status.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/trace.h"
#include "common/shm/expert_batch.h"
#include "common/shm/handover.h"
#include "common/shm/thread_pairs.h"

namespace tandem::expert {

class LinkLoop {
 public:
  struct Options {
    std::string socket_path;  // in a directory of mode 0700 that both sides can reach
    std::vector<int>
        thread_cpus;  // CPU of each compute thread, -1 = not pinned; one entry a thread
    shm::Placement placement = shm::Placement::kAuto;
    // A submission that some gpu threads have rung and others not for so long ends the attachment.
    std::chrono::milliseconds peer_deadline{1500};
    // Apart only: how long the leader spins for the next submission while a step is active.
    std::chrono::microseconds spin{20000};
    std::vector<TraceTrack*> tracks;  // one a compute thread; empty: no timeline
  };

  struct AttachSpec {
    shm::BatchLimits limits;
    uint64_t model_hash = 0;
    // Of the weight store, for a gpu worker that asks for it; -1: there is none to hand over.
    int weights_fd = -1;
  };

  struct State {
    bool attached = false;
    uint64_t epoch = 0;          // of the last Offer
    uint64_t batches = 0;        // computed since Start
    uint64_t refused_slots = 0;  // since Start
    uint64_t attachments = 0;    // since Start
    bool colocated = false;      // of the current attachment
    const char* page_kind = "";  // of the current segment: hugetlb, transparent or plain
  };

  static absl::StatusOr<std::unique_ptr<LinkLoop>> Start(const Options& options,
                                                         shm::BatchHandler* handler);
  ~LinkLoop();  // REQUIRES: every RunThread has returned
  LinkLoop(const LinkLoop&) = delete;
  LinkLoop& operator=(const LinkLoop&) = delete;

  // Ends the current attachment (after its submission in progress), configures the handler and
  // returns the ticket for one handover.
  absl::StatusOr<shm::LinkTicket> Offer(const AttachSpec& spec);

  void RunThread(int thread);

  // Ends the current attachment and refuses tickets until the next Offer.
  void Detach();
  // Detach, and all RunThread calls return. Idempotent.
  void Stop();

  State state() const;

 private:
  class Impl;
  explicit LinkLoop(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::expert
