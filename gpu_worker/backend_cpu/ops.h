#pragma once

// The ops of backend.h as functions of the CPU backend, a file a group. Each runs to its end before
// it returns. Shapes and pointers are the caller's contract (DCHECK).

#include "gpu_worker/backend.h"
#include "gpu_worker/backend_cpu/op_context.h"

namespace tandem::gpu::cpu {

// elementwise.cc
void Embed(OpContext& context, const EmbedArgs& args);
void SiluMul(OpContext& context, const SiluMulArgs& args);
void Add(OpContext& context, const AddArgs& args);
void GatherRows(OpContext& context, const GatherRowsArgs& args);
// norms.cc
void RmsNorm(OpContext& context, const RmsNormArgs& args);
// rope.cc
void RopeAngles(OpContext& context, const RopeAnglesArgs& args);
void Rope(OpContext& context, const RopeArgs& args);
// cache.cc
void CacheWrite(OpContext& context, const CacheWriteArgs& args);
void CopyBlocks(OpContext& context, const BlockCopyArgs& args);
// attention.cc, latent_attention.cc
void Attention(OpContext& context, const AttentionArgs& args);
void LatentAttention(OpContext& context, const LatentAttentionArgs& args);
// router.cc
void Router(OpContext& context, const RouterArgs& args);
// picks.cc
void SplitPicks(OpContext& context, const SplitPicksArgs& args);
// sampler.cc, logprobs.cc
void Sample(OpContext& context, const SampleArgs& args);
void Logprobs(OpContext& context, const LogprobsArgs& args);

}  // namespace tandem::gpu::cpu
