// tandem-gateway: the process that clients talk to. Builds every object of the gateway, serves
// until SIGTERM or SIGINT, then drains.
//
// Exit codes: 0 after a drain, 2 for bad options, 3 when a port is in use, 4 when the model
// directory cannot be served, 1 otherwise.

#include <signal.h>
#include <sys/stat.h>
#include <time.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/options.h"
#include "common/base/signals.h"
#include "common/base/status.h"
#include "common/base/trace.h"
#include "common/rpc/rpc_server.h"
#include "common/rpc/trace_service.h"
#include "gateway/api/grpc_server.h"
#include "gateway/api/openai_api.h"
#include "gateway/model_directory.h"
#include "gateway/serving_engine.h"
#include "gateway/text_sink.h"

namespace tandem::gateway {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitAddressInUse = 3;
constexpr int kExitBadModel = 4;
// How often readiness is copied to the gRPC health service.
constexpr long kReadyPollNs = 200'000'000;

struct Flags {
  std::string model;
  std::string served_model_name;
  std::string gpu_worker = "unix:/tmp/tandem-gpu.sock";
  std::string host = "127.0.0.1";
  int http_port = 8080;
  int grpc_port = 50051;
  int metrics_port = 9464;
  std::string ports_file;
  std::string control_listen;
  std::string api_key_file;
  std::string api_key;
  int max_queue_requests = 256;
  int64_t max_queue_tokens = int64_t{1} << 20;
  int prefill_chunk_tokens = 0;
  int itl_target_ms = 100;
  int max_logprobs = 20;
  int max_connections = 1024;
  int64_t max_body_bytes = int64_t{64} << 20;
  int64_t stream_buffer_bytes = int64_t{1} << 20;
  int heartbeat_ms = 10'000;
  int drain_timeout_ms = 30'000;
  int io_threads = 2;
  int blocking_threads = 2;
  std::string log_level = "info";
};

std::optional<int> ParseFlags(int argc, char** argv, Flags* flags) {
  OptionParser parser("tandem-gateway", "Serves a model's clients over HTTP and gRPC");
  parser.Add("model", "Model directory or GGUF file", &flags->model);
  parser.Required();
  parser.Add("served-model-name", "Name clients use; default: the directory's name",
             &flags->served_model_name);
  parser.Add("gpu-worker", "gRPC address of the gpu_worker", &flags->gpu_worker);
  parser.Add("host", "IP address to bind", &flags->host);
  const IntRange port = {.min = 0, .max = 65535};
  parser.Add("http-port", "Port of the HTTP API; 0 picks one", &flags->http_port, port);
  parser.Add("grpc-port", "Port of the gRPC API; 0 picks one", &flags->grpc_port, port);
  parser.Add("metrics-port", "Port of /metrics; 0 picks one, -1: none", &flags->metrics_port,
             {.min = -1, .max = 65535});
  parser.Add("ports-file", "File that gets the bound ports as JSON", &flags->ports_file);
  parser.Add(
      "control-listen",
      "gRPC address of the operator's services, unix:PATH or HOST:PORT, without keys; empty: "
      "none",
      &flags->control_listen);
  parser.Add("api-key-file", "File of accepted API keys, one a line", &flags->api_key_file);
  parser.Add("api-key", "An accepted API key; better given by environment or file",
             &flags->api_key);
  parser.Add("max-queue-requests", "Requests that may wait; more get 429",
             &flags->max_queue_requests, {.min = 1, .max = 1 << 20});
  parser.Add("max-queue-tokens", "Prompt tokens that may wait; more get 429",
             &flags->max_queue_tokens, {.min = 1, .max = int64_t{1} << 40});
  parser.Add("prefill-chunk-tokens", "Prompt tokens in one step; 0: chosen by itl-target-ms",
             &flags->prefill_chunk_tokens, {.min = 0, .max = 1 << 20});
  parser.Add("itl-target-ms", "Time between tokens that prefill chunks must keep",
             &flags->itl_target_ms, {.min = 1, .max = 600'000});
  parser.Add("max-logprobs", "Largest logprobs and top_logprobs of a request", &flags->max_logprobs,
             {.min = 0, .max = 1 << 20});
  parser.Add("max-connections", "HTTP connections", &flags->max_connections,
             {.min = 1, .max = 1 << 20});
  parser.Add("max-body-bytes", "Largest HTTP request body", &flags->max_body_bytes,
             {.min = 1024, .max = int64_t{1} << 32});
  parser.Add("stream-buffer-bytes", "Unread output at which a slow client is dropped",
             &flags->stream_buffer_bytes, {.min = 1024, .max = int64_t{1} << 32});
  parser.Add("heartbeat-ms", "Silence after which a stream gets a comment line",
             &flags->heartbeat_ms, {.min = 10, .max = 3'600'000});
  parser.Add("drain-timeout-ms", "Time that open requests get after SIGTERM",
             &flags->drain_timeout_ms, {.min = 0, .max = 3'600'000});
  parser.Add("io-threads", "Threads of the HTTP server", &flags->io_threads, {.min = 1, .max = 64});
  parser.Add("blocking-threads", "Threads that render templates and tokenize",
             &flags->blocking_threads, {.min = 1, .max = 64});
  parser.AddChoice("log-level", "debug, info, warn or error", &flags->log_level,
                   {"debug", "info", "warn", "error"});
  if (std::optional<int> code = parser.Parse(argc, argv)) return code;
  if (flags->host == "localhost") flags->host = "127.0.0.1";
  InitLogging("gateway", flags->log_level);
  LogInfo("starting", {{"options", parser.Summary()}});
  return std::nullopt;
}

int Fail(const absl::Status& status, int code) {
  LogError("refused", {{"error", std::string(status.message())}});
  return code;
}

int BindExitCode(const absl::Status& status) {
  return absl::IsUnavailable(status) ? kExitAddressInUse : kExitFailure;
}

std::string ServedName(const Flags& flags) {
  if (!flags.served_model_name.empty()) return flags.served_model_name;
  std::error_code error;
  const std::filesystem::path dir = std::filesystem::canonical(flags.model, error);
  if (error) return flags.model;
  return (dir.extension() == ".gguf" ? dir.stem() : dir.filename()).string();
}

absl::StatusOr<ApiKeys> LoadKeys(const Flags& flags) {
  std::vector<std::string> keys;
  if (!flags.api_key_file.empty()) {
    ASSIGN_OR_RETURN(keys, ApiKeys::ReadFile(flags.api_key_file));
  }
  if (!flags.api_key.empty()) keys.push_back(flags.api_key);
  return ApiKeys(keys);
}

EngineOptions MakeEngineOptions(const Flags& flags, const ModelDirectory& model, Tracer* tracer) {
  EngineOptions options;
  options.tracer = tracer;
  options.worker_address = flags.gpu_worker;
  options.model_dir = flags.model;
  options.served_name = ServedName(flags);
  options.end_ids = model.end_ids;
  options.max_queue_requests = static_cast<uint32_t>(flags.max_queue_requests);
  options.max_queue_tokens = static_cast<uint64_t>(flags.max_queue_tokens);
  options.prefill_chunk_tokens = static_cast<uint32_t>(flags.prefill_chunk_tokens);
  options.itl_target_ms = static_cast<uint32_t>(flags.itl_target_ms);
  return options;
}

HttpServerOptions MakeHttpOptions(const Flags& flags) {
  HttpServerOptions options;
  options.host = flags.host;
  options.port = flags.http_port;
  options.io_threads = flags.io_threads;
  options.max_connections = static_cast<uint32_t>(flags.max_connections);
  options.body_limit_bytes = static_cast<uint64_t>(flags.max_body_bytes);
  return options;
}

// Whole or not at all: readers poll for it.
absl::Status WritePorts(const std::string& path, std::string_view json) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << json << '\n';
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) return absl::UnavailableError(path + ": cannot be written");
  return absl::OkStatus();
}

// Null where the operator wants none.
absl::StatusOr<std::unique_ptr<RpcServer>> StartControl(const Flags& flags,
                                                        TraceService& trace_service) {
  if (flags.control_listen.empty()) return nullptr;
  umask(0077);  // sockets are for this user only
  return RpcServer::Start({.address = flags.control_listen,
                           .service_name = trace::v1::TraceService::service_full_name()},
                          {&trace_service});
}

// Until the first stop signal the health service follows the engine: its listener tells of the
// worker, the poll of an engine that is stuck. An error: the model cannot be loaded, so that
// waiting is of no use.
absl::Status ServeUntilSignal(const sigset_t& signals, Engine& engine, GrpcServer& grpc_server) {
  const absl::Cleanup unfollow = [&engine] { engine.FollowServing({}); };
  engine.FollowServing([&grpc_server](bool serving) { grpc_server.SetServing(serving); });
  bool serving = false;
  for (;;) {
    const absl::Status ready = engine.Ready();
    if (ready.ok() != serving) {
      serving = ready.ok();
      grpc_server.SetServing(serving);
      LogInfo(serving ? "ready" : "not_ready", {{"reason", std::string(ready.message())}});
    }
    if (!ready.ok() && !absl::IsUnavailable(ready)) return ready;
    const timespec interval = {.tv_sec = 0, .tv_nsec = kReadyPollNs};
    if (sigtimedwait(&signals, nullptr, &interval) > 0) return absl::OkStatus();
  }
}

// Not ready first, so that balancers look elsewhere; then no new work; then the rest is finished.
void DrainAll(const Flags& flags, Engine& engine, HttpServer& http_server,
              GrpcServer& grpc_server) {
  LogInfo("draining", {{"timeout_ms", LogValue(flags.drain_timeout_ms)}});
  grpc_server.SetServing(false);
  http_server.StopAccepting();
  engine.Drain(flags.drain_timeout_ms);
  // What is left are the last bytes of responses.
  constexpr std::chrono::milliseconds kLastBytes{1000};
  http_server.WaitUntilIdle(kLastBytes);
  grpc_server.Shutdown(kLastBytes);
  LogInfo("drained");
}

int Serve(const Flags& flags, const ModelDirectory& model, const ApiKeys& keys,
          const sigset_t& signals) {
  auto registry = std::make_shared<prometheus::Registry>();
  Tracer tracer;
  const std::unique_ptr<Engine> engine =
      MakeEngine(MakeEngineOptions(flags, model, &tracer),
                 MakeTextSinkFactory(model.tokenizer.get()), registry);
  BuilderLimits limits;
  limits.max_logprobs = static_cast<uint32_t>(flags.max_logprobs);
  const RequestBuilder builder(engine.get(), model.tokenizer.get(), model.chat_template.get(),
                               model.defaults, limits);
  ApiMetrics api_metrics(registry);
  BlockingPool pool(static_cast<size_t>(flags.blocking_threads));
  const GenerationStreamOptions stream = {.max_buffered_bytes =
                                              static_cast<size_t>(flags.stream_buffer_bytes)};
  OpenAiApi api({engine.get(), &builder, &keys, &pool, &api_metrics},
                {.heartbeat = std::chrono::milliseconds(flags.heartbeat_ms), .stream = stream});

  auto http_server = HttpServer::Start(MakeHttpOptions(flags), &api);
  if (!http_server.ok()) return Fail(http_server.status(), BindExitCode(http_server.status()));
  GrpcServerOptions grpc_options;
  grpc_options.host = flags.host;
  grpc_options.port = flags.grpc_port;
  auto grpc_server =
      GrpcServer::Start(grpc_options, {engine.get(), &builder, &keys, &pool, &api_metrics, stream});
  if (!grpc_server.ok()) return Fail(grpc_server.status(), kExitAddressInUse);
  std::unique_ptr<MetricsServer> metrics_server;
  if (flags.metrics_port >= 0) {
    auto started = MetricsServer::Start(flags.host, flags.metrics_port, registry);
    if (!started.ok()) return Fail(started.status(), kExitAddressInUse);
    metrics_server = *std::move(started);
    LogInfo("metrics_listening", {{"port", LogValue(metrics_server->port())}});
  }
  TraceService trace_service("gateway", &tracer);
  const auto control = StartControl(flags, trace_service);
  if (!control.ok()) return Fail(control.status(), kExitFailure);
  const int metrics_port = metrics_server == nullptr ? -1 : metrics_server->port();
  LogInfo("listening", {{"host", flags.host},
                        {"http_port", LogValue((*http_server)->port())},
                        {"grpc_port", LogValue((*grpc_server)->port())},
                        {"api_key_required", keys.required() ? "yes" : "no"}});
  if (!flags.ports_file.empty()) {
    const absl::Status written =
        WritePorts(flags.ports_file, absl::StrCat("{\"http\":", (*http_server)->port(),
                                                  ",\"grpc\":", (*grpc_server)->port(),
                                                  ",\"metrics\":", metrics_port, "}"));
    if (!written.ok()) return Fail(written, kExitFailure);
  }
  const absl::Status ended = ServeUntilSignal(signals, *engine, **grpc_server);
  DrainAll(flags, *engine, **http_server, **grpc_server);
  return ended.ok() ? 0 : Fail(ended, kExitBadModel);
}

int Main(int argc, char** argv) {
  if (IsTemplateHelper(argc, argv)) return TemplateHelperMain();
  Flags flags;
  if (std::optional<int> code = ParseFlags(argc, argv, &flags)) return *code;
  const absl::StatusOr<ApiKeys> keys = LoadKeys(flags);
  if (!keys.ok()) return Fail(keys.status(), kExitFailure);
  if (!keys->required() && flags.host != "127.0.0.1" && flags.host != "::1") {
    LogWarn("open_to_everyone", {{"host", flags.host}, {"hint", "set --api-key-file"}});
  }
  const absl::StatusOr<ModelDirectory> model = LoadModelDirectory(flags.model);
  if (!model.ok()) return Fail(model.status(), kExitBadModel);
  const sigset_t signals = BlockStopSignals();
  return Serve(flags, *model, *keys, signals);
}

}  // namespace
}  // namespace tandem::gateway

int main(int argc, char** argv) { return tandem::gateway::Main(argc, argv); }
