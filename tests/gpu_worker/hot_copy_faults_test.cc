// An expert worker is killed while its experts are copied to the device: real worker processes,
// real links and stores; the copy is stopped where the test wants it. The step ends UNAVAILABLE,
// nothing hangs, the copy is given up or ends with what was read, and with the next worker all is
// as before.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/model/model_loader.h"
#include "expert_worker/engine/model_experts.h"
#include "gpu_worker/expert_workers.h"
#include "gpu_worker/link_limits.h"
#include "tests/gpu_worker/links/link_harness.h"
#include "tests/gpu_worker/step_test_util.h"
#include "tests/testing/child_process.h"
#include "tests/testing/temp_dir.h"

namespace tandem::gpu {
namespace {

using tandem::testing::ChildProcess;
using tandem::testing::Eventually;
using tandem::testing::MappingsNamed;
using tandem::testing::OpenDescriptors;

constexpr int kWorkers = 2;
constexpr int kVictim = 1;
constexpr const char* kStoreName = "hot-copy-faults";
constexpr auto kExpertWorkerPath = TANDEM_EXPERT_WORKER_PATH;

// A source whose chosen read calls a hook, before or after the bytes are read.
class HookedSource final : public ExpertWeightSource {
 public:
  enum class At : uint8_t { kBefore, kAfter };

  explicit HookedSource(ExpertWeightSource& source) : source_(source) {}

  // In the read number `read` (from 0) from now on, once.
  void Arm(int read, At at, std::function<void()> hook) {
    const std::lock_guard lock(mutex_);
    armed_ = read;
    at_ = at;
    hook_ = std::move(hook);
  }
  absl::Status Read(int layer, int expert, CanonicalExpert* out) override {
    std::function<void()> hook;
    {
      const std::lock_guard lock(mutex_);
      if (armed_ >= 0 && armed_-- == 0) std::swap(hook, hook_);
    }
    if (hook && at_ == At::kBefore) hook();
    const absl::Status status = source_.Read(layer, expert, out);
    if (hook && at_ == At::kAfter) hook();
    ++reads_;
    return status;
  }
  bool available() const override { return source_.available(); }
  int reads() const { return reads_; }

