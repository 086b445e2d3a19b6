#pragma once

// Routed experts in device memory: slots, each of which holds one expert of any layer. A backend
// makes them (Backend::MakeResidentExperts) and computes with them (Backend::RunResidentExperts);
// which expert lies in which slot is device memory that changes between steps (hot_experts/).
//
// Thread safety: Write by any thread at any time, a slot by one at a time; the rest is constant.
// Ownership: slots live in the backend's memory, which must outlive them.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/tensor/expert_weights.h"

namespace tandem::gpu {

struct ResidentShape {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int top_k = 0;
  std::vector<LayerFormat> formats;  // by layer of the model; those without experts mean nothing
  std::vector<uint8_t> has_experts;  // by layer of the model
  bool biases = false;
  // limit 0: silu(g) * u; else min(g, limit) / (1 + exp(-alpha g)) * (u held to +-limit + offset).
  float activation_limit = 0;
  float activation_alpha = 1;
  float activation_up_offset = 0;
  // As many slots as the budget holds, at most max_slots.
  uint64_t budget_bytes = 0;
  int max_slots = 0;
};

class ResidentExperts {
 public:
  virtual ~ResidentExperts() = default;

  virtual int slots() const = 0;
  virtual uint64_t slot_bytes() const = 0;
  // Returns when the expert is in the slot. REQUIRES: no op that was enqueued reads the slot, nor
  // any that is enqueued before Write has returned; `expert` is of the layer's format and shape.
  virtual absl::Status Write(int slot, int layer, const CanonicalExpert& expert) = 0;
};

// Where copies of routed experts come from: this process's own store, or those of expert workers.
class ExpertWeightSource {
 public:
  virtual ~ExpertWeightSource() = default;

  // An expert of a layer of the model, in canonical form; `out` is overwritten, its memory reused.
  // Any thread. UNAVAILABLE while a worker that holds a part of it is lost.
  virtual absl::Status Read(int layer, int expert, CanonicalExpert* out) = 0;
  // False: Read fails, a part is missing. Any thread; takes no lock.
  virtual bool available() const = 0;
};

// What a step reads: the slots, and where each expert lies.
struct Residents {
  ResidentExperts* experts = nullptr;
  // Device [MoE layers, experts]: slot, or kNoExpert. Null: no expert is ever resident.
  const uint16_t* slot_of_expert = nullptr;
};

}  // namespace tandem::gpu
