#include "deploy/cli/serve_options.h"

#include <cstdlib>

namespace tandem {
namespace {

// $XDG_STATE_HOME/tandem or ~/.local/state/tandem (XDG base directory specification).
std::string DefaultStateDir() {
  const char* state = std::getenv("XDG_STATE_HOME");
  if (state != nullptr && *state == '/') return std::string(state) + "/tandem";
  const char* home = std::getenv("HOME");
  return std::string(home != nullptr ? home : "/tmp") + "/.local/state/tandem";
}

}  // namespace

ServeOptions::ServeOptions() : model(TANDEM_DEFAULT_MODEL), state_dir(DefaultStateDir()) {}

void ServeOptions::Register(OptionParser& parser) {
  const IntRange port = {.min = 0, .max = 65535};
  parser.Add("model", "Model directory (config.json, *.safetensors) or GGUF file", &model);
  parser.Add("served-model-name", "Name in the API; the directory's by default",
             &served_model_name);
  parser.Add("host", "Address that the API binds", &host);
  parser.Add("http-port", "OpenAI-compatible HTTP; 0 picks a free port", &http_port, port);
  parser.Add("grpc-port", "Public gRPC; 0 picks a free port", &grpc_port, port);
  parser.Add("metrics-port", "First of the /metrics ports; 0 picks free ports", &metrics_port,
             {.min = 0, .max = 65000});
  parser.AddFlag("parity", "F32 activations end to end, sums in a fixed order", &parity);
  parser.AddChoice("pipeline", "How device and experts overlap; auto: by measured times", &pipeline,
                   {"auto", "plain", "deferral", "pingpong", "both"});
  parser.Add("max-deferred",
             "Experts of a token and layer whose sums may come a layer late; 0: exact",
             &max_deferred, {.min = 0, .max = 256});
  parser.Add("max-deferred-mass", "Share of a token's router weight that they may have, 0 to 1",
             &max_deferred_mass, {.min = 0, .max = 1});
  parser.AddFlag("defer-prompts", "Prompt tokens defer experts as well", &defer_prompts);
  parser.Add("hot-experts-gb", "Device memory (GB) for the busiest routed experts; 0: none",
             &hot_experts_gb, {.min = 0, .max = 4096});
  parser.AddFlag("stream-prompts",
                 "Long prompts stream experts through the hot experts' memory, if that is faster",
                 &stream_prompts);
  parser.AddChoice("link", "Where routed experts run: own processes or the gpu_worker's", &link,
                   {"shm", "inprocess"});
  parser.Add("expert-workers", "Expert workers; 0: one per NUMA node", &expert_workers,
             {.min = 0, .max = 64});
  parser.Add("expert-shares", "Relative shares of each expert a worker, like 3,1", &expert_shares);
  parser.Add("numa", "auto, off or a number of simulated nodes", &numa);
  parser.Add("threads", "Threads a process; 0: all allowed CPUs of its node", &threads,
             {.min = 0, .max = 1024});
  parser.AddChoice("max-isa", "Best instruction set to use", &max_isa,
                   {"ref", "avx2", "avx512", "amx"});
  parser.AddChoice("huge-pages", "2 MiB pages for weights", &huge_pages,
                   {"auto", "require", "off"});
  parser.Add("kv-cache-tokens", "Tokens in the KV cache; 0: chosen from free memory",
             &kv_cache_tokens, {.min = 0, .max = int64_t{1} << 32});
  parser.Add("max-context", "Longest prompt plus answer; 0: the model's", &max_context,
             {.min = 0, .max = 1 << 24});
  parser.Add("max-sequences", "Sequences generated at once", &max_sequences,
             {.min = 1, .max = 1024});
  parser.Add("max-step-rows", "Tokens computed in one step", &max_step_rows,
             {.min = 1, .max = 16384});
  parser.Add("prefill-chunk-tokens",
             "Prompt tokens a step; 0: what keeps inter-token latency under its target",
             &prefill_chunk_tokens, {.min = 0, .max = 16384});
  parser.Add("max-queue-requests", "Waiting requests before 429", &max_queue_requests,
             {.min = 0, .max = 1'000'000});
  parser.Add("max-queue-tokens", "Waiting prompt tokens before 429", &max_queue_tokens,
             {.min = 1, .max = int64_t{1} << 40});
  parser.Add("max-logprobs", "Most alternatives a token that a request may ask for", &max_logprobs,
             {.min = 0, .max = 1'000'000});
  parser.Add("api-key-file", "File with one API key a line; empty: no key needed", &api_key_file);
  parser.Add("api-key", "One API key; better given as TANDEM_API_KEY, as arguments can be read",
             &api_key);
  parser.Add("state-dir",
             "Keeps packed and hot experts between starts; empty: packed at each start",
             &state_dir);
  parser.AddChoice("weights", "Copy packed weights into memory, or map the packed file", &weights,
                   {"copy", "map"});
  parser.AddChoice("log-level", "Least severe log lines shown", &log_level,
                   {"debug", "info", "warn", "error"});
}

ServeOptions PrivateServerOptions() {
  ServeOptions options;
  options.http_port = options.grpc_port = options.metrics_port = 0;
  options.max_sequences = 4;
  options.log_level = "warn";
  return options;
}

}  // namespace tandem