 private:
  ExpertWeightSource& source_;
  std::mutex mutex_;
  int armed_ = -1;
  At at_ = At::kBefore;
  std::function<void()> hook_;
  std::atomic<int> reads_{0};
};

// Where a thread waits until it is let through.
class Gate {
 public:
  void Pass() {
    std::unique_lock lock(mutex_);
    reached_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool reached() {
    const std::lock_guard lock(mutex_);
    return reached_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  bool open_ = false;
};

class HotCopyFaultsTest : public StepRunnerTestBase {
 protected:
  void SetUp() override {
    const auto dir = tandem::testing::SharedPath("golden/models/qwen3_moe");
    if (!dir) GTEST_SKIP() << "no golden/models/qwen3_moe";
    model_dir_ = dir->string();
    for (int i = 0; i < kWorkers; ++i) {
      // Inherited by the workers, as the supervisor's is.
      kept_.emplace_back(memfd_create(kStoreName, MFD_ALLOW_SEALING));
      processes_.push_back(nullptr);
      StartWorker(i);
    }
  }
  void TearDown() override {
    model_.reset();
    if (workers_ != nullptr) workers_->Stop();
    workers_.reset();
    stores_.reset();
    EXPECT_EQ(MappingsNamed(kStoreName), 0);
    EXPECT_EQ(MappingsNamed("memfd:tandem-link"), 0);
  }

  std::string Path(int worker, const std::string& kind) const {
    return dir_.path().string() + "/e" + std::to_string(worker) + "." + kind;
  }
  void StartWorker(int i) {
    const auto index = static_cast<size_t>(i);
    processes_[index] = std::make_unique<ChildProcess>(
        kExpertWorkerPath,
        std::vector<std::string>{"--listen=unix:" + Path(i, "sock"),
                                 "--link-socket=" + Path(i, "link"),
                                 "--weights-fd=" + std::to_string(kept_[index].get()),
                                 "--threads=1", "--log-level=error"});
  }
  void KillWorker() { processes_[kVictim]->Signal(SIGKILL); }
  // Whoever has to know does: its store is dropped.
  bool LossIsNoticed() {
    return Eventually([this] { return lost_.load(); });
  }
  void ReplaceWorker() {
    StartWorker(kVictim);
    ASSERT_TRUE(Eventually([this] { return workers_->ready(); }, 60));
    lost_ = false;
  }

  // The model on the link and the stores of the worker processes.
  void LoadOnWorkers(GoldenOptions options) {
    options.shares = {1, 1};
    std::vector<expert::StoreSpec> specs;
    ASSERT_TRUE(MakeSpecs(options.shares, &specs).ok());
    stores_ = std::make_unique<StoreExperts>(specs);
    options.wrap_source = [this](ExpertWeightSource&) {
      auto source = std::make_unique<HookedSource>(*stores_);
      source_ = source.get();
      return source;
    };
    Load("qwen3_moe", options);
    ASSERT_NE(model_, nullptr);
    ExpertWorkersOptions workers;
    for (int i = 0; i < kWorkers; ++i) workers.addresses.push_back("unix:" + Path(i, "sock"));
    workers.shares = options.shares;
    workers.thread_cpus.assign(static_cast<size_t>(options.threads), -1);
    workers.on_weights = [this](size_t worker, const shm::UniqueFd& fd) {
      ASSERT_TRUE(fd.valid());
      const absl::Status status = stores_->Attach(worker, fd.get());
      EXPECT_TRUE(status.ok()) << status;
    };
    workers.on_lost = [this](size_t worker) {
      stores_->Drop(worker);
      lost_ = true;
    };
    workers_ = std::make_unique<ExpertWorkers>(workers);
    ASSERT_TRUE(workers_->Load(model_dir_).ok());
    const absl::Status attached = workers_->Attach(
        LinkLimits(model_->spec(), options.max_step_rows, shm::RowType::kF32), specs[0].model_hash);
    ASSERT_TRUE(attached.ok()) << attached;
    model_->runner().set_link(workers_->link());
    moe_layers_ = static_cast<int>(model_->runner().decoder().picks().size());
  }
  absl::Status MakeSpecs(const std::vector<uint32_t>& shares,
                         std::vector<expert::StoreSpec>* specs) const {
    ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(model_dir_));
    ASSIGN_OR_RETURN(const ModelSpec spec, LoadModelSpec(*checkpoint));
    ASSIGN_OR_RETURN(const ExpertTensors tensors, ExpertTensors::Create(*checkpoint, spec));
    for (uint32_t i = 0; i < shares.size(); ++i) {
      ASSIGN_OR_RETURN(specs->emplace_back(),
                       expert::MakeStoreSpec(*checkpoint, spec, tensors, shares, i));
    }
    return absl::OkStatus();
  }

  v1::StepResult Step(const v1::Step& step) {
    workers_->TakeReplacements();
    return Run(step);
  }
  // Three prompts of different tokens, long enough to be streamed.
  v1::Step Prefill() {
    v1::Step step;
    for (uint64_t i = 0; i < 3; ++i) {
      AddStart(step, first_id_ + i);
      std::vector<uint32_t> tokens;
      for (uint32_t t = 0; t < 16; ++t)
        tokens.push_back(2 + (t * 7 + static_cast<uint32_t>(i)) % 200);
      const auto block = static_cast<uint32_t>(4 * i);
      AddTokens(step, first_id_ + i, 0, tokens, {block, block + 1, block + 2}, true);
    }
    return step;
  }
  v1::Step Decode(uint32_t position) const {
    v1::Step step;
    for (uint64_t i = 0; i < 3; ++i) AddDecode(step, first_id_ + i, position);
    return step;
  }
  // New sequences' tokens, each by itself. Those of before are forgotten.
  std::vector<std::vector<uint32_t>> Generate(uint32_t decodes) {
    model_->runner().Reset();
    first_id_ += 10;
    std::vector<std::vector<uint32_t>> tokens(3);
    for (uint32_t i = 0; i <= decodes; ++i) {
      const v1::StepResult result = Step(i == 0 ? Prefill() : Decode(15 + i));
      EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_OK) << result.error();
      if (result.sequences_size() != 3) return {};
      for (int s = 0; s < 3; ++s) {
        EXPECT_EQ(result.sequences(s).sequence_id(), first_id_ + static_cast<uint64_t>(s));
        tokens[static_cast<size_t>(s)].push_back(result.sequences(s).token_ids(0));
      }
    }
    return tokens;
  }

