#include "gateway/api/openai_api.h"

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "gateway/api/openai_call.h"
#include "gateway/api/request_id.h"

namespace tandem::gateway {
namespace {

namespace asio = boost::asio;

// The client's own id where it is fit to be echoed.
std::string RequestId(const HttpRequest& request) {
  const std::string_view id = request.Header("x-request-id");
  return IsRequestId(id) ? std::string(id) : NewRequestId();
}

std::string_view KeyOf(const HttpRequest& request) {
  const std::string_view bearer = BearerKey(request.Header("authorization"));
  if (!bearer.empty()) return bearer;
  const std::string_view key = request.Header("x-api-key");
  return key.empty() ? request.Header("api-key") : key;
}

std::string_view MethodOf(const HttpRequest& request) {
  return request.method == "HEAD" ? std::string_view("GET") : std::string_view(request.method);
}

}  // namespace

HttpResponse JsonResponse(std::string body, std::string_view request_id) {
  HttpResponse response;
  response.body = std::move(body);
  response.headers.emplace_back("X-Request-Id", request_id);
  return response;
}

HttpResponse ApiErrorResponse(const ApiError& error, std::string_view request_id) {
  HttpResponse response = JsonResponse(ErrorBody(error, request_id), request_id);
  response.status = error.http_status;
  if (error.retry_after_s) {
    response.headers.emplace_back("Retry-After", absl::StrCat(*error.retry_after_s));
  }
  if (error.http_status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

HttpResponse StatusResponse(const absl::Status& status, std::string_view request_id) {
  if (status.code() == absl::StatusCode::kInternal || status.code() == absl::StatusCode::kUnknown) {
    LogError("request_failed",
             {{"request_id", std::string(request_id)}, {"error", std::string(status.message())}});
  }
  return ApiErrorResponse(ToApiError(status), request_id);
}

OpenAiApi::OpenAiApi(Parts parts, OpenAiApiOptions options) : parts_(parts), options_(options) {}

HttpResponse OpenAiApi::ErrorResponse(int status, std::string_view message) {
  parts_.metrics->Count("http", "none", absl::StrCat(status), 0);
  return ApiErrorResponse(HttpError(status, message), NewRequestId());
}

std::optional<HttpResponse> OpenAiApi::Admit(const HttpRequest& head) {
  const Route route = FindRoute(head.path);
  const std::string request_id = RequestId(head);
  std::optional<HttpResponse> refusal;
  const absl::Status known =
      route.open ? absl::OkStatus() : parts_.keys->Tenant(KeyOf(head)).status();
  if (!known.ok()) {
    refusal = StatusResponse(known, request_id);
  } else if (route.endpoint == Endpoint::kUnknown) {
    refusal = ApiErrorResponse(HttpError(404, "There is no such path.", "not_found"), request_id);
  } else if (head.method == "OPTIONS") {
    refusal = HttpResponse{.status = 204, .body = {}, .content_type = {}, .headers = {}};
    refusal->headers.emplace_back("Allow", absl::StrCat(std::string(route.method), ", OPTIONS"));
  } else if (MethodOf(head) != route.method) {
    const std::string message =
        absl::StrCat("This path accepts ", std::string(route.method), " only.");
    refusal = ApiErrorResponse(HttpError(405, message, "method_not_allowed"), request_id);
    refusal->headers.emplace_back("Allow", absl::StrCat(std::string(route.method), ", OPTIONS"));
  } else if (route.endpoint == Endpoint::kNotServed) {
    const std::string message = absl::StrCat(head.path, " is not served by this server.");
    refusal = ApiErrorResponse(HttpError(404, message, "endpoint_not_served"), request_id);
  }
  if (refusal) {
    parts_.metrics->Count("http", std::string(route.name), absl::StrCat(refusal->status), 0);
  }
  return refusal;
}

asio::awaitable<void> OpenAiApi::Handle(HttpExchange& exchange) {
  Call call;
  call.request_id = RequestId(exchange.request());
  call.path = exchange.request().path;
  call.route = FindRoute(call.path);
  call.tenant = parts_.keys->Tenant(KeyOf(exchange.request())).value_or("");
  if (call.route.endpoint == Endpoint::kChat || call.route.endpoint == Endpoint::kCompletions) {
    co_await Generate(exchange, call);
  } else {
    HttpResponse response = co_await Answer(exchange, call);
    call.status = response.status;
    co_await exchange.Respond(std::move(response));
  }
  Finish(call);
}

void OpenAiApi::Finish(const Call& call) {
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - call.start;
  parts_.metrics->Count("http", std::string(call.route.name), absl::StrCat(call.status),
                        elapsed.count());
  if (call.route.open) return;  // probes come every few seconds
  LogInfo("http_call", {{"request_id", call.request_id},
                        {"endpoint", std::string(call.route.name)},
                        {"status", LogValue(call.status)},
                        {"duration_ms", LogValue(static_cast<int64_t>(elapsed.count() * 1e3))},
                        {"prompt_tokens", LogValue(call.prompt_tokens)},
                        {"completion_tokens", LogValue(call.completion_tokens)}});
}

asio::awaitable<HttpResponse> OpenAiApi::Answer(HttpExchange& exchange, Call& call) {
  switch (call.route.endpoint) {
    case Endpoint::kHealthLive:
      co_return JsonResponse("{\"status\":\"live\"}", call.request_id);
    case Endpoint::kHealthReady:
      co_return Health(call);
    case Endpoint::kModels:
      co_return Models(call, {});
    case Endpoint::kModel:
      co_return Models(call, ModelIdOf(call.path));
    case Endpoint::kAnthropic:
      co_return ApiErrorResponse(HttpError(400,
                                           "The Anthropic API (/v1/messages) is not supported; use "
                                           "/v1/chat/completions.",
                                           "endpoint_not_served"),
                                 call.request_id);
    default:
      break;
  }
  const bool tokenize = call.route.endpoint == Endpoint::kTokenize;
  auto work = [this, &call, tokenize, body = exchange.TakeBody()] {
    return tokenize ? Tokenize(call, body) : Detokenize(call, body);
  };
  co_return co_await RunOn(*parts_.pool, std::move(work));
}

HttpResponse OpenAiApi::Health(const Call& call) const {
  const absl::Status ready = parts_.engine->Ready();
  if (ready.ok()) return JsonResponse("{\"status\":\"ready\"}", call.request_id);
  return StatusResponse(absl::UnavailableError(ready.message()), call.request_id);
}

HttpResponse OpenAiApi::Models(const Call& call, std::string_view only) const {
  const absl::StatusOr<ServedModel> model = parts_.builder->Model(only);
  if (!model.ok()) return StatusResponse(model.status(), call.request_id);
  const GenerationDefaults& defaults = parts_.builder->defaults();
  JsonWriter card;
  card.BeginObject().Key("id").String(model->name).Key("object").String("model");
  card.Key("created").Int(0).Key("owned_by").String("tandem");
  card.Key("max_model_len").Uint(model->max_context_tokens);
  card.Key("vocab_size").Uint(model->vocab_size);
  card.Key("model_type").String(model->model_type);
  card.Key("default_sampling").BeginObject();
  card.Key("temperature").Float(static_cast<float>(defaults.temperature));
  card.Key("top_k").Int(defaults.top_k);
  card.Key("top_p").Float(static_cast<float>(defaults.top_p));
  card.Key("min_p").Float(static_cast<float>(defaults.min_p));
  card.Key("repetition_penalty").Float(static_cast<float>(defaults.repetition_penalty));
  card.EndObject().EndObject();
  if (!only.empty()) return JsonResponse(card.Take(), call.request_id);
  JsonWriter list;
  list.BeginObject().Key("object").String("list");
  list.Key("data").BeginArray().Raw(card.Take()).EndArray().EndObject();
  return JsonResponse(list.Take(), call.request_id);
}

HttpResponse OpenAiApi::Tokenize(const Call& call, std::string_view body) const {
  const auto answer = [&]() -> absl::StatusOr<std::string> {
    ASSIGN_OR_RETURN(const Json document, ParseRequestJson(body));
    ASSIGN_OR_RETURN(const TokenizeBody request, ParseTokenizeRequest(document));
    ASSIGN_OR_RETURN(const ServedModel model, parts_.builder->Model(request.model));
    ASSIGN_OR_RETURN(const std::vector<uint32_t> ids,
                     parts_.builder->Tokenize(request.prompt, request.prompt_name));
    JsonWriter json;
    json.BeginObject().Key("count").Uint(ids.size());
    json.Key("max_model_len").Uint(model.max_context_tokens);
    json.Key("tokens").BeginArray();
    for (const uint32_t id : ids) json.Uint(id);
    json.EndArray();
    if (request.return_token_strings) {
      json.Key("token_strs").BeginArray();
      for (const uint32_t id : ids) json.String(parts_.builder->tokenizer()->TokenBytes(id));
      json.EndArray();
    }
    json.EndObject();
    return json.Take();
  }();
  return answer.ok() ? JsonResponse(*answer, call.request_id)
                     : StatusResponse(answer.status(), call.request_id);
}

HttpResponse OpenAiApi::Detokenize(const Call& call, std::string_view body) const {
  const auto answer = [&]() -> absl::StatusOr<std::string> {
    ASSIGN_OR_RETURN(const Json document, ParseRequestJson(body));
    ASSIGN_OR_RETURN(const DetokenizeBody request, ParseDetokenizeRequest(document));
    RETURN_IF_ERROR(parts_.builder->Model(request.model).status());
    ASSIGN_OR_RETURN(const std::string text,
                     parts_.builder->Detokenize(request.ids, request.skip_special_tokens));
    JsonWriter json;
    json.BeginObject().Key("prompt").String(text).EndObject();
    return json.Take();
  }();
  return answer.ok() ? JsonResponse(*answer, call.request_id)
                     : StatusResponse(answer.status(), call.request_id);
}

}  // namespace tandem::gateway
