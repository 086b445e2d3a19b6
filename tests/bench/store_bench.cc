// Loading packed experts beside a plain parallel read of the same bytes into fresh pages of the
// same kind:
//   store_bench --dir DIR [--gib N] [--threads N] [--rounds N] [--cold]
// packs random experts into DIR once, then alternates the two and prints medians and their ratio.
// --cold drops the file from the page cache before each round.

#include <fcntl.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/check.h"
#include "common/base/options.h"
#include "common/hw/pages.h"
#include "common/hw/topology.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/engine/packed_file.h"
#include "expert_worker/engine/store_mapping.h"
#include "tests/bench/random_experts.h"

namespace tandem::bench {
namespace {

struct Flags {
  std::string dir = "/tmp/tandem-store-bench";
  int gib = 2;
  int threads = static_cast<int>(AllowedCpus().size());
  int rounds = 5;
  bool cold = false;
};

// Qwen3-30B's experts, as many layers as fit.
expert::StoreSpec SpecOf(int gib) {
  const expert::MatrixFormat format{WeightFormat::kInt4F16, 32};
  expert::StoreSpec spec;
  spec.model_hash = 1;
  spec.formats = {{format, format}};
  spec.experts = 128;
  spec.hidden = 2048;
  spec.intermediate = 768;
  spec.quantum = expert::ChooseQuantum(spec.intermediate, spec.formats);
  spec.segments = {0, expert::SegmentCount(spec.intermediate, spec.quantum)};
  spec.layers = 1;
  spec.moe_layers = {0};
  const auto one = expert::MakeManifest(spec);
  TANDEM_CHECK(one.ok());
  const uint64_t fit = (uint64_t{1} << 30) * static_cast<uint64_t>(gib) / one->file_bytes;
  spec.layers = static_cast<uint32_t>(std::max<uint64_t>(fit, 1));
  for (uint32_t layer = 1; layer < spec.layers; ++layer) spec.moe_layers.push_back(layer);
  return spec;
}

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

int OpenForRead(const std::string& path, bool cold) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (cold) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  return fd;
}

// What any loader must do: fresh pages of a memfd, and the file's bytes read into them.
double PlainRead(const std::string& path, uint64_t bytes, const Flags& flags) {
  const shm::UniqueFd fd(OpenForRead(path, flags.cold));
  const shm::UniqueFd direct(flags.cold ? open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT) : -1);
  const int source = direct.valid() ? direct.get() : fd.get();
  const auto start = std::chrono::steady_clock::now();
  const auto memory = CreateMemfd("plain", bytes, HugePages::kAuto);
  TANDEM_CHECK(memory.ok());
  const shm::UniqueFd memory_fd(memory->fd);
  const auto mapping = expert::StoreMapping::Map(memory_fd.get(), bytes, PROT_READ | PROT_WRITE);
  TANDEM_CHECK(mapping.ok());
  mapping->MakeHugePages(memory_fd.get());
  char* const base = mapping->base();
  constexpr uint64_t kPiece = uint64_t{1} << 20;
  oneapi::tbb::task_arena arena(flags.threads);
  arena.execute([&] {
    oneapi::tbb::parallel_for(uint64_t{0}, (bytes + kPiece - 1) / kPiece, [&](uint64_t i) {
      const uint64_t length = std::min(kPiece, bytes - i * kPiece);
      TANDEM_CHECK(pread(source, base + i * kPiece, length, static_cast<off_t>(i * kPiece)) ==
                   static_cast<ssize_t>(length));
    });
  });
  return Seconds(start);
}

double LoadStore(const std::string& path, const expert::StoreSpec& spec, const Flags& flags) {
  const shm::UniqueFd evict(OpenForRead(path, flags.cold));
  const auto start = std::chrono::steady_clock::now();
  const auto memory = CreateMemfd("store", 0, HugePages::kAuto);
  TANDEM_CHECK(memory.ok());
  const shm::UniqueFd memory_fd(memory->fd);
  expert::LoadProgress progress;
  const auto file = expert::PackedFile::Open(path, spec);
  TANDEM_CHECK(file.ok());
  const auto store = file->Load(memory_fd.get(), spec, {.threads = flags.threads}, &progress);
  TANDEM_CHECK(store.ok());
  return Seconds(start);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Main(int argc, char** argv) {
  Flags flags;
  OptionParser parser("store_bench", "Loads packed experts");
  parser.Add("dir", "Where the packed file goes", &flags.dir);
  parser.Add("gib", "Size", &flags.gib, {.min = 1, .max = 1024});
  parser.Add("threads", "Threads", &flags.threads, {.min = 1, .max = 512});
  parser.Add("rounds", "Of both", &flags.rounds, {.min = 1, .max = 1000});
  parser.AddFlag("cold", "With the file out of the page cache", &flags.cold);
  if (const auto exit_code = parser.Parse(argc, argv)) return *exit_code;
  const expert::StoreSpec spec = SpecOf(flags.gib);
  const RandomExperts source(spec.formats[0].gate_up);
  expert::LoadProgress progress;
  const auto begin = std::chrono::steady_clock::now();
  const auto file = expert::PackedFile::OpenOrPack(expert::PackedFile::PathFor(flags.dir, spec),
                                                   spec, source, flags.threads, &progress);
  if (!file.ok()) {
    std::fprintf(stderr, "%s\n", file.status().ToString().c_str());
    return 1;
  }
  const uint64_t bytes = expert::MakeManifest(spec)->file_bytes;
  const double gb = static_cast<double>(bytes) / 1e9;
  std::printf("%s: %.2f GB, opened or packed in %.1f s\n", file->path().c_str(), gb,
              Seconds(begin));
  std::vector<double> plain, load, ratio;
  for (int i = 0; i < flags.rounds; ++i) {
    plain.push_back(PlainRead(file->path(), bytes, flags));
    load.push_back(LoadStore(file->path(), spec, flags));
    ratio.push_back(load.back() / plain.back());
  }
  std::printf("plain read %.2f s (%.2f GB/s), load %.2f s (%.2f GB/s), ratio %.2f of %d rounds\n",
              Median(plain), gb / Median(plain), Median(load), gb / Median(load), Median(ratio),
              flags.rounds);
  return 0;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) { return tandem::bench::Main(argc, argv); }
