#include "gpu_worker/backend_cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "gpu_worker/backend_cpu/linear.h"
#include "gpu_worker/backend_cpu/ops.h"
#include "gpu_worker/backend_cpu/resident_experts.h"
#include "gpu_worker/expert_calls.h"

namespace tandem::gpu {
namespace {

expert::Pool::Options PoolOptions(const CpuBackendOptions& options) {
  return {.threads = options.threads,
          .cpus = options.cpus,
          .pin_caller = options.pin_caller,
          .spin = options.spin};
}

const kernels::KernelTable& CheckedTable(const CpuBackendOptions& options) {
  TANDEM_CHECK(options.threads >= 1);
  TANDEM_CHECK(options.kernels != nullptr);
  return *options.kernels;
}

}  // namespace

CpuBackend::CpuBackend(const CpuBackendOptions& options)
    : context_(PoolOptions(options), CheckedTable(options),
               {.max_rows = options.max_rows,
                .max_vocab = options.max_vocab,
                .max_experts = options.max_experts}) {}

CpuBackend::~CpuBackend() = default;

absl::StatusOr<void*> CpuBackend::Allocate(size_t bytes) {
  ASSIGN_OR_RETURN(PageBuffer buffer, PageBuffer::Create(bytes));
  // Touched here, a share by each thread, so that no op takes the page faults.
  auto* data = static_cast<unsigned char*>(buffer.data());
  const size_t size = buffer.bytes();
  const auto threads = static_cast<size_t>(this->threads());
  context_.pool.Run([&](int thread) {
    const size_t begin = size * static_cast<size_t>(thread) / threads;
    const size_t end = size * static_cast<size_t>(thread + 1) / threads;
    std::memset(data + begin, 0, end - begin);
  });
  buffers_.push_back(std::move(buffer));
  return buffers_.back().data();
}

absl::StatusOr<std::unique_ptr<LinearWeight>> CpuBackend::LoadLinear(const MatrixSource& source) {
  return cpu::LoadLinear(context_, source);
}

absl::StatusOr<std::unique_ptr<ResidentExperts>> CpuBackend::MakeResidentExperts(
    const ResidentShape& shape) {
  return cpu::CpuResidentExperts::Create(context_, shape);
}

void CpuBackend::GraphBegin(const GraphKey&) {}
void CpuBackend::GraphEnd() {}
void CpuBackend::RecordEvent(Stream, int) {}
void CpuBackend::WaitEvent(Stream, int) {}
void CpuBackend::Stamp(int64_t* device_ns) { *device_ns = SteadyClock().NowNs(); }

absl::Status CpuBackend::Synchronize() {
  LinkError first = LinkError::kNone;
  for (size_t i = 0; i < link_count_ && first == LinkError::kNone; ++i) first = links_[i]->error();
  link_count_ = 0;
  if (!stream_error_.ok()) return std::exchange(stream_error_, absl::OkStatus());
  return LinkStatus(first);
}

void CpuBackend::CopyToDevice(void* device, const void* host, size_t bytes) {
  if (bytes > 0) std::memcpy(device, host, bytes);
}

void CpuBackend::CopyToHost(void* host, const void* device, size_t bytes) {
  if (bytes > 0) std::memcpy(host, device, bytes);
}

void CpuBackend::CopyRunsToHost(const RunsToHostArgs& args) {
  for (size_t i = 0; i < args.count; ++i) {
    CopyToHost(static_cast<char*>(args.host) + i * args.stride_bytes,
               static_cast<const char*>(args.device) + i * args.stride_bytes, args.run_bytes);
  }
}

void CpuBackend::ExpertSubmit(const ExpertSubmitArgs& args) {
  TANDEM_DCHECK(args.link->threads() == threads());
  TANDEM_DCHECK(args.x.ld == args.link->limits().hidden);
  const auto end = links_.begin() + static_cast<std::ptrdiff_t>(link_count_);
  if (std::find(links_.begin(), end, args.link) == end) {
    TANDEM_CHECK(link_count_ < kMaxLinks);
    links_[link_count_++] = args.link;
  }
  const Submission submission = SubmissionOf(args);
  context_.pool.Run([&](int thread) { args.link->Submit(submission, thread, threads()); });
}

void CpuBackend::ExpertWait(const ExpertWaitArgs& args) {
  TANDEM_DCHECK(args.out.ld == args.link->limits().hidden);
  const Collection collection = CollectionOf(args);
  context_.pool.Run([&](int thread) { args.link->Wait(collection, thread, threads()); });
}

void CpuBackend::Embed(const EmbedArgs& args) { cpu::Embed(context_, args); }
void CpuBackend::RmsNorm(const RmsNormArgs& args) { cpu::RmsNorm(context_, args); }
void CpuBackend::Linear(const LinearArgs& args) { cpu::Linear(context_, args); }
void CpuBackend::HeadLinear(const HeadLinearArgs& args) { cpu::HeadLinear(context_, args); }
void CpuBackend::RopeAngles(const RopeAnglesArgs& args) { cpu::RopeAngles(context_, args); }
void CpuBackend::Rope(const RopeArgs& args) { cpu::Rope(context_, args); }
void CpuBackend::CacheWrite(const CacheWriteArgs& args) { cpu::CacheWrite(context_, args); }
void CpuBackend::Attention(const AttentionArgs& args) { cpu::Attention(context_, args); }
void CpuBackend::LatentAttention(const LatentAttentionArgs& args) {
  cpu::LatentAttention(context_, args);
}
void CpuBackend::SiluMul(const SiluMulArgs& args) { cpu::SiluMul(context_, args); }
void CpuBackend::Add(const AddArgs& args) { cpu::Add(context_, args); }
void CpuBackend::Router(const RouterArgs& args) { cpu::Router(context_, args); }
void CpuBackend::SplitPicks(const SplitPicksArgs& args) { cpu::SplitPicks(context_, args); }
void CpuBackend::StreamExperts(const StreamExpertsArgs& args) {
  Stamp(args.begin_ns);
  for (int i = 0; i < args.count && stream_error_.ok(); ++i) {
    absl::Status status = args.source->Read(args.layer, args.ids[i], &streamed_);
    if (status.ok()) status = args.experts->Write(args.first_slot + i, args.layer, streamed_);
    if (!status.ok()) stream_error_ = std::move(status);
  }
  Stamp(args.end_ns);
}

void CpuBackend::RunResidentExperts(const ResidentExpertsArgs& args) {
  cpu::RunResidentExperts(context_, args);
}
void CpuBackend::GatherRows(const GatherRowsArgs& args) { cpu::GatherRows(context_, args); }
void CpuBackend::Sample(const SampleArgs& args) { cpu::Sample(context_, args); }
void CpuBackend::Logprobs(const LogprobsArgs& args) { cpu::Logprobs(context_, args); }
void CpuBackend::CopyBlocks(const BlockCopyArgs& args) { cpu::CopyBlocks(context_, args); }

}  // namespace tandem::gpu