  tandem::testing::TempDir dir_;
  std::string model_dir_;
  std::vector<shm::UniqueFd> kept_;
  std::vector<std::unique_ptr<ChildProcess>> processes_;
  std::unique_ptr<StoreExperts> stores_;
  HookedSource* source_ = nullptr;  // the model's
  std::unique_ptr<ExpertWorkers> workers_;
  std::atomic<bool> lost_{false};
  uint64_t first_id_ = 1;
  int moe_layers_ = 0;
};

GoldenOptions HotOptions() {
  GoldenOptions options;
  options.hot_experts_bytes = uint64_t{1} << 30;
  return options;
}

// Where the copier stands when the worker dies, and whether the loss is known (the store dropped)
// when it goes on.
struct Strike {
  HookedSource::At at;
  bool noticed;
};
class HotCopyDeathTest : public HotCopyFaultsTest, public ::testing::WithParamInterface<Strike> {};

TEST_P(HotCopyDeathTest, FailsTheStepAloneAndCopiesGoOnWithTheNextWorker) {
  const auto [at, noticed] = GetParam();
  GoldenOptions options = HotOptions();
  options.hot_policy.min_steps = 6;
  LoadOnWorkers(options);
  if (IsSkipped() || HasFatalFailure()) return;
  HotExperts& hot = *model_->hot_experts();
  const auto want = Generate(3);
  ASSERT_EQ(source_->reads(), 0) << "it is to be what the workers compute";
  const int descriptors = OpenDescriptors();
  const int mappings = MappingsNamed(kStoreName);
  Gate gate;
  source_->Arm(2, at, [&gate] { gate.Pass(); });
  for (int i = 0; i < 50 && !gate.reached(); ++i) EXPECT_EQ(Generate(3), want);
  ASSERT_TRUE(Eventually([&] { return gate.reached(); })) << "nothing is copied";
  KillWorker();
  first_id_ += 10;
  model_->runner().Reset();
  const v1::StepResult failed = Step(Prefill());
  EXPECT_EQ(failed.outcome(), v1::STEP_OUTCOME_UNAVAILABLE);
  EXPECT_EQ(failed.sequences_size(), 0);
  if (noticed) {
    ASSERT_TRUE(LossIsNoticed());
  }
  gate.Open();
  hot.WaitForCopies();
  ASSERT_NO_FATAL_FAILURE(ReplaceWorker());
  EXPECT_EQ(Generate(3), want);
  if (noticed) {
    // What was read is whole; what was not is given up, and waits.
    EXPECT_GT(hot.counters().failed_copies, 0u);
    EXPECT_EQ(hot.counters().migrations, at == HookedSource::At::kAfter ? 3u : 2u);
  }
  const auto all = static_cast<uint64_t>(moe_layers_ * model_->spec().moe.experts);
  for (int i = 0; i < 100 && hot.counters().resident_experts < all; ++i) {
    EXPECT_EQ(Generate(3), want);
  }
  EXPECT_EQ(hot.counters().resident_experts, all) << "copies do not go on";
  EXPECT_GT(model_->runner().pipeline().counters().resident_picks, 0u);
  EXPECT_EQ(MappingsNamed(kStoreName), mappings);
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= descriptors; }))
      << OpenDescriptors() << " descriptors, not " << descriptors;
}
INSTANTIATE_TEST_SUITE_P(Strikes, HotCopyDeathTest,
                         ::testing::Values(Strike{HookedSource::At::kBefore, false},
                                           Strike{HookedSource::At::kBefore, true},
                                           Strike{HookedSource::At::kAfter, false},
                                           Strike{HookedSource::At::kAfter, true}),
                         [](const auto& info) {
                           return std::string(info.param.at == HookedSource::At::kBefore
                                                  ? "BeforeTheRead"
                                                  : "AfterTheRead") +
                                  (info.param.noticed ? "Noticed" : "AtOnce");
                         });

