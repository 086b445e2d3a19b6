#include "gpu_worker/backend_sim/sim_machine.h"

#include <algorithm>
#include <cmath>

namespace tandem::gpu {
namespace {

// NVIDIA's blog "Getting Started with CUDA Graphs" measures a kernel of 2.9 us on a V100: 3.8 us a
// kernel when launches overlap, 3.4 us in a graph.
constexpr double kLaunchGapUs = 3.8 - 2.9;
constexpr double kGraphGapUs = 3.4 - 2.9;

// No figure for a flag's way over PCIe is published that could be trusted (notes/systems.md expects
// 1 to 2 us): the middle, until it is measured on a GPU.
constexpr double kPcieLatencyUs = 1.5;

// PCIe 4.0 x16: 32 GB/s on the wire, about 25 by large copies (notes/ktransformers.md 7.4). PCIe
// 5.0 x16 is twice as fast.
constexpr double kPcie4Gbps = 25;
constexpr double kPcie5Gbps = 50;

// One Xeon Platinum 8452Y (36 cores, 8 channels of DDR5-4800, 307 GB/s nominal): 220 GB/s read by
// a socket and 21.3 TFLOP/s of BF16 by AMX kernels (the KTransformers paper's machine;
// notes/ktransformers.md 2.8 and 8.1).
constexpr double kSocketGbps = 220;
constexpr double kSocketTflops = 21.3;
// One Xeon Platinum 8570 (56 cores, 8 channels of DDR5-5600): the same, by channels' speed and by
// cores.
constexpr double kSocket8570Gbps = kSocketGbps * 5600 / 4800;
constexpr double kSocket8570Tflops = kSocketTflops * 56 / 36;

// Doorbell, grouping of picks and three barriers at 0.2 us (tests/bench/pool_bench), reduction.
constexpr double kSubmissionUs = 2;

constexpr SimMachine kMachines[] = {
    // GeForce RTX 4090 (vendor): 24 GB of GDDR6X at 1,008 GB/s, 165.2 TFLOP/s dense BF16, PCIe 4.0.
    {.name = "rtx4090-2s",
     .gpu_bandwidth_gbps = 1008,
     .gpu_tflops = 165.2,
     .launch_gap_us = kLaunchGapUs,
     .graph_gap_us = kGraphGapUs,
     .gpu_memory_gib = 24,
     .to_device_gbps = kPcie4Gbps,
     .to_host_gbps = kPcie4Gbps,
     .pcie_latency_us = kPcieLatencyUs,
     .cpu_bandwidth_gbps = 2 * kSocketGbps,
     .cpu_tflops = 2 * kSocketTflops,
     .submission_us = kSubmissionUs},
    // GeForce RTX 5090 (vendor): 32 GB of GDDR7 at 1,792 GB/s, PCIe 5.0; 838 TFLOP/s of sparse FP16
    // with FP16 sums are 209.5 dense with F32 sums.
    {.name = "rtx5090-1s",
     .gpu_bandwidth_gbps = 1792,
     .gpu_tflops = 209.5,
     .launch_gap_us = kLaunchGapUs,
     .graph_gap_us = kGraphGapUs,
     .gpu_memory_gib = 32,
     .to_device_gbps = kPcie5Gbps,
     .to_host_gbps = kPcie5Gbps,
     .pcie_latency_us = kPcieLatencyUs,
     .cpu_bandwidth_gbps = kSocketGbps,
     .cpu_tflops = kSocketTflops,
     .submission_us = kSubmissionUs},
    // H200 SXM (vendor): 141 GB of HBM3e at 4.8 TB/s, 989 TFLOP/s dense BF16, PCIe 5.0.
    {.name = "h200-2s",
     .gpu_bandwidth_gbps = 4800,
     .gpu_tflops = 989,
     .launch_gap_us = kLaunchGapUs,
     .graph_gap_us = kGraphGapUs,
     .gpu_memory_gib = 141e9 / (1 << 30),
     .to_device_gbps = kPcie5Gbps,
     .to_host_gbps = kPcie5Gbps,
     .pcie_latency_us = kPcieLatencyUs,
     .cpu_bandwidth_gbps = 2 * kSocket8570Gbps,
     .cpu_tflops = 2 * kSocket8570Tflops,
     .submission_us = kSubmissionUs},
    // The KTransformers paper's machine for full precision: A100-40G (vendor: 1,555 GB/s, 312
    // TFLOP/s dense BF16, PCIe 4.0) beside two 8452Y.
    {.name = "a100-2s",
     .gpu_bandwidth_gbps = 1555,
     .gpu_tflops = 312,
     .launch_gap_us = kLaunchGapUs,
     .graph_gap_us = kGraphGapUs,
     .gpu_memory_gib = 40,
     .to_device_gbps = kPcie4Gbps,
     .to_host_gbps = kPcie4Gbps,
     .pcie_latency_us = kPcieLatencyUs,
     .cpu_bandwidth_gbps = 2 * kSocketGbps,
     .cpu_tflops = 2 * kSocketTflops,
     .submission_us = kSubmissionUs},
};

}  // namespace

std::span<const SimMachine> SimMachines() { return kMachines; }

const SimMachine* FindSimMachine(std::string_view name) {
  const auto* found = std::find_if(std::begin(kMachines), std::end(kMachines),
                                   [&](const SimMachine& m) { return m.name == name; });
  return found == std::end(kMachines) ? nullptr : found;
}

SimMachine SlowerGpu(const SimMachine& machine, double factor) {
  SimMachine slower = machine;
  slower.gpu_bandwidth_gbps /= factor;
  slower.gpu_tflops /= factor;
  slower.launch_gap_us *= factor;
  slower.graph_gap_us *= factor;
  return slower;
}

int64_t RoofNs(double bytes, double bandwidth_gbps, double flops, double tflops) {
  // 1 GB/s is one byte a nanosecond; 1 TFLOP/s a thousand operations.
  return std::llround(std::max(bytes / bandwidth_gbps, flops / (tflops * 1000)));
}

}  // namespace tandem::gpu
