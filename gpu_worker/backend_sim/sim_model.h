#pragma once

// Models whose sizes a simulated device charges for, each beside a small model of the same graph
// whose tensors are really computed: as many layers, experts, picks and the same attention, router
// and shared experts, but narrow matrices. SimShape says which width of the big model a width of
// the small one stands for.
//
// Thread safety: immutable. Errors: those of ModelSpecFromJson; FAILED_PRECONDITION where the two
// specs are not one graph, or a small width stands for two big ones.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/model_spec.h"

namespace tandem::gpu {

// Bytes of one parameter as it lies in memory, scales included.
struct SimWeightBytes {
  double experts = 0;
  double dense = 2;  // attention, shared experts, dense MLPs, router
  double head = 2;
};

struct SimModel {
  std::string_view name;
  std::string_view config;  // what the model's config.json says of its shape
  std::string_view small;   // keys that the computed model has other values for
  SimWeightBytes bytes;
  int layers = 0;  // 0: as many as the config says; else so many, with its share of dense ones
};

std::span<const SimModel> SimModels();
// Null for an unknown name.
const SimModel* FindSimModel(std::string_view name);

// config.json of the described and of the computed model.
nlohmann::json BigConfig(const SimModel& model);
nlohmann::json SmallConfig(const SimModel& model);

struct SimShape {
  ModelSpec small;
  ModelSpec big;
  SimWeightBytes bytes;
  // Tokens that each sequence is charged for besides those it has: a long context need not be
  // computed.
  int context_offset = 0;

  // The big model's width for one of the small model's. REQUIRES: one of its widths.
  int64_t Width(int64_t small_width) const;
  // The big model's heads for `groups` vectors of the small one: 1 stays 1.
  int64_t Groups(int64_t small_groups) const;

  double expert_bytes() const;     // of the three matrices of one routed expert
  double expert_flops() const;     // of one row through one routed expert
  int64_t cached_width() const;    // numbers that a token keeps in one layer
  double attention_flops() const;  // of one query with one key, all heads
  std::vector<std::pair<int64_t, int64_t>> widths = {};  // (small, big), by small
};

absl::StatusOr<SimShape> MakeSimShape(const ModelSpec& small, const ModelSpec& big,
                                      const SimWeightBytes& bytes);
absl::StatusOr<SimShape> MakeSimShape(const SimModel& model);

}  // namespace tandem::gpu
