#include "gpu_worker/backend_sim/sim_device.h"

#include <algorithm>
#include <utility>

namespace tandem::gpu {

int64_t SimPcie::AloneNs(PcieWay way, double bytes) const {
  return RoofNs(bytes, way == PcieWay::kToDevice ? machine_.to_device_gbps : machine_.to_host_gbps,
                0, 1);
}

int64_t SimPcie::TransferNs(PcieWay way, double bytes, int64_t begin_ns) {
  const int64_t alone_ns = AloneNs(way, bytes);
  const std::lock_guard lock(mutex_);
  int64_t& copies_end_ns = copies_end_ns_[static_cast<size_t>(way)];
  const int64_t shared_ns = std::clamp<int64_t>(copies_end_ns - begin_ns, 0, alone_ns);
  if (shared_ns > 0) copies_end_ns += shared_ns;
  return alone_ns + shared_ns;
}

int64_t SimPcie::CopyEndNs(PcieWay way, double bytes, int64_t begin_ns) {
  const std::lock_guard lock(mutex_);
  int64_t& copies_end_ns = copies_end_ns_[static_cast<size_t>(way)];
  copies_end_ns = std::max(copies_end_ns, begin_ns) + AloneNs(way, bytes);
  return copies_end_ns;
}

double SimPcie::HostReadGbps(int64_t time_ns) const {
  const std::lock_guard lock(mutex_);
  const bool copies = copies_end_ns_[static_cast<size_t>(PcieWay::kToDevice)] > time_ns;
  return copies ? machine_.to_device_gbps : 0;
}

void SimLog::Add(const SimOpRecord& record) {
  const std::lock_guard lock(mutex_);
  records_.ops.push_back(record);
}

void SimLog::Add(const SimExpertRecord& record) {
  const std::lock_guard lock(mutex_);
  records_.experts.push_back(record);
}

SimLog::Records SimLog::Take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(records_, {});
}

}  // namespace tandem::gpu
