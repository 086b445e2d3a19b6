#pragma once

// Descriptions of machines that nobody needs to own: what a simulated device (sim_device.h) charges
// for bytes, operations, launches and transfers. Plain data; every figure's source stands beside
// it in sim_machine.cc.
//
// Figures are roofs that kernels are measured against: bandwidth of the GPU as its vendor states
// it, of the CPU as measured. Units: 1 GB = 1e9 bytes, 1 TFLOP/s = 1e12 operations a second.

#include <cstdint>
#include <span>
#include <string_view>

namespace tandem::gpu {

struct SimMachine {
  std::string_view name;

  double gpu_bandwidth_gbps = 0;
  double gpu_tflops = 0;     // dense BF16 with F32 sums
  double launch_gap_us = 0;  // between two ops of a stream
  double graph_gap_us = 0;   // between two ops of a replayed graph
  double gpu_memory_gib = 0;

  double to_device_gbps = 0;  // PCIe, each way
  double to_host_gbps = 0;
  double pcie_latency_us = 0;  // from a store on one side to its sight on the other

  double cpu_bandwidth_gbps = 0;  // all sockets, each reading its own memory
  double cpu_tflops = 0;          // of the expert kernels, all sockets
  double submission_us = 0;       // of the experts' time that each submission takes besides
};

std::span<const SimMachine> SimMachines();
// Null for an unknown name.
const SimMachine* FindSimMachine(std::string_view name);

// The same machine with a GPU that takes `factor` times as long for each op (less than 1: it is
// faster). PCIe stays.
SimMachine SlowerGpu(const SimMachine& machine, double factor);

// Nanoseconds of the larger of two roofs.
int64_t RoofNs(double bytes, double bandwidth_gbps, double flops, double tflops);

}  // namespace tandem::gpu
