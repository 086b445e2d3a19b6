#include "gpu_worker/hot_experts/expert_stream.h"

#include <algorithm>
#include <numeric>

#include "common/base/check.h"
#include "common/base/status.h"

namespace tandem::gpu {
namespace {

// Events: a layer slot's copies are there; its experts are not needed any more.
constexpr int kCopied = 0;
constexpr int kRead = kCopied + ExpertStream::kRingLayers;

}  // namespace

absl::StatusOr<std::unique_ptr<ExpertStream>> ExpertStream::Create(Backend& backend,
                                                                   ResidentExperts& experts,
                                                                   ExpertWeightSource& source,
                                                                   const Options& options) {
  TANDEM_CHECK(options.layer_slots > 0 && options.layer_slots <= options.experts);
  TANDEM_CHECK(options.first_slot + kRingLayers * options.layer_slots <= experts.slots());
  std::unique_ptr<ExpertStream> stream(new ExpertStream(backend, experts, source, options));
  const size_t layers = options.moe_layers.size();
  ASSIGN_OR_RETURN(void* table, backend.Allocate(stream->table_.size() * sizeof(uint16_t)));
  ASSIGN_OR_RETURN(void* stamps, backend.Allocate(layers * sizeof(Stamps)));
  stream->residents_ = {.experts = &experts, .slot_of_expert = static_cast<uint16_t*>(table)};
  stream->stamps_ = static_cast<Stamps*>(stamps);
  return stream;
}

ExpertStream::ExpertStream(Backend& backend, ResidentExperts& experts, ExpertWeightSource& source,
                           const Options& options)
    : backend_(backend),
      experts_(experts),
      source_(source),
      options_(options),
      planner_({.experts = options.experts,
                .max_streamed = options.layer_slots,
                .fixed = options.fixed}) {
  const size_t layers = options.moe_layers.size();
  table_.resize(layers * static_cast<size_t>(options.experts));
  chosen_.resize(layers * static_cast<size_t>(options.layer_slots));
  counts_.resize(layers);
  order_.reserve(static_cast<size_t>(options.experts));
  stamps_host_.resize(layers);
}

int ExpertStream::FirstSlot(int moe_layer) const {
  return options_.first_slot + moe_layer % kRingLayers * options_.layer_slots;
}

bool ExpertStream::Begin(int rows, std::span<const uint16_t> table, const ExpertCounts& counts) {
  streamed_ = planner_.Choose(rows);
  if (streamed_ == 0) return false;
  TANDEM_DCHECK(table.size() == table_.size());
  std::copy(table.begin(), table.end(), table_.begin());
  const auto layers = static_cast<int>(options_.moe_layers.size());
  for (int layer = 0; layer < layers; ++layer) ChooseExperts(layer, counts);
  backend_.CopyToDevice(const_cast<uint16_t*>(residents_.slot_of_expert), table_.data(),
                        table_.size() * sizeof(uint16_t));
  EnqueueCopies(0);
  return true;
}

void ExpertStream::ChooseExperts(int moe_layer, const ExpertCounts& counts) {
  const auto first = static_cast<size_t>(moe_layer) * static_cast<size_t>(options_.experts);
  uint16_t* const slots = table_.data() + first;
  const float* const picks = counts.values().data() + first;
  order_.clear();
  for (uint16_t e = 0; e < options_.experts; ++e) {
    if (slots[e] == kNoExpert) order_.push_back(e);
  }
  const size_t count = std::min(order_.size(), static_cast<size_t>(streamed_));
  std::partial_sort(order_.begin(), order_.begin() + static_cast<ptrdiff_t>(count), order_.end(),
                    [picks](uint16_t a, uint16_t b) {
                      return picks[a] != picks[b] ? picks[a] > picks[b] : a < b;
                    });
  uint16_t* const chosen =
      chosen_.data() + static_cast<size_t>(moe_layer) * static_cast<size_t>(options_.layer_slots);
  for (size_t i = 0; i < count; ++i) {
    chosen[i] = order_[i];
    slots[order_[i]] = static_cast<uint16_t>(FirstSlot(moe_layer) + static_cast<int>(i));
  }
  counts_[static_cast<size_t>(moe_layer)] = static_cast<int>(count);
}

void ExpertStream::EnqueueCopies(int moe_layer) {
  const auto layer = static_cast<size_t>(moe_layer);
  backend_.WaitEvent(Stream::kCopy, kRead + moe_layer % kRingLayers);
  backend_.StreamExperts({.experts = &experts_,
                          .source = &source_,
                          .layer = options_.moe_layers[layer],
                          .first_slot = FirstSlot(moe_layer),
                          .ids = chosen_.data() + layer * static_cast<size_t>(options_.layer_slots),
                          .count = counts_[layer],
                          .begin_ns = &stamps_[layer].copy_begin,
                          .end_ns = &stamps_[layer].copy_end});
  backend_.RecordEvent(Stream::kCopy, kCopied + moe_layer % kRingLayers);
}

void ExpertStream::BeginLayer(int moe_layer) {
  moe_layer_ = moe_layer;
  waited_ = false;
  if (moe_layer + 1 < static_cast<int>(counts_.size())) EnqueueCopies(moe_layer + 1);
}

// Once a layer: the stream's later ops are behind it, those of the other lane too.
void ExpertStream::WaitForLayer() {
  if (waited_) return;
  waited_ = true;
  Stamps& stamps = stamps_[moe_layer_];
  backend_.Stamp(&stamps.wait_begin);
  backend_.WaitEvent(Stream::kCompute, kCopied + moe_layer_ % kRingLayers);
  backend_.Stamp(&stamps.wait_end);
}

void ExpertStream::EndLayer() {
  backend_.RecordEvent(Stream::kCompute, kRead + moe_layer_ % kRingLayers);
}

void ExpertStream::Download() {
  backend_.CopyToHost(stamps_host_.data(), stamps_, stamps_host_.size() * sizeof(Stamps));
}

ExpertStream::LayerCopies ExpertStream::copies(size_t moe_layer) const {
  const Stamps& at = stamps_host_[moe_layer];
  const int experts = counts_[moe_layer];
  return {.experts = experts,
          .bytes = static_cast<uint64_t>(experts) * experts_.slot_bytes(),
          .copy_begin = at.copy_begin,
          .copy_end = at.copy_end,
          .wait_begin = at.wait_begin,
          .wait_end = at.wait_end};
}

void ExpertStream::Observe(StreamingTimes times) {
  times.streamed = streamed_;
  if (streamed_ > 0) {
    int64_t copy_ns = 0;
    int64_t wait_ns = 0;
    for (const Stamps& layer : stamps_host_) {
      copy_ns += std::max<int64_t>(layer.copy_end - layer.copy_begin, 0);
      wait_ns += std::max<int64_t>(layer.wait_end - layer.wait_begin, 0);
    }
    const auto layers = static_cast<double>(stamps_host_.size());
    times.copy_ns = static_cast<double>(copy_ns) / layers;
    // Standing still for copies is not what the device needs for experts.
    times.device_ns = std::max(times.device_ns - static_cast<double>(wait_ns) / layers, 0.0);
  }
  planner_.Observe(times);
}

}  // namespace tandem::gpu
