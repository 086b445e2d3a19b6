#include "gpu_worker/hot_experts/store_experts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "expert_worker/engine/store_unpack.h"

namespace tandem::gpu {

StoreExperts::StoreExperts(std::vector<expert::StoreSpec> specs)
    : specs_(std::move(specs)), snapshot_(MakeSnapshot(Stores(specs_.size()))) {
  TANDEM_CHECK(!specs_.empty());
}

ResidentShape StoreExperts::Shape(int top_k) const {
  const expert::StoreSpec& spec = specs_[0];
  ResidentShape shape;
  shape.hidden = spec.hidden;
  shape.intermediate = spec.intermediate;
  shape.top_k = top_k;
  shape.formats.resize(spec.layers);
  shape.has_experts.resize(spec.layers);
  for (size_t i = 0; i < spec.moe_layers.size(); ++i) {
    shape.formats[spec.moe_layers[i]] = spec.formats[spec.formats.size() == 1 ? 0 : i];
    shape.has_experts[spec.moe_layers[i]] = 1;
  }
  shape.biases = spec.biases;
  shape.activation_limit = spec.activation.limit;
  shape.activation_alpha = spec.activation.alpha;
  shape.activation_up_offset = spec.activation.up_offset;
  return shape;
}

absl::Status StoreExperts::Attach(size_t worker, int fd) {
  ASSIGN_OR_RETURN(std::shared_ptr<const expert::WeightStore> store,
                   expert::WeightStore::AttachSealed(fd, specs_[worker]));
  Set(worker, std::move(store));
  return absl::OkStatus();
}

void StoreExperts::Set(size_t worker, std::shared_ptr<const expert::WeightStore> store) {
  std::shared_ptr<const Snapshot> snapshot;  // the old one is freed without the lock
  const std::lock_guard lock(mutex_);
  Stores stores = snapshot_->held;
  stores[worker] = std::move(store);
  snapshot = std::exchange(snapshot_, MakeSnapshot(std::move(stores)));
  available_ = snapshot_->status.ok();
}

std::shared_ptr<const StoreExperts::Snapshot> StoreExperts::MakeSnapshot(Stores stores) {
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->held = std::move(stores);
  for (const auto& store : snapshot->held) {
    if (store == nullptr) {
      snapshot->status = absl::UnavailableError(
          absl::StrCat("expert worker ", snapshot->stores.size(), " has handed over no weights"));
      return snapshot;
    }
    snapshot->stores.push_back(store.get());
  }
  snapshot->status = expert::CheckComplete(snapshot->stores);
  return snapshot;
}

std::shared_ptr<const StoreExperts::Snapshot> StoreExperts::snapshot() const {
  const std::lock_guard lock(mutex_);
  return snapshot_;
}

size_t StoreExperts::first_missing() const { return snapshot()->stores.size(); }

absl::Status StoreExperts::Read(int layer, int expert, CanonicalExpert* out) {
  const std::shared_ptr<const Snapshot> now = snapshot();
  RETURN_IF_ERROR(now->status);
  expert::UnpackExpert(now->stores, static_cast<uint32_t>(layer), static_cast<uint32_t>(expert),
                       out);
  return absl::OkStatus();
}

}  // namespace tandem::gpu
