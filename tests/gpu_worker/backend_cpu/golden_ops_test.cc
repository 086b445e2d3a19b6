// The ops against golden/ops: inputs F32, outputs computed in F64 by an independent program.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/gpu_worker/backend_cpu/op_test.h"

namespace tandem::gpu {
namespace {

constexpr double kTolerance = 2e-6;  // golden/README.md

class GoldenOpsTest : public ::testing::TestWithParam<BackendConfig> {
 protected:
  // Opens golden/ops/`name` or skips the test.
  bool Open(const char* name) {
    golden_ = Golden::Open(name);
    return golden_.has_value();
  }
  std::vector<float> F32(const std::string& name) const { return golden_->F32(name); }

  std::optional<Golden> golden_;
  std::unique_ptr<CpuBackend> backend_ = MakeBackend(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, GoldenOpsTest, ::testing::ValuesIn(AllConfigs()), ConfigName);

#define OPEN_OR_SKIP(name) \
  if (!Open(name)) GTEST_SKIP() << "no golden/ops/" name ".safetensors"

TEST_P(GoldenOpsTest, Norms) {
  OPEN_OR_SKIP("norms");
  const std::vector<float> x = F32("x");
  std::vector<float> weight = F32("weight");
  const auto run = [&](const std::vector<float>& w, int width, float eps) {
    std::vector<float> y(x.size());
    RmsNormArgs args;
    args.rows.bound = 6;
    args.x = AsMatrix(x, 64);
    args.out = AsMatrix(y, 64);
    args.weight = w.data();
    args.width = width;
    args.groups = 64 / width;
    args.eps = eps;
    backend_->RmsNorm(args);
    return y;
  };
  ExpectClose(run(weight, 64, 1e-5f), F32("rms.eps1e-5.y"), kTolerance);
  ExpectClose(run(weight, 64, 1e-6f), F32("rms.eps1e-6.y"), kTolerance);
  ExpectClose(run(std::vector<float>(64, 1.0f), 64, 1e-6f), F32("rms_unweighted.eps1e-6.y"),
              kTolerance);
  std::vector<float> one_plus = F32("weight_zero_centred");
  for (float& w : one_plus) w += 1.0f;
  ExpectClose(run(one_plus, 64, 1e-6f), F32("rms_1_plus_w.eps1e-6.y"), kTolerance);
}

TEST_P(GoldenOpsTest, SwiGlu) {
  OPEN_OR_SKIP("swiglu");
  const std::vector<float> gate = F32("gate"), up = F32("up");
  std::vector<float> y(gate.size());
  backend_->SiluMul({.rows = {.bound = 4},
                     .gate = AsMatrix(gate, 48),
                     .up = AsMatrix(up, 48),
                     .out = AsMatrix(y, 48),
                     .width = 48});
  ExpectClose(y, F32("silu.y"), kTolerance);
}

// Positions go up to 4095, where the F32 angle itself is off by up to 1e-3 (golden/README.md).
TEST_P(GoldenOpsTest, Rope) {
  OPEN_OR_SKIP("rope");
  const std::vector<int32_t> positions = golden_->I32("positions");
  const int rows = static_cast<int>(positions.size());
  for (const std::string name :
       {"llama3_8x", "llama3_32x_d64", "yarn_deepseek_v3", "yarn_gpt_oss", "yarn_kimi_k2",
        "yarn_kimi_k2_thinking", "yarn_qwen3_4x", "yarn_unequal_mscale"}) {
    const std::vector<float> inv_freq = F32(name + ".inv_freq");
    const int half = static_cast<int>(inv_freq.size());
    std::vector<float> angles(static_cast<size_t>(rows * 2 * half));
    backend_->RopeAngles({.rows = {.bound = rows},
                          .positions = positions.data(),
                          .inv_freq = inv_freq.data(),
                          .half = half,
                          .factor = F32(name + ".cos_sin_factor")[0],
                          .out = AsMatrix(angles, 2 * half)});
    for (const bool interleaved : {false, true}) {
      std::vector<float> x = F32(name + ".x");
      RopeArgs args;
      args.rows.bound = rows;
      args.x = AsMatrix(x, 2 * half);
      args.heads = 1;
      args.head_stride = 2 * half;
      args.half = half;
      args.interleaved = interleaved;
      args.angles = AsMatrix(angles, 2 * half);
      backend_->Rope(args);
      const std::vector<float> y = F32(name + (interleaved ? ".y_interleaved" : ".y_half"));
      ASSERT_EQ(x.size(), y.size());
      for (size_t i = 0; i < x.size(); ++i) {
        const int32_t position = positions[i / (2 * half)];
        ASSERT_NEAR(x[i], y[i], position < 16 ? 4e-6 : 1e-3 * 3) << name << " " << i;
      }
    }
  }
}

TEST_P(GoldenOpsTest, RopeLayouts) {
  OPEN_OR_SKIP("rope");
  const std::vector<int32_t> positions = golden_->I32("positions");
  struct Case {
    const char* name;
    double theta;
    int half, offset;
    bool interleaved;
  };
  for (const Case& c : {Case{"half.theta1e6.y", 1e6, 8, 0, false},
                        Case{"half_partial8.theta1e4.y", 1e4, 4, 0, false},
                        Case{"interleaved.theta1e4.y", 1e4, 8, 0, true},
                        Case{"interleaved_last8.theta1e4.y", 1e4, 4, 8, true}}) {
    std::vector<float> inv_freq, x = F32("x");
    for (int j = 0; j < c.half; ++j) {
      inv_freq.push_back(static_cast<float>(std::pow(c.theta, -static_cast<double>(j) / c.half)));
    }
    std::vector<float> angles(positions.size() * 2 * c.half);
    backend_->RopeAngles({.rows = {.bound = 10},
                          .positions = positions.data(),
                          .inv_freq = inv_freq.data(),
                          .half = c.half,
                          .out = AsMatrix(angles, 2 * c.half)});
    RopeArgs args;
    args.rows.bound = 10;
    args.x = AsMatrix(x, 32);
    args.heads = 2;
    args.head_stride = 16;
    args.offset = c.offset;
    args.half = c.half;
    args.interleaved = c.interleaved;
    args.angles = AsMatrix(angles, 2 * c.half);
    backend_->Rope(args);
    const std::vector<float> y = F32(c.name);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(x[i], y[i], positions[i / 32] < 16 ? 4e-6 : 1e-3) << c.name << " " << i;
    }
  }
}

TEST_P(GoldenOpsTest, Attention) {
  OPEN_OR_SKIP("attention");
  const int rows = 20;
  const std::vector<float> q = F32("q"), sinks = F32("sinks");
  TestCache cache(
      {.sequences = 2, .blocks_per_sequence = 5, .block_tokens = 6, .k_width = 32, .v_width = 32},
      1);
  cache.Fill(*backend_, 1, F32("k"), F32("v"), rows);
  std::vector<int32_t> positions(rows);
  std::iota(positions.begin(), positions.end(), 0);
  struct Case {
    const char* name;
    float scale;
    int window;
    bool sinks;
  };
  for (const Case& c :
       {Case{"causal.y", 0.25f, 0, false}, Case{"causal_scale0.5.y", 0.5f, 0, false},
        Case{"causal_sinks.y", 0.25f, 0, true}, Case{"window8.y", 0.25f, 8, false},
        Case{"window8_sinks.y", 0.25f, 8, true}}) {
    std::vector<float> out(q.size());
    AttentionArgs args;
    args.rows.bound = rows;
    args.place = cache.Place(std::vector<int32_t>(rows, 1), positions);
    args.cache = cache.cache();
    args.q = AsMatrix(q, 64);
    args.out = AsMatrix(out, 64);
    args.heads = 4;
    args.kv_heads = 2;
    args.head_dim = 16;
    args.scale = c.scale;
    args.window_tokens = c.window;
    args.sinks = c.sinks ? sinks.data() : nullptr;
    backend_->Attention(args);
    SCOPED_TRACE(c.name);
    ExpectClose(out, F32(c.name), kTolerance);
  }
}

// The absorbed form: q_absorbed and the latent cache give out_latent, whose value half of kv_b
// gives y. U_h are the first 16 of each head's 40 rows of kv_b, V_h the last 24.
TEST_P(GoldenOpsTest, Mla) {
  OPEN_OR_SKIP("mla");
  const int rows = 14, heads = 4, latent = 32, rope = 8, nope = 16, v_dim = 24;
  const std::vector<float> c = F32("latent_normed"), k_rope = F32("k_rope_rotated");
  const std::vector<float> kv_b = F32("kv_b_proj"), q_nope = F32("q_nope");
  std::vector<float> cached;
  for (int t = 0; t < rows; ++t) {
    cached.insert(cached.end(), c.begin() + t * latent, c.begin() + (t + 1) * latent);
    cached.insert(cached.end(), k_rope.begin() + t * rope, k_rope.begin() + (t + 1) * rope);
  }
  std::vector<std::unique_ptr<LinearWeight>> up, down;
  for (int h = 0; h < heads; ++h) {
    const float* w = kv_b.data() + h * (nope + v_dim) * latent;
    std::vector<float> transposed(static_cast<size_t>(latent * nope));
    for (int i = 0; i < nope; ++i) {
      for (int j = 0; j < latent; ++j) transposed[j * nope + i] = w[i * latent + j];
    }
    up.push_back(MakeLinear(*backend_, transposed, latent, nope));
    down.push_back(
        MakeLinear(*backend_, {w + nope * latent, w + (nope + v_dim) * latent}, v_dim, latent));
  }
  std::vector<float> q_latent(rows * heads * latent);
  backend_->HeadLinear({.rows = {.bound = rows},
                        .weights = up.data(),
                        .heads = heads,
                        .x = AsMatrix(q_nope, heads * nope),
                        .x_head_stride = nope,
                        .y = AsMatrix(q_latent, heads * latent),
                        .y_head_stride = latent});
  ExpectClose(q_latent, F32("q_absorbed"), kTolerance);

  TestCache cache(
      {.sequences = 2, .blocks_per_sequence = 4, .block_tokens = 4, .k_width = latent + rope}, 1);
  cache.Fill(*backend_, 1, cached, {}, rows);
  std::vector<int32_t> positions(rows);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<float> q_rope = F32("q_rope_rotated");
  std::vector<float> out(rows * heads * latent);
  LatentAttentionArgs args;
  args.rows.bound = rows;
  args.place = cache.Place(std::vector<int32_t>(rows, 1), positions);
  args.cache = cache.cache();
  args.q_latent = AsMatrix(q_latent, heads * latent);
  args.q_rope = AsMatrix(q_rope, heads * rope);
  args.q_rope_head_stride = rope;
  args.out = AsMatrix(out, heads * latent);
  args.heads = heads;
  args.latent_dim = latent;
  args.rope_dim = rope;
  args.scale = F32("softmax_scale")[0];
  backend_->LatentAttention(args);
  ExpectClose(out, F32("out_latent"), kTolerance);

  std::vector<float> y(rows * heads * v_dim);
  backend_->HeadLinear({.rows = {.bound = rows},
                        .weights = down.data(),
                        .heads = heads,
                        .x = AsMatrix(out, heads * latent),
                        .x_head_stride = latent,
                        .y = AsMatrix(y, heads * v_dim),
                        .y_head_stride = v_dim});
  ExpectClose(y, F32("y"), kTolerance);
}

struct RouterCase {
  const char* name;
  RouterArgs args;
};

std::vector<RouterCase> RouterCases() {
  const auto make = [](const char* name, auto set) {
    RouterCase c{name, {}};
    c.args.top_k = 4;
    set(c.args);
    return c;
  };
  const auto deepseek = [](RouterArgs& a) {
    a.sigmoid = true;
    a.renormalize_eps = 1e-20f;
    a.factor = 2.5f;
  };
  return {
      make("softmax_k4", [](RouterArgs& a) { a.renormalize = false; }),
      make("softmax_k4_renorm", [](RouterArgs&) {}),
      make("topk_then_softmax_k4", [](RouterArgs&) {}),  // the same as renormalizing
      make("softmax_groupmax4keep2_k4_x16",
           [](RouterArgs& a) {
             a.groups = 4;
             a.groups_kept = 2;
             a.group_score_max = true;
             a.renormalize = false;
             a.factor = 16;
           }),
      make("sigmoid_top1",
           [](RouterArgs& a) {
             a.sigmoid = true;
             a.top_k = 1;
             a.renormalize = false;
           }),
      make("sigmoid_bias_k4_renorm_x2.5", deepseek),
      make("sigmoid_bias_groups4keep2_fill_neginf_k4_renorm_x2.5",
           [&](RouterArgs& a) {
             deepseek(a);
             a.groups = 4;
             a.groups_kept = 2;
           }),
  };
}

TEST_P(GoldenOpsTest, Routers) {
  OPEN_OR_SKIP("routers");
  const int rows = 40, experts = 16;
  const std::vector<float> logits = F32("logits");
  const std::vector<float> bias = F32("e_score_correction_bias");
  for (RouterCase& c : RouterCases()) {
    SCOPED_TRACE(c.name);
    const int top_k = c.args.top_k;
    std::vector<uint16_t> ids(static_cast<size_t>(rows * top_k));
    std::vector<float> weights(ids.size());
    c.args.rows.bound = rows;
    c.args.logits = AsMatrix(logits, experts);
    c.args.experts = experts;
    if (std::string_view(c.name).find("bias") != std::string_view::npos) {
      c.args.selection_bias = bias.data();
    }
    c.args.ids = ids.data();
    c.args.weights = weights.data();
    backend_->Router(c.args);
    // The file lists a row's experts in ascending order.
    std::vector<int32_t> sorted_ids;
    std::vector<float> sorted_weights;
    for (int r = 0; r < rows; ++r) {
      std::vector<std::pair<int32_t, float>> row;
      for (int i = r * top_k; i < (r + 1) * top_k; ++i) row.emplace_back(ids[i], weights[i]);
      std::sort(row.begin(), row.end());
      for (const auto& [id, weight] : row) {
        sorted_ids.push_back(id);
        sorted_weights.push_back(weight);
      }
    }
    EXPECT_EQ(sorted_ids, golden_->I32(std::string(c.name) + ".indices"));
    ExpectClose(sorted_weights, F32(std::string(c.name) + ".weights"), kTolerance);
  }
}

}  // namespace
}  // namespace tandem::gpu
