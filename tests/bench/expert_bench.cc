// The routed-expert block beside this machine's ceilings:
//   expert_bench [--isa NAME] [--format NAME,..] [--shape NAME,..] [--rows N,..] [--threads N]
//                [--fused-rows N] [--memory-gib N] [--huge-pages auto|require|off] [--json FILE]
// prints read bandwidth and the peak of each instruction; then for each format, shape and number of
// rows: median microseconds, GB/s over the bytes of the distinct experts, GOP/s, and the share of
// the ceiling: the roof, max(bytes / bandwidth of plain loads over the same bytes, operations /
// peak of the instruction used), over the time. Both are measured beside each sample, since shared
// machines change by tens of percent within seconds.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "common/base/check.h"
#include "common/base/options.h"
#include "common/hw/cpu_features.h"
#include "common/hw/topology.h"
#include "expert_worker/kernels/select.h"
#include "tests/bench/expert_cases.h"
#include "tests/bench/expert_roof.h"
#include "tests/bench/expert_runner.h"

namespace tandem::bench {
namespace {

struct Flags {
  std::string table;
  std::vector<std::string> formats{"all"};
  std::vector<std::string> shapes{"qwen3-30b"};
  std::vector<std::string> rows;
  int hidden = 0;  // with --intermediate: a shape of one's own
  int intermediate = 0;
  int experts = 128;
  int top_k = 8;
  int layers = 0;
  int threads = static_cast<int>(AllowedCpus().size());
  int samples = 0;
  double memory_gib = 4;
  std::string huge_pages = "auto";
  bool parity = false;
  int fused_rows = -1;
  std::string json;
};

// Layers are cycled until they hold this much: a layer comes back after many caches' worth.
constexpr uint64_t kCycledBytes = uint64_t{1} << 30;
constexpr int kMaxLayers = 128;
constexpr uint64_t kReadBytes = uint64_t{1} << 30;

bool IsWanted(const std::vector<std::string>& names, const std::string& name) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& n) { return n == "all" || n == name; });
}

class ExpertBench {
 public:
  explicit ExpertBench(const Flags& flags) : flags_(flags), cpus_(AllowedCpus()) {
    features_ = DetectCpuFeatures();
    for (const kernels::KernelTable* table : kernels::AllKernelTables()) {
      if (!kernels::IsRunnable(*table, features_)) continue;
      if (table_ == nullptr && (flags.table.empty() || flags.table == table->name)) table_ = table;
    }
  }

  int Run() {
    if (table_ == nullptr) {
      std::fprintf(stderr, "this machine runs no kernels called %s\n", flags_.table.c_str());
      return 2;
    }
    Machine();
    const std::vector<ExpertShape> shapes = Shapes();
    const std::vector<uint32_t> rows = Rows();
    if (shapes.empty() || rows.empty()) return 2;
    int cases = 0;
    for (const ExpertShape& shape : shapes) {
      for (const FormatCase& format : kFormatCases) {
        if (!IsWanted(flags_.formats, format.name)) continue;
        ++cases;
        if (!Fits(format, shape)) {
          std::printf("%s %s: its blocks do not divide the rows\n", shape.name, format.name);
          continue;
        }
        if (!RunCase(shape, format, rows)) return 1;
      }
    }
    if (cases == 0) {
      std::fprintf(stderr, "no such format; there are:");
      for (const FormatCase& format : kFormatCases) std::fprintf(stderr, " %s", format.name);
      std::fprintf(stderr, "\n");
      return 2;
    }
    return WriteJson() ? 0 : 1;
  }

 private:
  // Runs on a thread of its own, since a pool pins its caller, and whoever packs the next store
  // (oneTBB) would take one pinned CPU for the size of the machine.
  template <typename Fn>
  void OnPool(Fn&& fn) {
    std::thread([&] {
      expert::Pool::Options options;
      options.threads = flags_.threads;
      if (static_cast<size_t>(flags_.threads) <= cpus_.size()) {
        options.cpus.assign(cpus_.begin(), cpus_.begin() + flags_.threads);
        options.pin_caller = true;
      }
      expert::Pool pool(options);
      fn(pool);
    }).join();
  }

