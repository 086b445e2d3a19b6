#pragma once

// What `tandem serve`, `tandem run` and `tandem chat` can be told about the server they start.

#include <string>

#include "common/base/options.h"

namespace tandem {

struct ServeOptions {
  std::string model;  // directory; the shipped model by default
  std::string served_model_name;
  std::string host = "127.0.0.1";
  int http_port = 8080;
  int grpc_port = 50051;
  int metrics_port = 9464;  // gateway; gpu_worker + 1, expert workers from + 2 on; 0: any free ones
  bool parity = false;
  std::string pipeline = "auto";
  int max_deferred = 0;
  double max_deferred_mass = 1;
  bool defer_prompts = false;
  bool stream_prompts = false;
  double hot_experts_gb = 0;  // device memory for the busiest routed experts
  std::string link = "shm";
  int expert_workers = 0;     // 0: one per NUMA node
  std::string expert_shares;  // "3,1": relative shares of each expert; empty: equal
  std::string numa = "auto";
  int threads = 0;  // a process; 0: all allowed CPUs of its node
  std::string max_isa = "amx";
  std::string huge_pages = "auto";
  int64_t kv_cache_tokens = 0;  // 0: sized by the worker
  int max_context = 0;          // 0: the model's
  int max_sequences = 16;
  int max_step_rows = 512;
  int prefill_chunk_tokens = 0;  // 0: what keeps inter-token latency under its target
  int max_queue_requests = 256;
  int64_t max_queue_tokens = 1'000'000;
  int max_logprobs = 20;
  std::string api_key_file;
  std::string api_key;
  std::string state_dir;
  std::string weights = "copy";
  std::string log_level = "info";

  ServeOptions();
  void Register(OptionParser& parser);
};

// Of a server for one command: free ports, few sequences, only warnings in its log.
ServeOptions PrivateServerOptions();

}  // namespace tandem
