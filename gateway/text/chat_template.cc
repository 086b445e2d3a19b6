#include "gateway/text/chat_template.h"

#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "gateway/text/chat_request.h"
#include "gateway/text/template_process.h"

namespace tandem::gateway {
namespace {

using Clock = std::chrono::steady_clock;

// The refusal, type error or syntax error that a reply carries, without sentinels.
std::string Message(std::string_view reply, std::string_view sentinel) {
  const std::string_view text = reply.substr(1);
  return sentinel.empty() ? std::string(text) : TakeOutSentinels(text, sentinel).text;
}

// What a reply of template_helper.py means; its result is what follows the first byte.
absl::Status ReplyStatus(std::string_view reply, std::string_view sentinel) {
  switch (reply[0]) {
    case 'k':
      return absl::OkStatus();
    case 'r':
      return absl::InvalidArgumentError(Message(reply, sentinel));
    case 't':
      return absl::FailedPreconditionError(absl::StrCat(
          "the chat template cannot render these messages: ", Message(reply, sentinel)));
    case 's':
      return absl::InvalidArgumentError(
          absl::StrCat("chat template does not compile: ", Message(reply, sentinel)));
    case 'm':
      return absl::ResourceExhaustedError("chat template: out of its memory limit");
    case 'o':
      return absl::ResourceExhaustedError("chat template: output over its limit");
    case 'b':
      return absl::InvalidArgumentError("messages: JSON that cannot be read");
    default:
      return absl::InternalError("chat template: unknown reply");
  }
}

}  // namespace

// One thread owns the helper process and takes renders from a bounded queue. The thread lives as
// long as this object, so the kernel's rule that a child dies with the thread that made it does no
// harm.
struct ChatTemplate::State {
  struct Job {
    std::string request;
    Clock::time_point submitted;
    std::promise<absl::StatusOr<std::string>> reply;
  };

  State(const TokenizerConfig& config, const std::vector<AddedToken>& added_tokens,
        ChatTemplateOptions chat_options)
      : options(std::move(chat_options)),
        templates(config.chat_templates),
        special_tokens(config.special_tokens),
        guard(added_tokens) {
    for (const auto& [name, source] : templates) sentinels_taken |= SentinelsIn(source);
  }

  ~State() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    if (worker.joinable()) worker.join();
  }

  absl::StatusOr<std::string> Submit(std::string request);
  void WorkerLoop(std::promise<absl::Status> started);
  absl::Status StartHelper();
  absl::StatusOr<std::string> Exchange(std::string_view request);
  std::string StartRequest() const;

  const ChatTemplateOptions options;
  const std::map<std::string, std::string> templates;
  const std::map<std::string, std::string> special_tokens;
  const ContentGuard guard;
  SentinelSet sentinels_taken = 0;

  TemplateProcess process;  // the worker's
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> queue;  // guarded by mutex
  bool stopping = false;  // guarded by mutex
  std::thread worker;
};

std::string ChatTemplate::State::StartRequest() const {
  std::string sources;
  for (const auto& [name, source] : templates) {
    absl::StrAppend(&sources, sources.empty() ? "" : ",", JsonString(name), ":",
                    JsonString(source));
  }
  return absl::StrCat("{\"memory_limit_bytes\":", options.memory_limit_bytes,
                      ",\"output_limit_bytes\":", options.output_limit_bytes, ",\"templates\":{",
                      sources, "}}");
}

absl::Status ChatTemplate::State::StartHelper() {
  RETURN_IF_ERROR(process.Start(options.helper_binary));
  constexpr uint64_t kReplyLimitBytes = 1 << 20;
  const absl::StatusOr<std::string> reply =
      process.Exchange(StartRequest(), kReplyLimitBytes, Clock::now() + options.start_limit);
  if (!reply.ok()) return reply.status();
  const absl::Status status = ReplyStatus(*reply, {});
  if (!status.ok()) process.Kill();
  return status;
}