  void Machine() {
    Ceilings ceilings;
    OnPool([&](expert::Pool& pool) { ceilings = MeasureCeilings(pool, features_, kReadBytes); });
    std::printf("machine: %s; table %s, %d threads\n", DescribeFeatures(features_).c_str(),
                table_->name, flags_.threads);
    json_["machine"] = {{"features", DescribeFeatures(features_)}, {"threads", flags_.threads}};
    for (const ReadCeiling& r : ceilings.reads) {
      std::printf("read, %s pages, %2d thread%s  median %6.1f GB/s  best %6.1f\n", r.pages.c_str(),
                  r.threads, r.threads == 1 ? " " : "s", r.median_gbps, r.best_gbps);
      json_["ceilings"]["read"].push_back({{"pages", r.pages},
                                           {"threads", r.threads},
                                           {"median_gbps", r.median_gbps},
                                           {"best_gbps", r.best_gbps}});
    }
    for (const PeakCeiling& p : ceilings.peaks) {
      std::printf("%-30s 1 thread %7.0f GOP/s  all %7.0f\n", p.probe->name, p.one_thread_gops,
                  p.all_threads_gops);
      json_["ceilings"]["peak"].push_back({{"instruction", p.probe->name},
                                           {"one_thread_gops", p.one_thread_gops},
                                           {"all_threads_gops", p.all_threads_gops}});
    }
    json_["rows"] = nlohmann::json::array();
  }

  std::vector<ExpertShape> Shapes() const {
    if (flags_.hidden > 0 && flags_.intermediate > 0) {
      return {{"custom", static_cast<uint32_t>(flags_.experts),
               static_cast<uint32_t>(std::min(flags_.top_k, flags_.experts)),
               static_cast<uint32_t>(flags_.hidden), static_cast<uint32_t>(flags_.intermediate)}};
    }
    std::vector<ExpertShape> shapes;
    for (const ExpertShape& shape : kExpertShapes) {
      if (IsWanted(flags_.shapes, shape.name)) shapes.push_back(shape);
    }
    if (shapes.empty()) std::fprintf(stderr, "no such shape\n");
    return shapes;
  }

  std::vector<uint32_t> Rows() const {
    if (flags_.rows.empty()) return {std::begin(kRowCounts), std::end(kRowCounts)};
    std::vector<uint32_t> rows;
    for (const std::string& text : flags_.rows) {
      uint32_t value = 0;
      if (!absl::SimpleAtoi(text, &value) || value == 0 || value > 4096) {
        std::fprintf(stderr, "--rows: %s is not a number from 1 to 4096\n", text.c_str());
        return {};
      }
      rows.push_back(value);
    }
    return rows;
  }

  // Blocks of GGUF and groups of integers divide a row in every checkpoint; blocks of FP8 need not.
  static bool Fits(const FormatCase& format, const ExpertShape& shape) {
    if (format.format == WeightFormat::kFp8) return true;
    const bool super = kernels::TraitsOf(format.format).super != kernels::SuperType::kNone &&
                       format.format != WeightFormat::kNvfp4;
    const uint32_t block = std::max(super ? kSuperBlockColumns : format.group_columns, 1u);
    return shape.hidden % block == 0 && shape.intermediate % block == 0;
  }

  // As many experts as the memory holds, then as many layers as the cycle wants.
  void Fit(RunnerOptions& options) const {
    const auto budget = static_cast<uint64_t>(flags_.memory_gib * (1 << 30));
    const uint64_t expert_bytes = ExpertRunner::PackedExpertBytes(options);
    const uint64_t fitting = std::max<uint64_t>(budget / expert_bytes, options.shape.top_k);
    options.shape.experts =
        static_cast<uint32_t>(std::min<uint64_t>(options.shape.experts, fitting));
    const uint64_t layer_bytes = options.shape.experts * expert_bytes;
    const uint64_t fitting_layers = std::clamp<uint64_t>(budget / layer_bytes, 1, kMaxLayers);
    const uint64_t cycled_layers = (kCycledBytes + layer_bytes - 1) / layer_bytes;
    options.layers = flags_.layers > 0
                         ? static_cast<uint32_t>(flags_.layers)
                         : static_cast<uint32_t>(std::min(cycled_layers, fitting_layers));
  }

  bool RunCase(const ExpertShape& shape, const FormatCase& format,
               const std::vector<uint32_t>& rows) {
    RunnerOptions options;
    options.table = table_;
    options.format = format;
    options.shape = shape;
    options.max_rows = *std::max_element(rows.begin(), rows.end());
    options.threads = flags_.threads;
    options.parity = flags_.parity;
    options.fused_rows = flags_.fused_rows;
    options.huge_pages = *ParseHugePages(flags_.huge_pages);
    Fit(options);
    absl::StatusOr<std::unique_ptr<ExpertRunner>> runner = ExpertRunner::Create(options);
    if (!runner.ok()) {
      std::fprintf(stderr, "%s: %s\n", format.name, runner.status().ToString().c_str());
      return false;
    }
    const PeakProbe* instruction = InstructionOf(*table_, format.format, flags_.parity);
    std::printf("%s %s: %u x %u, top %u of %u experts of %.2f MB, %u layers, %s pages, %s\n",
                shape.name, format.name, shape.hidden, shape.intermediate, shape.top_k,
                options.shape.experts, static_cast<double>((*runner)->expert_bytes()) * 1e-6,
                options.layers, std::string(PageKindName((*runner)->store().page_kind())).c_str(),
                instruction == nullptr ? "scalar" : instruction->name);
    OnPool([&](expert::Pool& pool) {
      for (uint32_t n : rows) {
        Report(options, instruction,
               (*runner)->Measure(pool, n, {.samples = flags_.samples, .instruction = instruction}),
               (*runner)->store());
      }
    });
    return true;
  }

