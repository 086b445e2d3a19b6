#include "tests/gateway/scheduling/scheduler_harness.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::gateway {
namespace {

WorkerEnd ToWorkerEnd(testing::FakeEnd end) {
  switch (end) {
    case testing::FakeEnd::kNone:
      return WorkerEnd::kNone;
    case testing::FakeEnd::kStopToken:
      return WorkerEnd::kStopToken;
    case testing::FakeEnd::kMaxTokens:
      return WorkerEnd::kMaxTokens;
    case testing::FakeEnd::kInactive:
      return WorkerEnd::kInactive;
  }
  return WorkerEnd::kNone;
}

}  // namespace

SchedulerHarness::SchedulerHarness(SchedulerOptions options, uint32_t vocab_size)
    : options_(std::move(options)), vocab_size_(vocab_size) {
  scheduler_ = std::make_unique<Scheduler>(options_);
  MakeModel();
}

void SchedulerHarness::MakeModel() {
  std::vector<testing::FakeGroup> groups;
  for (const BlockGroup& group : options_.groups) {
    groups.push_back({.block_tokens = group.block_tokens, .block_count = group.block_count});
  }
  model_ = std::make_unique<testing::FakeModel>(groups, options_.max_sequences, vocab_size_);
}

RequestId SchedulerHarness::Add(std::vector<uint32_t> prompt, uint32_t max_tokens,
                                AddOptions options) {
  const RequestId id = next_request_++;
  requests_[id] = {.prompt = prompt,
                   .limits = {.stop_ids = options.stop_ids,
                              .min_tokens = options.min_tokens,
                              .max_tokens = max_tokens,
                              .seed = options.seed}};
  scheduler_->Add({.id = id,
                   .tenant = options.tenant,
                   .prompt = std::move(prompt),
                   .max_tokens = max_tokens,
                   .use_prefix_cache = options.use_prefix_cache});
  return id;
}

std::vector<uint32_t> SchedulerHarness::Expected(RequestId id) const {
  const HarnessRequest& request = requests_.at(id);
  return model_->Continuation(request.prompt, request.limits);
}

std::optional<StepPlan> SchedulerHarness::Send() {
  std::optional<StepPlan> plan = scheduler_->Plan();
  if (!plan) return plan;
  ++steps_sent_;
  Check(*plan);
  Compute(*plan);
  return plan;
}

void SchedulerHarness::Check(const StepPlan& plan) {
  uint32_t rows = 0;
  uint32_t decodes = 0;
  for (const PlannedSequence& sequence : plan.sequences) {
    const bool decode = sequence.tokens.empty();
    rows += decode ? 1 : static_cast<uint32_t>(sequence.tokens.size());
    decodes += decode ? 1 : 0;
    if (!requests_.at(sequence.request).open()) problem_ = "an ended request was scheduled";
  }
  if (rows > options_.max_step_rows) problem_ = absl::StrCat(rows, " rows in a step");
  if (decodes != plan.decodes || rows - decodes != plan.prompt_tokens) problem_ = "miscounted rows";
}

// The worker's side of a step. It is carried out at once, and its result waits for Receive().
void SchedulerHarness::Compute(const StepPlan& plan) {
  for (const uint64_t id : plan.released) model_->Release(id);
  Out out{.step_id = plan.step_id, .outcomes = {}, .touched = {}};
  for (const PlannedSequence& sequence : plan.sequences) {
    const HarnessRequest& request = requests_.at(sequence.request);
    if (sequence.start) {
      testing::FakeLimits limits = request.limits;
      const auto done = static_cast<uint32_t>(sequence.generated.size());
      limits.max_tokens -= done;
      limits.min_tokens -= std::min(limits.min_tokens, done);
      model_->Start(sequence.worker_sequence, limits);
    }
    for (uint32_t g = 0; g < sequence.appended.size(); ++g) {
      model_->AppendBlocks(sequence.worker_sequence, g, sequence.appended[g]);
    }
    std::optional<std::span<const uint32_t>> tokens;
    if (!sequence.tokens.empty()) tokens = sequence.tokens;
    const testing::FakeResult result =
        model_->Run(sequence.worker_sequence, sequence.start_position, tokens, sequence.sample);
    BlockTables& tables = tables_[sequence.worker_sequence];
    tables.resize(sequence.appended.size());
    for (size_t g = 0; g < tables.size(); ++g) {
      tables[g].insert(tables[g].end(), sequence.appended[g].begin(), sequence.appended[g].end());
    }
    const auto rows = static_cast<uint32_t>(std::max<size_t>(sequence.tokens.size(), 1));
    out.touched.push_back({.request = sequence.request,
                           .worker_sequence = sequence.worker_sequence,
                           .tables = tables,
                           .begin = sequence.start_position,
                           .end = sequence.start_position + rows,
                           .sample = sequence.sample});
    CheckWrites(out.touched.back());
    CheckSamples(out.touched.back());
    out.outcomes.push_back({.worker_sequence = sequence.worker_sequence,
                            .tokens = result.tokens,
                            .end = ToWorkerEnd(result.end)});
  }
  out_.push_back(std::move(out));
}

