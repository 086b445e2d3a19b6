// Generation over HTTP: one request from its body to the last byte of its response.

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "gateway/api/openai_call.h"

namespace tandem::gateway {
namespace {

namespace asio = boost::asio;

// Whoever leaves Generate, by whichever way, leaves no generation running and none to tell of it.
class CloseOnExit {
 public:
  CloseOnExit(std::shared_ptr<GenerationStream> stream, std::shared_ptr<StreamSignal> signal)
      : stream_(std::move(stream)), signal_(std::move(signal)) {}
  ~CloseOnExit() {
    stream_->Close();
    signal_->Close();
  }
  CloseOnExit(const CloseOnExit&) = delete;
  CloseOnExit& operator=(const CloseOnExit&) = delete;

 private:
  std::shared_ptr<GenerationStream> stream_;
  std::shared_ptr<StreamSignal> signal_;
};

ResponseShape ShapeOf(const OpenAiRequest& request, const std::string& model,
                      const std::string& request_id) {
  ResponseShape shape;
  shape.chat = request.chat;
  shape.include_usage = request.include_usage;
  shape.echo = request.echo;
  shape.logprobs = request.fields.top_logprobs.has_value();
  shape.tokens_as_token_ids = request.tokens_as_token_ids;
  shape.id = absl::StrCat(request.chat ? "chatcmpl-" : "cmpl-", request_id);
  shape.model = model;
  shape.created_unix_s = std::chrono::duration_cast<std::chrono::seconds>(
                             std::chrono::system_clock::now().time_since_epoch())
                             .count();
  return shape;
}

// The prompt's text for echo: what the client wrote, or what its token ids stand for.
std::string EchoText(const Prompt& prompt, const Tokenizer* tokenizer) {
  if (const auto* text = std::get_if<TextPrompt>(&prompt)) return text->text;
  const auto* ids = std::get_if<std::vector<uint32_t>>(&prompt);
  return ids == nullptr || tokenizer == nullptr ? std::string() : tokenizer->Decode(*ids, {});
}

}  // namespace

absl::StatusOr<OpenAiApi::Generation> OpenAiApi::Prepare(const Call& call, std::string body) const {
  OpenAiRequest request;
  {
    ASSIGN_OR_RETURN(const Json document, ParseRequestJson(body));
    body = {};
    const bool chat = call.route.endpoint == Endpoint::kChat;
    ASSIGN_OR_RETURN(request, chat ? ParseChatRequest(document) : ParseCompletionRequest(document));
  }
  const RequestBuilder& builder = *parts_.builder;
  ASSIGN_OR_RETURN(const ServedModel model, builder.Model(request.model));
  std::vector<std::vector<uint32_t>> prompts;
  std::vector<PromptEcho> echoes;
  for (size_t i = 0; i < request.prompts.size(); ++i) {
    const std::string name =
        request.prompts_are_list ? absl::StrCat("prompt[", i, "]") : request.fields.prompt_name;
    ASSIGN_OR_RETURN(std::vector<uint32_t> ids, builder.Tokenize(request.prompts[i], name));
    PromptEcho echo;
    if (request.echo) echo.text = EchoText(request.prompts[i], builder.tokenizer());
    echo.token_ids = ids;
    echoes.push_back(std::move(echo));
    prompts.push_back(std::move(ids));
  }
  ASSIGN_OR_RETURN(BuiltRequest built, builder.Build(model, request.fields, std::move(prompts),
                                                     call.request_id, call.tenant));
  ResponseShape shape = ShapeOf(request, model.name, call.request_id);
  shape.token_ids = request.return_token_ids || builder.tokenizer() == nullptr;
  shape.discard_output = built.discard_output;
  shape.choices_per_prompt = built.choices_per_prompt;
  Generation job;
  job.stream = request.stream;
  job.include_usage = request.include_usage;
  job.requests = std::move(built.requests);
  job.response.emplace(std::move(shape), std::move(echoes), builder.tokenizer());
  return job;
}

asio::awaitable<void> OpenAiApi::Generate(HttpExchange& exchange, Call& call) {
  auto prepare = [this, &call, body = exchange.TakeBody()]() mutable {
    return Prepare(call, std::move(body));
  };
  absl::StatusOr<Generation> prepared = co_await RunOn(*parts_.pool, std::move(prepare));
  absl::Status status = prepared.status();
  if (status.ok()) {
    Generation& job = *prepared;
    job.signal = std::make_shared<StreamSignal>(exchange.executor());
    job.events = std::make_shared<GenerationStream>(parts_.engine, options_.stream);
    const CloseOnExit close(job.events, job.signal);
    job.events->SetWakeup([signal = job.signal] { signal->Notify(); });
    status = job.events->Start(std::move(job.requests));
    if (status.ok()) {
      // A named value: GCC 12 destroys conditional temporaries of a co_await twice.
      asio::awaitable<void> work =
          job.stream ? StreamEvents(exchange, call, job) : CollectEvents(exchange, call, job);
      co_await exchange.UntilDisconnect(std::move(work));
      call.prompt_tokens = job.response->prompt_tokens();
      call.completion_tokens = job.response->completion_tokens();
      if (exchange.disconnected()) call.status = 499;
    }
  }
  if (!status.ok()) {
    HttpResponse response = StatusResponse(status, call.request_id);
    call.status = response.status;
    co_await exchange.Respond(std::move(response));
  }
}

asio::awaitable<void> OpenAiApi::CollectEvents(HttpExchange& exchange, Call& call,
                                               Generation& job) {
  co_await asio::this_coro::throw_if_cancelled(false);
  absl::Status error;
  while (error.ok() && !job.events->Done()) {
    if (exchange.disconnected()) co_return;
    const std::optional<GenerationStream::Item> item = job.events->Pop();
    if (!item) {
      co_await job.signal->Wait(std::chrono::steady_clock::time_point::max());
      continue;
    }
    job.response->Collect(item->choice, item->event);
    error = EventError(item->event);
  }
  HttpResponse response = error.ok() ? JsonResponse(job.response->Body(), call.request_id)
                                     : StatusResponse(error, call.request_id);
  call.status = response.status;
  co_await exchange.Respond(std::move(response));
}

asio::awaitable<void> OpenAiApi::StreamEvents(HttpExchange& exchange, Call& call, Generation& job) {
  co_await asio::this_coro::throw_if_cancelled(false);
  HttpResponse head;
  head.content_type = "text/event-stream";
  head.headers = {{"Cache-Control", "no-cache"},
                  {"X-Accel-Buffering", "no"},
                  {"X-Request-Id", call.request_id}};
  bool open = co_await exchange.StartStream(std::move(head));
  absl::Status error;
  while (open && error.ok() && !job.events->Done()) {
    if (exchange.disconnected()) co_return;
    const std::optional<GenerationStream::Item> item = job.events->Pop();
    std::string out;
    if (item) {
      error = EventError(item->event);
      if (error.ok()) out = job.response->Chunks(item->choice, item->event);
    } else {
      const auto heartbeat = std::chrono::steady_clock::now() + options_.heartbeat;
      const bool notified = co_await job.signal->Wait(heartbeat);
      if (!notified && !exchange.disconnected()) out = ": heartbeat\n\n";
    }
    open = co_await exchange.Write(out);
  }
  if (!open) co_return;
  std::string last;
  if (error.ok()) {
    if (job.include_usage) last = job.response->UsageChunk();
    last += "data: [DONE]\n\n";
  } else {
    const ApiError api_error = ToApiError(error);
    call.status = api_error.http_status;
    last = absl::StrCat("data: ", ErrorBody(api_error, call.request_id), "\n\n");
    exchange.CloseAfterwards();
    LogWarn("stream_failed",
            {{"request_id", call.request_id}, {"error", std::string(error.message())}});
  }
  if (co_await exchange.Write(last)) co_await exchange.EndStream();
}

}  // namespace tandem::gateway
