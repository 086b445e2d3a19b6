#include "tests/gateway/engine_fixture.h"

#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "gateway/text/stop_matcher.h"

namespace tandem::gateway {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);

class LetterSink final : public TextSink {
 public:
  explicit LetterSink(const GenerationRequest& request)
      : stops_(request.stopping.stop_strings), matcher_({.stops = stops_}) {}
  bool Append(uint32_t token_id, bool may_stop, std::string* out) override {
    const std::string letter(1, static_cast<char>('a' + token_id % 26));
    if (may_stop) return matcher_.Append(letter, out);
    out->append(letter);
    return false;
  }
  void Flush(std::string* out) override { matcher_.Flush(out); }
  std::optional<std::string> matched() const override {
    if (!matcher_.matched()) return std::nullopt;
    return stops_[*matcher_.matched()];
  }

 private:
  const std::vector<std::string> stops_;
  StopMatcher matcher_;
};

}  // namespace

TextSinkFactory LetterText() {
  return [](const GenerationRequest& request) { return std::make_unique<LetterSink>(request); };
}

void Collector::OnEvent(GenerationEvent event) {
  const std::lock_guard lock(mutex_);
  EXPECT_EQ(terminal_, 0) << "an event behind the terminal one";
  tokens_.insert(tokens_.end(), event.token_ids.begin(), event.token_ids.end());
  text_ += event.text;
  EXPECT_EQ(event.completion_tokens, tokens_.size());
  terminal_ += event.finished ? 1 : 0;
  events_.push_back(std::move(event));
  changed_.notify_all();
}

bool Collector::WaitFinished() {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kPatience, [&] { return terminal_ > 0; });
}

bool Collector::WaitTokens(size_t count) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kPatience, [&] { return tokens_.size() >= count; });
}

std::vector<uint32_t> Collector::tokens() const {
  const std::lock_guard lock(mutex_);
  return tokens_;
}

std::string Collector::text() const {
  const std::lock_guard lock(mutex_);
  return text_;
}

GenerationEvent Collector::last() const {
  const std::lock_guard lock(mutex_);
  return events_.empty() ? GenerationEvent() : events_.back();
}

std::vector<TokenLogprob> Collector::logprobs() const {
  const std::lock_guard lock(mutex_);
  std::vector<TokenLogprob> all;
  for (const auto& event : events_) {
    all.insert(all.end(), event.logprobs.begin(), event.logprobs.end());
  }
  return all;
}

std::vector<TokenLogprob> Collector::prompt_logprobs() const {
  const std::lock_guard lock(mutex_);
  std::vector<TokenLogprob> all;
  for (const auto& event : events_) {
    all.insert(all.end(), event.prompt_logprobs.begin(), event.prompt_logprobs.end());
  }
  return all;
}

int Collector::terminal_events() const {
  const std::lock_guard lock(mutex_);
  return terminal_;
}

EngineFixture::~EngineFixture() {
  engine_.reset();
  EXPECT_EQ(worker_ ? worker_->error() : "", "");
  worker_.reset();
  if (!dir_.empty()) std::filesystem::remove_all(dir_);
}

void GrpcEngineFixture::SetUp() {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "gRPC is not instrumented for ThreadSanitizer";
#endif
}

bool EngineFixture::Eventually(const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

void EngineFixture::StartWorker(testing::FakeGpuWorkerOptions worker) {
  if (dir_.empty()) {
    std::string pattern = std::filesystem::temp_directory_path() / "tandem_engine_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  worker.address = "unix:" + dir_ + "/gpu.sock";
  worker_ = std::make_unique<testing::FakeGpuWorker>(std::move(worker));
  ASSERT_TRUE(worker_->Start());
}

void EngineFixture::StartEngine(EngineOptions options, TextSinkFactory text) {
  options.worker_address = "unix:" + dir_ + "/gpu.sock";
  options.model_dir = "/model";
  options.served_name = "fake";
  registry_ = std::make_shared<prometheus::Registry>();
  engine_ = MakeEngine(std::move(options), std::move(text), registry_);
}

void EngineFixture::Serve(testing::FakeGpuWorkerOptions worker, EngineOptions options,
                          TextSinkFactory text) {
  ASSERT_NO_FATAL_FAILURE(StartWorker(std::move(worker)));
  StartEngine(std::move(options), std::move(text));
  ASSERT_TRUE(WaitReady()) << engine_->Ready();
}

bool EngineFixture::WaitReady() {
  return Eventually([&] { return engine_->Ready().ok(); });
}

GenerationRequest EngineFixture::Request(std::vector<uint32_t> prompt, uint32_t max_tokens) const {
  GenerationRequest request;
  request.prompt = std::move(prompt);
  request.stopping.max_tokens = max_tokens;
  return request;
}

std::shared_ptr<Collector> EngineFixture::Submit(GenerationRequest request) {
  auto collector = std::make_shared<Collector>();
  const auto handle = engine_->Submit(std::move(request), collector);
  EXPECT_TRUE(handle.ok()) << handle.status();
  handle_ = handle.ok() ? *handle : 0;
  return collector;
}

std::vector<uint32_t> EngineFixture::Expected(const GenerationRequest& request) const {
  return worker_->Continuation(request.prompt, {.stop_ids = request.stopping.stop_token_ids,
                                                .min_tokens = request.stopping.min_tokens,
                                                .max_tokens = request.stopping.max_tokens,
                                                .seed = request.sampling.seed});
}

bool EngineFixture::AtRest() {
  return Eventually([&] {
    return worker_->sequences() == 0 && Metric("tandem_gateway_running_sequences") == 0 &&
           Metric("tandem_gateway_waiting_requests") == 0 &&
           Metric("tandem_gateway_waiting_tokens") == 0 &&
           Metric("tandem_gateway_kv_free_blocks") == Metric("tandem_gateway_kv_total_blocks");
  });
}

double EngineFixture::Metric(const std::string& name, const std::string& label) const {
  double sum = 0;
  for (const auto& family : registry_->Collect()) {
    if (family.name != name) continue;
    for (const auto& metric : family.metric) {
      if (!label.empty() && (metric.label.empty() || metric.label[0].value != label)) continue;
      sum += metric.counter.value + metric.gauge.value + metric.histogram.sample_sum;
    }
  }
  return sum;
}

double EngineFixture::MetricCount(const std::string& histogram) const {
  for (const auto& family : registry_->Collect()) {
    if (family.name != histogram || family.metric.empty()) continue;
    return static_cast<double>(family.metric[0].histogram.sample_count);
  }
  return -1;
}

}  // namespace tandem::gateway
