#pragma once

// Rotary tables from a config: inverse frequencies with their scaling applied, computed in double
// and rounded once to F32.
//   plain:  inv_j = theta^(-2j/r), j = 0 .. r/2-1
//   linear: inv / f
//   llama3: by wavelength, between inv / f and inv
//   yarn:   by dimension, between inv / f and inv ("YaRN", arXiv 2309.00071; section 1.2 of the
//           notes), cos and sin times an attention factor
// Spellings: rope_scaling{type|rope_type} with rope_theta beside it, or rope_parameters{...}.

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/hub_config.h"
#include "common/model/model_spec.h"

namespace tandem {

enum class RopeType : uint8_t { kPlain, kLinear, kLlama3, kYarn };

struct RopeConfig {
  RopeType type = RopeType::kPlain;
  double theta = 10000;
  double factor = 1;
  double original_context = 0;  // L0
  // llama3
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  // yarn
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 0;          // 0: not given
  double mscale_all_dim = 0;  // 0: not given
  bool truncate = true;
  std::optional<double> attention_factor;
};

struct RopeTable {
  std::vector<float> inv_freq;  // [rotary_dims / 2]
  float attention_factor = 1;   // multiplies cos and sin
};

// Reads a config's rope keys. `theta_absent` is the family's default. Errors go to `config`.
RopeConfig ReadRopeConfig(HubConfig& config, double theta_absent);

// REQUIRES: rotary_dims is even and positive.
RopeTable MakeRopeTable(const RopeConfig& rope, int rotary_dims);

// YaRN's m(f, a): 1 where f <= 1, else 0.1 a ln f + 1.
double YarnMscale(double factor, double scale);

// What DeepSeek's family multiplies its softmax scale by: m(f, mscale_all_dim)^2, or 1.
double YarnSoftmaxFactor(const RopeConfig& rope);

// The longest context: what the config says, or what YaRN extends the original one to where that is
// more (Qwen3's recipe adds rope_scaling without touching max_position_embeddings).
int ContextTokens(const RopeConfig& rope, int max_position_embeddings);

}  // namespace tandem
