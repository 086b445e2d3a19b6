#pragma once

// What families share: bounds of every dimension, hub defaults, and the tensor names that nearly
// all checkpoints use ("model.layers.N.self_attn.q_proj.weight").

#include <string>
#include <string_view>

#include "common/model/hub_config.h"
#include "common/model/model_spec.h"

namespace tandem {

inline constexpr IntBounds kDimBounds{.min = 1, .max = 1 << 20};
inline constexpr IntBounds kHeadBounds{.min = 1, .max = 4096};
// Expert ids are u16 with 0xFFFF for "none".
inline constexpr IntBounds kExpertBounds{.min = 1, .max = 0xFFFE};

// Sizes, norm epsilon, activation (silu only), context length, names outside the layers, and
// `layers` with their norms. `eps_absent`: the family's rms_norm_eps.
void FillDecoder(HubConfig& config, float eps_absent, ModelSpec& spec);

struct GqaOptions {
  double theta_absent = 10000;
  bool qkv_bias = false;
  bool o_bias = false;
  bool qk_norm = false;
};
// Grouped-query attention with half-split RoPE over the whole head.
void FillGqa(HubConfig& config, const GqaOptions& options, ModelSpec& spec);

// Names of a SwiGLU under `prefix` ("model.layers.0.mlp"); `bias` for all three.
MlpNames SwigluNames(const std::string& prefix, bool bias);
LinearNames Linear(const std::string& module, bool bias);

// Makes layer `n` a dense one of that width.
void FillDenseLayer(int n, int intermediate, bool bias, ModelSpec& spec);

// Names of the routed experts' parts and of the router below "model.layers.N.".
struct MoeNames {
  std::string_view block = "mlp";
  std::string_view gate = "gate_proj";
  std::string_view up = "up_proj";
  std::string_view down = "down_proj";
};
// Makes layer `n` an MoE one; the selection bias's name where the router has one.
void FillMoeLayer(int n, const MoeNames& names, ModelSpec& spec);

// Counts that must agree: top_k <= experts, groups divide them, and their number is not absurd.
void CheckMoe(HubConfig& config, const ModelSpec& spec);

std::string LayerPrefix(int n);  // "model.layers.N."

}  // namespace tandem