  void Report(const RunnerOptions& options, const PeakProbe* instruction, const RowResult& r,
              const expert::WeightStore& store) {
    std::printf(
        "  rows %4u  %9.0f us  %5.1f GB/s of %5.1f  %6.1f GOP/s of %4.0f  share %3.0f %% of %s"
        "  (%d samples, %d disturbed, others %.2f cores)\n",
        r.rows, r.us, r.weights_gbps, r.read_gbps, r.gops, r.peak_gops, 100 * r.share_of_roof,
        r.memory_bound ? "memory" : "compute", r.samples, r.disturbed, r.other_cores);
    std::fflush(stdout);
    json_["rows"].push_back({{"format", options.format.name},
                             {"isa", table_->name},
                             {"mode", flags_.parity ? "parity" : "default"},
                             {"shape", options.shape.name},
                             {"rows", r.rows},
                             {"us", r.us},
                             {"gbps", r.weights_gbps},
                             {"gflops", r.gops},
                             {"share_of_ceiling", r.share_of_roof},
                             {"bound", r.memory_bound ? "memory" : "compute"},
                             {"roof_us", r.roof_us},
                             {"fastest_us", r.fastest_us},
                             {"read_gbps", r.read_gbps},
                             {"instruction", instruction == nullptr ? "" : instruction->name},
                             {"peak_gops", r.peak_gops},
                             {"experts", options.shape.experts},
                             {"layers", options.layers},
                             {"pages", PageKindName(store.page_kind())},
                             {"samples", r.samples},
                             {"disturbed", r.disturbed},
                             {"other_cores", r.other_cores}});
  }

  bool WriteJson() const {
    if (flags_.json.empty()) return true;
    std::ofstream out(flags_.json);
    out << json_.dump(1) << '\n';
    out.close();
    if (!out) std::fprintf(stderr, "cannot write %s\n", flags_.json.c_str());
    return static_cast<bool>(out);
  }

  const Flags flags_;
  const std::vector<int> cpus_;
  CpuFeatures features_;
  const kernels::KernelTable* table_ = nullptr;
  nlohmann::json json_;
};

int Main(int argc, char** argv) {
  Flags flags;
  OptionParser parser("expert_bench", "Measures the routed-expert block");
  parser.Add("isa", "Kernel table by name (ref, avx2, ...); none: the best", &flags.table);
  parser.AddList("format", "Weight formats, or all", &flags.formats);
  parser.AddList("shape", "Shapes, or all", &flags.shapes);
  parser.AddList("rows", "Rows of a block", &flags.rows);
  parser.Add("hidden", "Hidden size of a shape of your own", &flags.hidden,
             {.min = 0, .max = 65536});
  parser.Add("intermediate", "Its intermediate size", &flags.intermediate,
             {.min = 0, .max = 65536});
  parser.Add("experts", "Its experts a layer", &flags.experts, {.min = 1, .max = 1024});
  parser.Add("top-k", "Its experts a row", &flags.top_k, {.min = 1, .max = 64});
  parser.Add("layers", "Layers; 0: enough that none stays in a cache", &flags.layers,
             {.min = 0, .max = kMaxLayers});
  parser.Add("threads", "Threads", &flags.threads, {.min = 1, .max = 512});
  parser.Add("samples", "Samples a row count; 0: by time", &flags.samples, {.min = 0, .max = 1000});
  parser.Add("memory-gib", "Memory for weights", &flags.memory_gib);
  parser.AddChoice("huge-pages", "Pages of the weights", &flags.huge_pages,
                   {"auto", "require", "off"});
  parser.Add("fused-rows", "Rows up to which the plan is fused (-1: the engine's choice)",
             &flags.fused_rows, {.min = -1, .max = 65536});
  parser.AddFlag("parity", "F32 rows and the exact kernels", &flags.parity);
  parser.Add("json", "File for ceilings and results", &flags.json);
  if (const auto code = parser.Parse(argc, argv)) return *code;
  return ExpertBench(flags).Run();
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) { return tandem::bench::Main(argc, argv); }
