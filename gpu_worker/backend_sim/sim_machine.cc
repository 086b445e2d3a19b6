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

struct Gpu {
  double bandwidth_gbps;
  double tflops;
  double memory_gib;
  double pcie_gbps;
};
struct Sockets {
  int count;
  double gbps;  // of each
  double tflops;
};

constexpr SimMachine Describe(std::string_view name, const Gpu& gpu, const Sockets& sockets) {
  return {.name = name,
          .gpu_bandwidth_gbps = gpu.bandwidth_gbps,
          .gpu_tflops = gpu.tflops,
          .launch_gap_us = kLaunchGapUs,
          .graph_gap_us = kGraphGapUs,
          .gpu_memory_gib = gpu.memory_gib,
          .to_device_gbps = gpu.pcie_gbps,
          .to_host_gbps = gpu.pcie_gbps,
          .pcie_latency_us = kPcieLatencyUs,
          .cpu_bandwidth_gbps = sockets.count * sockets.gbps,
          .cpu_tflops = sockets.count * sockets.tflops,
          .submission_us = kSubmissionUs};
}

// GeForce RTX 4090 (vendor): 24 GB of GDDR6X at 1,008 GB/s, 165.2 TFLOP/s dense BF16, PCIe 4.0.
constexpr Gpu kRtx4090{1008, 165.2, 24, kPcie4Gbps};
// GeForce RTX 5090 (vendor): 32 GB of GDDR7 at 1,792 GB/s, PCIe 5.0; 838 TFLOP/s of sparse FP16
// with FP16 sums are 209.5 dense with F32 sums.
constexpr Gpu kRtx5090{1792, 209.5, 32, kPcie5Gbps};
// H200 SXM (vendor): 141 GB (1e9) of HBM3e at 4.8 TB/s, 989 TFLOP/s dense BF16, PCIe 5.0.
constexpr Gpu kH200{4800, 989, 141e9 / (1 << 30), kPcie5Gbps};
// A100 40 GB PCIe (vendor): 1,555 GB/s, 312 TFLOP/s dense BF16, PCIe 4.0.
constexpr Gpu kA100{1555, 312, 40, kPcie4Gbps};

constexpr SimMachine kMachines[] = {
    Describe("rtx4090-2s", kRtx4090, {2, kSocketGbps, kSocketTflops}),
    Describe("rtx5090-1s", kRtx5090, {1, kSocketGbps, kSocketTflops}),
    Describe("h200-2s", kH200, {2, kSocket8570Gbps, kSocket8570Tflops}),
    // The KTransformers paper's for full precision.
    Describe("a100-2s", kA100, {2, kSocketGbps, kSocketTflops}),
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
