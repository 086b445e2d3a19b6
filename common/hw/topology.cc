#include "common/hw/topology.h"

#include <numa.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"

namespace tandem {
namespace {

// Kernels may know more CPUs than CPU_SETSIZE; a set of this size holds any machine of today.
constexpr int kMaxCpus = 8192;

struct CpuSetDeleter {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuSet = std::unique_ptr<cpu_set_t, CpuSetDeleter>;

bool RestrictThisThread(const std::vector<int>& cpus) {
  const CpuSet set(CPU_ALLOC(kMaxCpus));
  const size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
  CPU_ZERO_S(bytes, set.get());
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < kMaxCpus) CPU_SET_S(cpu, bytes, set.get());
  }
  return pthread_setaffinity_np(pthread_self(), bytes, set.get()) == 0;
}

bool ParseInt(std::string_view text, int* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

std::vector<NumaNode> KernelNodes(const std::vector<int>& cpus) {
  std::map<int, NumaNode> nodes;
  const bool available = numa_available() >= 0;
  for (const int cpu : cpus) {
    const int id = available ? std::max(numa_node_of_cpu(cpu), 0) : 0;
    nodes[id].id = id;
    nodes[id].cpus.push_back(cpu);
  }
  std::vector<NumaNode> result;
  for (auto& [id, node] : nodes) result.push_back(std::move(node));
  return result;
}

std::vector<NumaNode> SimulatedNodes(const std::vector<int>& cpus, int count) {
  std::vector<NumaNode> nodes(count);
  const int total = static_cast<int>(cpus.size());
  for (int i = 0; i < count; ++i) {
    nodes[i].simulated = true;
    const int begin = i * total / count;
    const int end = (i + 1) * total / count;
    nodes[i].cpus.assign(cpus.begin() + begin, cpus.begin() + end);
    if (nodes[i].cpus.empty()) nodes[i].cpus.push_back(cpus[i % total]);
  }
  return nodes;
}

}  // namespace

absl::StatusOr<NumaOption> ParseNumaOption(std::string_view text) {
  if (text == "auto") return NumaOption{};
  if (text == "off") return NumaOption{NumaOption::Mode::kOff, 0};
  int count = 0;
  if (ParseInt(text, &count) && count >= 1 && count <= 64) {
    return NumaOption{NumaOption::Mode::kSimulated, count};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("bad NUMA option \"", std::string(text), "\": use auto, off or 1 to 64"));
}

std::vector<int> AllowedCpus() {
  const CpuSet set(CPU_ALLOC(kMaxCpus));
  const size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
  CPU_ZERO_S(bytes, set.get());
  std::vector<int> cpus;
  if (sched_getaffinity(0, bytes, set.get()) == 0) {
    for (int cpu = 0; cpu < kMaxCpus; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set.get())) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) {
    const int count = std::max(1U, std::thread::hardware_concurrency());
    for (int cpu = 0; cpu < count; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

Topology DetectTopology(const NumaOption& option) {
  Topology topology;
  topology.allowed_cpus = AllowedCpus();
  switch (option.mode) {
    case NumaOption::Mode::kAuto:
      topology.nodes = KernelNodes(topology.allowed_cpus);
      break;
    case NumaOption::Mode::kOff:
      topology.nodes = {NumaNode{0, topology.allowed_cpus, false}};
      break;
    case NumaOption::Mode::kSimulated:
      topology.nodes = SimulatedNodes(topology.allowed_cpus, option.simulated_nodes);
      break;
  }
  return topology;
}

int CommonNode(const Topology& topology, const std::vector<int>& cpus) {
  for (const NumaNode& node : topology.nodes) {
    const auto here = [&](int cpu) {
      return std::find(node.cpus.begin(), node.cpus.end(), cpu) != node.cpus.end();
    };
    if (!cpus.empty() && std::all_of(cpus.begin(), cpus.end(), here)) return node.id;
  }
  return -1;
}

std::string FormatCpuList(const std::vector<int>& cpus) {
  std::string text;
  for (size_t i = 0; i < cpus.size();) {
    size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    if (!text.empty()) text += ',';
    absl::StrAppend(&text, cpus[i]);
    if (last > i) absl::StrAppend(&text, "-", cpus[last]);
    i = last + 1;
  }
  return text;
}

absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text) {
  const auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("bad CPU list \"", std::string(text), "\": write it like 0-3,8"));
  };
  std::vector<int> cpus;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    const size_t dash = item.find('-');
    int first = 0;
    int last = 0;
    if (!ParseInt(item.substr(0, dash), &first)) return bad();
    last = first;
    if (dash != std::string_view::npos && !ParseInt(item.substr(dash + 1), &last)) return bad();
    if (first < 0 || last < first || last >= kMaxCpus) return bad();
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  if (cpus.empty()) return bad();
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

absl::StatusOr<ProcessCpus> PlaceProcess(std::string_view cpu_list, int threads) {
  ProcessCpus placed{threads, AllowedCpus()};
  if (!cpu_list.empty()) {
    ASSIGN_OR_RETURN(placed.cpus, ParseCpuList(cpu_list));
  }
  if (!RestrictThisThread(placed.cpus)) {
    LogWarn("cpus_refused", {{"cpus", FormatCpuList(placed.cpus)}});
  }
  const auto count = static_cast<int>(placed.cpus.size());
  if (placed.threads <= 0) placed.threads = count;
  // With more threads than CPUs the kernel spreads them.
  placed.cpus.resize(placed.threads <= count ? static_cast<size_t>(placed.threads) : 0);
  return placed;
}

absl::Status PinThisThread(int cpu) {
  if (!RestrictThisThread({cpu})) {
    return absl::FailedPreconditionError(absl::StrCat("cannot pin a thread to CPU ", cpu));
  }
  return absl::OkStatus();
}

}  // namespace tandem