absl::StatusOr<std::string> ChatTemplate::State::Exchange(std::string_view request) {
  if (!process.running()) RETURN_IF_ERROR(StartHelper());
  absl::StatusOr<std::string> reply = process.Exchange(
      request, options.output_limit_bytes + (1 << 16), Clock::now() + options.render_limit);
  if (absl::IsDeadlineExceeded(reply.status())) {
    return absl::DeadlineExceededError(
        absl::StrCat("chat template: not rendered within ", options.render_limit.count(), " ms"));
  }
  // Out of memory: the helper ends itself, and is not asked again.
  if (reply.ok() && (*reply)[0] == 'm') process.Kill();
  return reply;
}

void ChatTemplate::State::WorkerLoop(std::promise<absl::Status> started) {
  started.set_value(StartHelper());
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return stopping || !queue.empty(); });
      if (queue.empty()) break;
      job = std::move(queue.front());
      queue.pop_front();
    }
    if (Clock::now() - job.submitted > options.wait_limit) {
      job.reply.set_value(absl::ResourceExhaustedError("chat template: waited too long"));
      continue;
    }
    absl::StatusOr<std::string> reply = Exchange(job.request);
    if (!reply.ok()) {
      LogWarn("template_helper_failed", {{"error", std::string(reply.status().message())}});
    }
    job.reply.set_value(std::move(reply));
  }
  process.Kill();
}

absl::StatusOr<std::string> ChatTemplate::State::Submit(std::string request) {
  std::future<absl::StatusOr<std::string>> reply;
  {
    const std::lock_guard lock(mutex);
    if (queue.size() >= options.max_waiting) {
      return absl::ResourceExhaustedError("chat template: too many requests wait for rendering");
    }
    Job job{std::move(request), Clock::now(), {}};
    reply = job.reply.get_future();
    queue.push_back(std::move(job));
  }
  changed.notify_one();
  return reply.get();
}

ChatTemplate::ChatTemplate(std::unique_ptr<State> state) : state_(std::move(state)) {}
ChatTemplate::~ChatTemplate() = default;

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Create(
    const TokenizerConfig& config, const std::vector<AddedToken>& added_tokens,
    ChatTemplateOptions options) {
  if (config.chat_templates.empty()) return absl::NotFoundError("the model has no chat template");
  auto state = std::make_unique<State>(config, added_tokens, std::move(options));
  std::promise<absl::Status> started;
  std::future<absl::Status> status = started.get_future();
  state->worker = std::thread([state = state.get(), started = std::move(started)]() mutable {
    state->WorkerLoop(std::move(started));
  });
  RETURN_IF_ERROR(status.get());
  return std::unique_ptr<ChatTemplate>(new ChatTemplate(std::move(state)));
}

absl::StatusOr<PromptText> ChatTemplate::Render(const ChatRequest& request) const {
  State& state = *state_;
  const size_t bytes =
      request.messages_json.size() + request.tools_json.size() + request.kwargs_json.size();
  if (bytes > state.options.input_limit_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "messages and tools have ", bytes, " bytes, at most ", state.options.input_limit_bytes));
  }
  std::string name = request.template_name;
  if (name.empty()) {
    const bool for_tools = !request.tools_json.empty() && state.templates.contains("tool_use");
    name = for_tools ? "tool_use" : "default";
  }
  if (!state.templates.contains(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model has no chat template \"", name, "\""));
  }
  ASSIGN_OR_RETURN(
      HelperRequest helper_request,
      WriteHelperRequest(request, name, state.special_tokens, state.guard, state.sentinels_taken));
  ASSIGN_OR_RETURN(const std::string reply, state.Submit(std::move(helper_request.json)));
  RETURN_IF_ERROR(ReplyStatus(reply, helper_request.sentinel));
  return TakeOutSentinels(std::string_view(reply).substr(1), helper_request.sentinel);
}

pid_t ChatTemplate::helper_pid() const { return state_->process.pid(); }

}  // namespace tandem::gateway
