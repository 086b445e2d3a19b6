// Feeds a whole GGUF file to all that reads one: the container, its key/values as a model's config,
// its tensors as that model's weights, its tokenizer.
//
// Run: gguf_model_fuzz -runs=100000 -max_len=4096

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/base/check.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/model/model_loader.h"
#include "common/model/model_tensors.h"
#include "gateway/gguf_tokenizer.h"
#include "tests/testing/temp_dir.h"

namespace {

// Every matrix, a row at a time.
void ReadWeights(const tandem::Checkpoint& checkpoint, const tandem::ModelSpec& spec) {
  for (const tandem::RequiredTensor& need : tandem::RequiredTensors(spec)) {
    if (need.role == tandem::TensorRole::kVector) continue;
    const auto matrix = tandem::WeightMatrix::Create(checkpoint, need.name, need.shape[0],
                                                     need.shape[1], spec.quant);
    TANDEM_CHECK(matrix.ok());
    std::vector<float> row(static_cast<size_t>(matrix->cols()));
    for (int64_t i = 0; i < matrix->rows(); ++i) {
      if (!matrix->ReadF32({i, i + 1}, {0, matrix->cols()}, row).ok()) break;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const tandem::testing::TempDir dir;
  const auto path =
      dir.Write("model.gguf", std::string_view(reinterpret_cast<const char*>(data), size));
  const auto checkpoint = tandem::Checkpoint::Open(path);
  if (!checkpoint.ok()) {
    TANDEM_CHECK(!checkpoint.status().message().empty());
    return 0;
  }
  const auto tokenizer = tandem::gateway::ReadGgufTokenizer(*(*checkpoint)->gguf());
  TANDEM_CHECK(tokenizer.ok() || !tokenizer.status().message().empty());
  const auto spec = tandem::LoadModelSpec(**checkpoint);
  if (spec.ok()) ReadWeights(**checkpoint, *spec);
  return 0;
}