// Before the first copy, amid a layer, at the last copy of all.
TEST_F(HotCopyFaultsTest, KilledWhileALayerIsStreamedFailsThePromptAlone) {
  GoldenOptions options = HotOptions();
  options.hot_policy.min_steps = UINT64_MAX;  // nobody stays on the device
  options.stream_prompts = true;
  options.fixed_streamed = 3;
  LoadOnWorkers(options);
  if (IsSkipped() || HasFatalFailure()) return;
  const auto want = Generate(3);
  const int copies = source_->reads();
  ASSERT_EQ(copies, moe_layers_ * options.fixed_streamed);
  int descriptors = 0, mappings = 0;
  for (const int read : {0, copies / 2, copies - 1}) {
    for (const bool noticed : {false, true}) {
      if (descriptors == 0) descriptors = OpenDescriptors(), mappings = MappingsNamed(kStoreName);
      source_->Arm(read, HookedSource::At::kBefore, [this, noticed] {
        KillWorker();
        if (noticed) {
          EXPECT_TRUE(LossIsNoticed());
        }
      });
      model_->runner().Reset();
      first_id_ += 10;
      const v1::StepResult failed = Step(Prefill());
      EXPECT_EQ(failed.outcome(), v1::STEP_OUTCOME_UNAVAILABLE) << "copy " << read;
      EXPECT_EQ(failed.sequences_size(), 0);
      ReplaceWorker();
      if (HasFatalFailure()) return;
      const int before = source_->reads();
      EXPECT_EQ(Generate(3), want) << "after copy " << read;
      EXPECT_EQ(source_->reads(), before + copies) << "prompts are streamed again";
      EXPECT_EQ(MappingsNamed(kStoreName), mappings);
      EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= descriptors; }))
          << OpenDescriptors() << " descriptors, not " << descriptors;
    }
  }
}

// A reader that never rests, while workers die at any byte of what it reads.
TEST_F(HotCopyFaultsTest, ReadsAreWholeOrRefusedWhileWorkersComeAndGo) {
  LoadOnWorkers(HotOptions());
  if (IsSkipped() || HasFatalFailure()) return;
  const int layer = model_->runner().decoder().picks()[0].layer;
  CanonicalExpert want;
  ASSERT_TRUE(stores_->Read(layer, 5, &want).ok());
  std::atomic<bool> stop{false};
  std::atomic<int> whole{0}, refused{0};
  std::thread reader([&] {
    CanonicalExpert got;
    while (!stop) {
      const absl::Status status = stores_->Read(layer, 5, &got);
      if (!status.ok()) {
        EXPECT_TRUE(absl::IsUnavailable(status)) << status;
        ++refused;
        continue;
      }
      EXPECT_EQ(got.gate_up.elements, want.gate_up.elements);
      EXPECT_EQ(got.down.elements, want.down.elements);
      ++whole;
    }
  });
  for (int round = 0; round < 3; ++round) {
    KillWorker();
    EXPECT_TRUE(LossIsNoticed());
    const int refused_before = refused;
    EXPECT_TRUE(Eventually([&] { return refused > refused_before; }));
    ReplaceWorker();
    if (HasFatalFailure()) break;
    workers_->TakeReplacements();
    const int whole_before = whole;
    EXPECT_TRUE(Eventually([&] { return whole > whole_before; }));
  }
  stop = true;
  reader.join();
}

}  // namespace
}  // namespace tandem::gpu
