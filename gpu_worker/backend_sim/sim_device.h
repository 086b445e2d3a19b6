#pragma once

// One simulated machine that runs one model: its description, its time, its PCIe link, and a log of
// what every op was charged. SimBackend and SimExpertLink are two views of it.
//
// Thread safety: the log and the link lock; `machine` and `shape` change between steps only.

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "gpu_worker/backend_sim/sim_machine.h"
#include "gpu_worker/backend_sim/sim_model.h"
#include "gpu_worker/backend_sim/sim_timeline.h"

namespace tandem::gpu {

enum class PcieWay : uint8_t { kToDevice, kToHost };

// Each way carries large copies of the copy stream one after the other. What the compute stream
// reads or writes across it meanwhile has half of the bandwidth, and holds the copies up as long.
class SimPcie {
 public:
  explicit SimPcie(const SimMachine& machine) : machine_(machine) {}
  // How long a transfer of the compute stream takes that starts at `begin_ns`, latency apart.
  int64_t TransferNs(PcieWay way, double bytes, int64_t begin_ns);
  // When a large copy is done that may start at `begin_ns`.
  int64_t CopyEndNs(PcieWay way, double bytes, int64_t begin_ns);
  // What large copies to the device that are under way at `time_ns` take of the CPU's bandwidth,
  // GB/s: each byte is read from host memory once, as fast as PCIe takes it. What a copier writes
  // and reads again in between is taken to stay in its core's cache (an expert is a few MB).
  double HostReadGbps(int64_t time_ns) const;

 private:
  int64_t AloneNs(PcieWay way, double bytes) const;

  const SimMachine& machine_;
  mutable std::mutex mutex_;
  std::array<int64_t, 2> copies_end_ns_{};
};

// What happened on the compute stream, in its order.
struct SimOpRecord {
  enum class Kind : uint8_t { kOp, kStamp, kSubmit, kWait };
  Kind kind = Kind::kOp;
  const int32_t* rows = nullptr;  // the op's row count: tells lanes apart; null: copies
  uint32_t lane = 0;              // kSubmit and kWait
  uint32_t layer = 0;
  int64_t duration_ns = 0;  // of the stream; waiting for experts apart
  int64_t stall_ns = 0;     // kWait: how long the stream stood
};

// What the experts did, in their order.
struct SimExpertRecord {
  uint32_t lane = 0;
  uint32_t layer = 0;
  int64_t immediate_ns = 0;  // from taking the rows up to the answer
  int64_t deferred_ns = 0;   // after the answer
  int64_t stall_ns = 0;      // idle before, since the step's previous submission
};

class SimLog {
 public:
  void Add(const SimOpRecord& record);
  void Add(const SimExpertRecord& record);
  struct Records {
    std::vector<SimOpRecord> ops;
    std::vector<SimExpertRecord> experts;
  };
  // Since the last Take.
  Records Take();

 private:
  std::mutex mutex_;
  Records records_;
};

struct SimDevice {
  SimDevice(const SimMachine& m, const SimShape& s, const SimTimeline::Options& options)
      : machine(m), shape(s), pcie(machine), timeline(options) {}

  int64_t LatencyNs() const { return static_cast<int64_t>(machine.pcie_latency_us * 1000); }

  SimMachine machine;
  SimShape shape;
  SimPcie pcie;
  SimLog log;
  SimTimeline timeline;  // its threads use the rest: destroyed first
};

}  // namespace tandem::gpu
