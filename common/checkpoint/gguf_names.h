#pragma once

// GGUF tensors under the names that hub checkpoints give them, so that families, expert tensors and
// weight matrices work on either. The experts of a layer, one tensor [experts, rows, columns] in
// GGUF, become a matrix each; the rows of llama's q and k, which its converter reorders so that
// RoPE's pairs lie side by side, are readdressed.
//
// An architecture is one line of kArchitectures (gguf_names.cc) and a translation of its keys
// (common/model/gguf_config.h). A tensor whose name the architecture does not know is refused:
// nobody would compute with it.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/gguf.h"

namespace tandem {

// RoPE's frequencies are divided by its elements (llama3 scaling); keeps its name.
inline constexpr std::string_view kGgufRopeFactors = "rope_freqs.weight";

struct GgufArchitecture {
  std::string_view name;            // general.architecture
  std::string_view model_type;      // config.json's, of the same model
  std::string_view moe_block;       // below "model.layers.N."
  std::string_view gate, up, down;  // parts of a routed expert
  bool has_experts = false;         // "llama" is one thing with experts, another without
  bool paired_rows = false;         // q and k are reordered
};

// Errors name the file and the key; an unknown architecture's lists the known ones.
absl::StatusOr<const GgufArchitecture*> ArchitectureOf(const GgufModel& model);

struct HubTensor {
  std::string name;
  const GgufTensor* tensor = nullptr;
  int64_t first_row = 0;  // of the matrix within the tensor
  int rank = 0;
  int64_t rows = 0;         // of a matrix; 1 of a vector
  int64_t paired_rows = 0;  // rows of a head whose row order PairedRow gives; 0: in order
};

absl::StatusOr<std::vector<HubTensor>> TranslateTensors(const GgufModel& model);

// Where row `row` lies in the file: rows (t, j), t = 0 or 1, j < head_rows / 2, of each head are
// stored as (j, t).
constexpr int64_t PairedRow(int64_t row, int64_t head_rows) {
  if (head_rows == 0) return row;
  const int64_t inside = row % head_rows;
  const int64_t half = head_rows / 2;
  return row - inside + 2 * (inside % half) + inside / half;
}

// Dimensions of an attention head: `ARCH.attention.key_length`, or embedding length over heads.
absl::StatusOr<int64_t> GgufHeadDim(const GgufModel& model, std::string_view architecture);

}  // namespace tandem
