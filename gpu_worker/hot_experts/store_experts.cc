#include "gpu_worker/hot_experts/store_experts.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "expert_worker/engine/store_unpack.h"

namespace tandem::gpu {

StoreExperts::StoreExperts(std::vector<expert::StoreSpec> specs)
    : specs_(std::move(specs)), stores_(specs_.size()), missing_(specs_.size()) {
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
  const std::lock_guard lock(mutex_);
  std::swap(stores_[worker], store);
  missing_ = static_cast<size_t>(std::count(stores_.begin(), stores_.end(), nullptr));
}

size_t StoreExperts::first_missing() const {
  const auto missing = std::find(stores_.begin(), stores_.end(), nullptr);
  return static_cast<size_t>(missing - stores_.begin());
}

absl::Status StoreExperts::Read(int layer, int expert, CanonicalExpert* out) {
  std::vector<std::shared_ptr<const expert::WeightStore>> held;
  {
    const std::lock_guard lock(mutex_);
    held = stores_;
  }
  std::vector<const expert::WeightStore*> stores;
  for (const auto& store : held) {
    if (store == nullptr) {
      return absl::UnavailableError(
          absl::StrCat("expert worker ", stores.size(), " has handed over no weights"));
    }
    stores.push_back(store.get());
  }
  RETURN_IF_ERROR(expert::CheckComplete(stores));
  expert::UnpackExpert(stores, static_cast<uint32_t>(layer), static_cast<uint32_t>(expert), out);
  return absl::OkStatus();
}

}  // namespace tandem::gpu