// A block is handed on only when no step out uses it.
void SchedulerHarness::CheckWrites(const Touched& touched) {
  for (size_t g = 0; g < touched.tables.size(); ++g) {
    const uint32_t size = options_.groups[g].block_tokens;
    for (uint32_t i = touched.begin / size; i <= (touched.end - 1) / size; ++i) {
      const BlockId block = touched.tables[g].at(i);
      for (const Out& out : out_) {
        for (const Touched& other : out.touched) {
          const auto& table = other.tables[g];
          if (other.worker_sequence != touched.worker_sequence &&
              std::find(table.begin(), table.end(), block) != table.end()) {
            problem_ = absl::StrCat("block ", block, " is handed on while a step out uses it");
          }
        }
      }
    }
  }
}

// Nothing is sampled beyond max_tokens, steps out included.
void SchedulerHarness::CheckSamples(const Touched& touched) {
  const HarnessRequest& request = requests_.at(touched.request);
  size_t samples = request.generated.size() + (touched.sample ? 1 : 0);
  for (const Out& out : out_) {
    for (const Touched& other : out.touched) {
      samples += other.request == touched.request && other.sample ? 1 : 0;
    }
  }
  if (samples > request.limits.max_tokens) problem_ = "sampled beyond max_tokens";
}

void SchedulerHarness::SpoilStepsOut() {
  for (const Out& out : out_) {
    for (const Touched& touched : out.touched) {
      for (uint32_t g = 0; g < touched.tables.size(); ++g) {
        const uint32_t size = options_.groups[g].block_tokens;
        for (uint32_t i = touched.begin / size; i <= (touched.end - 1) / size; ++i) {
          const uint32_t offset = i == touched.begin / size ? touched.begin % size : 0;
          model_->SpoilBlock(g, touched.tables[g].at(i), offset);
        }
      }
    }
  }
}

bool SchedulerHarness::Receive() {
  if (out_.empty()) return false;
  const Out out = std::move(out_.front());
  out_.pop_front();
  auto progress = scheduler_->Complete(out.step_id, out.outcomes);
  if (!progress.ok()) {
    problem_ = std::string(progress.status().message());
    return false;
  }
  for (const Progress& p : *progress) {
    HarnessRequest& request = requests_.at(p.request);
    if (!request.open()) problem_ = "progress of an ended request";
    request.generated.insert(request.generated.end(), p.tokens.begin(), p.tokens.end());
    request.cached_tokens = p.cached_tokens;
    if (p.end == SequenceEnd::kNone) continue;
    request.end = p.end;
    ++request.ends;
  }
  return true;
}

void SchedulerHarness::FailStep() {
  if (out_.empty()) return;
  SpoilStepsOut();
  const uint64_t step_id = out_.front().step_id;
  out_.pop_front();
  auto ended = scheduler_->Fail(step_id);
  if (!ended.ok()) {
    problem_ = std::string(ended.status().message());
    return;
  }
  for (const RequestId id : *ended) {
    requests_.at(id).failed = true;
    ++requests_.at(id).ends;
  }
}

void SchedulerHarness::LoseWorker(bool new_epoch) {
  SpoilStepsOut();
  out_.clear();
  if (new_epoch) {
    MakeModel();
  } else {
    model_->ReleaseAll();
  }
  for (const RequestId id : scheduler_->WorkerLost(new_epoch)) {
    requests_.at(id).failed = true;
    ++requests_.at(id).ends;
  }
}

void SchedulerHarness::Cancel(RequestId id) {
  if (!scheduler_->End(id)) return;
  requests_.at(id).cancelled = true;
  ++requests_.at(id).ends;
}

bool SchedulerHarness::RunAll() {
  for (int i = 0; i < 100000; ++i) {
    if (!Problem().empty()) return false;
    if (Send()) continue;
    if (!Receive()) return true;
  }
  return false;
}

std::string SchedulerHarness::Problem() const {
  if (!problem_.empty()) return problem_;
  if (!model_->error().empty()) return absl::StrCat("worker: ", model_->error());
  if (std::string audit = scheduler_->Audit(); !audit.empty()) return audit;
  const bool idle = out_.empty() && scheduler_->running() == 0 && scheduler_->waiting() == 0;
  for (size_t g = 0; idle && g < scheduler_->blocks().groups(); ++g) {
    if (scheduler_->blocks().available(g) != scheduler_->blocks().total(g)) {
      return absl::StrCat("idle with ", scheduler_->blocks().available(g), " blocks of ",
                          scheduler_->blocks().total(g));
    }
  }
  return "";
}

}  // namespace tandem::gateway
