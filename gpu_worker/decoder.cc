#include "gpu_worker/decoder.h"

#include <algorithm>
#include <bit>

#include "common/base/check.h"
#include "common/base/status.h"

namespace tandem::gpu {

int BucketOf(int rows, int max_rows) {
  const auto bucket = static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::max(rows, 1))));
  return std::min(bucket, max_rows);
}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create(Backend& backend, const ModelSpec& spec,
                                                         const ModelWeights& weights,
                                                         const KvCache& cache,
                                                         const DecoderOptions& options) {
  TANDEM_CHECK(options.buffer_rows > 0 && options.head_rows > 0);
  TANDEM_CHECK(weights.layers.size() == spec.layers.size());
  std::unique_ptr<Decoder> decoder(new Decoder(backend, spec, weights, options));
  ASSIGN_OR_RETURN(decoder->act_,
                   Activations::Create(backend, spec, options.buffer_rows, options.head_rows));
  ASSIGN_OR_RETURN(decoder->picks_, MakePicks(backend, spec, options.buffer_rows, options.split,
                                              decoder->act_.bytes));
  decoder->pipeline_ = std::make_unique<Pipeline>(
      Pipeline::Parts{backend, spec, weights, cache, decoder->act_, decoder->picks_});
  return decoder;
}

void Decoder::set_tap(DecoderTap* tap) {
  tap_ = tap;
  pipeline_->set_tap(tap);
}

Matrix Decoder::EnqueueHead(Rows rows, const int32_t* indices) {
  TANDEM_DCHECK(rows.bound <= options_.head_rows);
  backend_.GatherRows({.rows = rows,
                       .x = act_.hidden,
                       .indices = indices,
                       .out = act_.head_hidden,
                       .width = spec_.hidden});
  backend_.RmsNorm({.rows = rows,
                    .x = act_.head_hidden,
                    .out = act_.head_hidden,
                    .weight = weights_.final_norm,
                    .width = spec_.hidden,
                    .eps = spec_.norm_eps});
  backend_.Linear({.rows = rows,
                   .weight = weights_.head.weight.get(),
                   .bias = weights_.head.bias,
                   .x = act_.head_hidden,
                   .y = act_.logits});
  if (tap_ != nullptr) tap_->OnLogits(indices, rows.count, act_.logits);
  return act_.logits;
}

}  // namespace tandem::gpu
