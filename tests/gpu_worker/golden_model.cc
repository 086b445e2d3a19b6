#include "tests/gpu_worker/golden_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "common/base/check.h"
#include "common/base/status.h"
#include "common/hw/cpu_features.h"
#include "common/model/model_loader.h"
#include "expert_worker/kernels/select.h"

namespace tandem::gpu {

absl::StatusOr<std::unique_ptr<GoldenModel>> GoldenModel::Load(const std::string& dir,
                                                               const GoldenOptions& options) {
  std::unique_ptr<GoldenModel> model(new GoldenModel());
  ASSIGN_OR_RETURN(model->checkpoint_, Checkpoint::Open(dir));
  ASSIGN_OR_RETURN(model->spec_, LoadModelSpec(*model->checkpoint_));
  if (std::filesystem::exists(dir + "/expected.safetensors")) {
    ASSIGN_OR_RETURN(model->expected_, SafetensorsFile::Open(dir + "/expected.safetensors"));
  }
  const ModelSpec& spec = model->spec_;
  const kernels::KernelTable* table = kernels::SelectKernelTable(Isa::kAmx, DetectCpuFeatures());
  CpuBackendOptions backend_options;
  backend_options.threads = options.threads;
  backend_options.kernels = table;
  backend_options.max_rows = options.max_step_rows;
  backend_options.max_vocab = spec.vocab;
  backend_options.max_experts = spec.moe.experts;
  model->backend_ = std::make_unique<CpuBackend>(backend_options);
  if (options.wrap) model->wrapper_ = options.wrap(*model->backend_);
  Backend& backend = model->backend();
  ASSIGN_OR_RETURN(model->weights_, LoadModelWeights(*model->checkpoint_, spec, backend, {}));
  ASSIGN_OR_RETURN(model->cache_,
                   KvCache::Create(backend, spec,
                                   {.block_tokens = 16,
                                    .tokens = int64_t{options.max_context} * options.max_sequences,
                                    .dtype = options.parity ? DType::kF32 : DType::kBF16}));
  ASSIGN_OR_RETURN(model->runner_, StepRunner::Create(backend, spec, model->weights_, model->cache_,
                                                      {.max_step_rows = options.max_step_rows,
                                                       .max_sequences = options.max_sequences,
                                                       .max_context = options.max_context,
                                                       .hot_experts = options.hot_experts_bytes > 0,
                                                       .pipeline = options.pipeline,
                                                       .clock = options.clock,
                                                       .tracer = options.tracer}));
  if (spec.moe.experts > 0) {
    expert::LoadProgress progress;
    ASSIGN_OR_RETURN(model->experts_,
                     InProcessExperts::Create(
                         *model->checkpoint_, spec,
                         {.shares = options.shares,
                          .kernels = table,
                          .threads = options.threads,
                          .max_rows = options.max_step_rows,
                          .row_type = options.parity ? shm::RowType::kF32 : shm::RowType::kBf16},
                         progress));
    model->runner_->set_link(model->experts_->link());
    if (options.hot_experts_bytes > 0) {
      RETURN_IF_ERROR(model->MakeHotExperts(options));
    }
  }
  return model;
}

absl::Status GoldenModel::MakeHotExperts(const GoldenOptions& golden) {
  weight_source_ = experts_->MakeWeightSource();
  ResidentShape shape = weight_source_->Shape(spec_.moe.top_k);
  shape.budget_bytes = golden.hot_experts_bytes;
  HotExpertsOptions options;
  options.experts = spec_.moe.experts;
  options.stream_prompts = golden.stream_prompts;
  options.fixed_streamed = golden.fixed_streamed;
  options.policy = golden.hot_policy;
  options.tracer = golden.tracer;
  for (const RouterPicks& picks : runner_->decoder().picks()) {
    options.moe_layers.push_back(picks.layer);
  }
  if (golden.wrap_source) source_wrapper_ = golden.wrap_source(*weight_source_);
  ExpertWeightSource& source = source_wrapper_ != nullptr ? *source_wrapper_ : *weight_source_;
  ASSIGN_OR_RETURN(hot_, HotExperts::Create(backend(), shape, source, options));
  runner_->set_hot_experts(hot_.get());
  return absl::OkStatus();
}

bool GoldenModel::Has(const std::string& name) const {
  if (expected_ == nullptr) return false;
  const auto& entries = expected_->entries();
  return std::any_of(entries.begin(), entries.end(), [&](const auto& e) { return e.name == name; });
}

std::vector<float> GoldenModel::Floats(const std::string& name) const {
  TANDEM_CHECK(expected_ != nullptr);
  for (const SafetensorsEntry& entry : expected_->entries()) {
    if (entry.name != name) continue;
    TANDEM_CHECK(entry.dtype == DType::kF32);
    std::vector<float> out((entry.end - entry.begin) / sizeof(float));
    std::memcpy(out.data(), expected_->View(entry).data, entry.end - entry.begin);
    return out;
  }
  ADD_FAILURE() << "no " << name;
  return {};
}

std::vector<uint32_t> GoldenModel::Ids(const std::string& name) const {
  TANDEM_CHECK(expected_ != nullptr);
  for (const SafetensorsEntry& entry : expected_->entries()) {
    if (entry.name != name) continue;
    TANDEM_CHECK(entry.dtype == DType::kI32);
    std::vector<uint32_t> out((entry.end - entry.begin) / sizeof(uint32_t));
    std::memcpy(out.data(), expected_->View(entry).data, entry.end - entry.begin);
    return out;
  }
  ADD_FAILURE() << "no " << name;
  return {};
}

GoldenDriver::GoldenDriver(GoldenModel& model) : model_(model) {
  model_.runner().Reset();
  model_.runner().set_tap(this);
}

GoldenDriver::~GoldenDriver() { model_.runner().set_tap(nullptr); }

void GoldenDriver::AddStart(worker::v1::Step& step, const Feed& feed, uint32_t new_tokens) const {
  worker::v1::SequenceStart& start = *step.add_starts();
  start.set_sequence_id(feed.id);
  start.mutable_sampling()->set_top_p(1);
  start.mutable_sampling()->set_repetition_penalty(1);
  start.mutable_sampling()->set_top_logprobs(-1);
  start.mutable_stopping()->set_max_tokens(new_tokens);
  start.set_prompt_logprobs(0);  // so that the head runs on every row
}

void GoldenDriver::AddBlocks(worker::v1::SequenceStep& sequence, const Feed& feed, uint32_t begin,
                             uint32_t end) const {
  const auto tokens = static_cast<uint32_t>(model_.runner().limits().block_tokens);
  const auto blocks = [&](uint32_t position) { return (position + tokens - 1) / tokens; };
  worker::v1::BlockAppend& append = *sequence.add_block_appends();
  for (uint32_t i = blocks(begin); i < blocks(end); ++i) {
    append.add_block_ids(static_cast<uint32_t>(feed.first_block) + i);
  }
}

void GoldenDriver::AddChunk(worker::v1::Step& step, const Feed& feed, uint32_t begin,
                            uint32_t end) {
  worker::v1::SequenceStep& sequence = *step.add_sequences();
  sequence.set_sequence_id(feed.id);
  sequence.set_start_position(begin);
  for (uint32_t i = begin; i < end; ++i) {
    sequence.mutable_tokens()->add_ids(feed.prompt[i]);
    rows_.push_back({feed.id, i});
  }
  if (end < feed.prompt.size()) sequence.set_next_prompt_id(feed.prompt[end]);
  sequence.set_sample(end == feed.prompt.size());
  AddBlocks(sequence, feed, begin, end);
}

void GoldenDriver::AddDecode(worker::v1::Step& step, const Feed& feed, uint32_t position) {
  worker::v1::SequenceStep& sequence = *step.add_sequences();
  sequence.set_sequence_id(feed.id);
  sequence.set_start_position(position);
  sequence.set_last_sampled(true);
  sequence.set_sample(true);
  rows_.push_back({feed.id, position});
  AddBlocks(sequence, feed, position, position + 1);
}

std::vector<std::vector<uint32_t>> GoldenDriver::Generate(const std::vector<Feed>& feeds,
                                                          uint32_t chunk, uint32_t new_tokens) {
  std::map<uint64_t, uint32_t> done;
  for (const Feed& feed : feeds) {
    traces_[feed.id].hidden.resize(model_.spec().layers.size() + 1);
    traces_[feed.id].picks.resize(model_.runner().decoder().picks().size());
    sampled_[feed.id].clear();
  }
  for (bool first = true;; first = false) {
    worker::v1::Step step;
    rows_.clear();
    for (const Feed& feed : feeds) {
      if (first) AddStart(step, feed, new_tokens);
      const auto length = static_cast<uint32_t>(feed.prompt.size());
      uint32_t& position = done[feed.id];
      if (position < length) {
        const uint32_t end = chunk == 0 ? length : std::min(length, position + chunk);
        AddChunk(step, feed, position, end);
        position = end;
      } else if (sampled_[feed.id].size() < new_tokens) {
        AddDecode(step, feed, position++);
      }
    }
    if (step.sequences().empty()) break;
    Run(step);
    if (::testing::Test::HasFatalFailure()) break;
  }
  worker::v1::Step release;
  std::vector<std::vector<uint32_t>> out;
  for (const Feed& feed : feeds) {
    release.add_release_sequence_ids(feed.id);
    out.push_back(sampled_[feed.id]);
  }
  rows_.clear();
  Run(release);
  return out;
}

void GoldenDriver::Run(const worker::v1::Step& step) {
  worker::v1::Step numbered = step;
  numbered.set_step_id(++step_id_);
  model_.runner().Run(numbered, result_);
  ASSERT_EQ(result_.outcome(), worker::v1::STEP_OUTCOME_OK) << result_.error();
  RecordPicks();
  for (const auto& sequence : result_.sequences()) {
    ASSERT_NE(sequence.finish(), worker::v1::WORKER_FINISH_NUMERIC_ERROR);
    for (const uint32_t token : sequence.token_ids()) {
      sampled_[sequence.sequence_id()].push_back(token);
    }
  }
}

const GoldenDriver::RowOwner& GoldenDriver::OwnerOf(int place) const {
  const StepPlan& plan = model_.runner().plan();
  for (int row = 0; row < plan.rows(); ++row) {
    if (plan.place_of(row) == place) return rows_[static_cast<size_t>(row)];
  }
  TANDEM_CHECK(false);
  return rows_[0];
}

void GoldenDriver::OnHidden(int layer, int first_row, Rows rows, ConstMatrix hidden) {
  ASSERT_TRUE(model_.backend().Synchronize().ok());
  for (int row = 0; row < *rows.count; ++row) {
    const RowOwner& owner = OwnerOf(first_row + row);
    const float* begin = hidden.data + row * hidden.ld;
    traces_[owner.id].hidden[static_cast<size_t>(layer)][owner.position].assign(
        begin, begin + model_.spec().hidden);
  }
}

void GoldenDriver::OnLogits(const int32_t* indices, const int32_t* count, ConstMatrix logits) {
  ASSERT_TRUE(model_.backend().Synchronize().ok());
  for (int i = 0; i < *count; ++i) {
    const RowOwner& owner = OwnerOf(indices[i]);
    const float* begin = logits.data + i * logits.ld;
    traces_[owner.id].logits[owner.position].assign(begin, begin + model_.spec().vocab);
  }
}

void GoldenDriver::RecordPicks() {
  const auto& layers = model_.runner().decoder().picks();
  const auto top_k = static_cast<size_t>(model_.spec().moe.top_k);
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (size_t row = 0; row < rows_.size(); ++row) {
      const auto place =
          static_cast<size_t>(model_.runner().plan().place_of(static_cast<int>(row)));
      const uint16_t* ids = layers[layer].ids + place * top_k;
      traces_[rows_[row].id].picks[layer][rows_[row].position].assign(ids, ids + top_k);
    }
  }
}

}  // namespace tandem::gpu
