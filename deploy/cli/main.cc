// The `tandem` command: starts a server on this machine, or one for a single answer or a chat, and
// works on model directories.

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "deploy/cli/eval_command.h"
#include "deploy/cli/exit_code.h"
#include "deploy/cli/generate_client.h"
#include "deploy/cli/local_server.h"
#include "deploy/cli/pack_command.h"
#include "deploy/cli/quantize_command.h"
#include "deploy/cli/trace_command.h"

namespace tandem {
namespace {

int Serve(const ServeOptions& options) {
  auto server = LocalServer::Create({options, /*quiet=*/false});
  if (!server.ok()) return PrintRefusal(server.status());
  std::cerr << (*server)->report() << std::flush;
  const int code = (*server)->Run([&](const ReadyServer& ready) {
    const BoundPorts& ports = ready.ports;
    std::cerr << absl::StrCat("ready      http://", options.host, ":", ports.http, "/v1  grpc ",
                              options.host, ":", ports.grpc, "  metrics http://", options.host, ":",
                              ports.metrics, "/metrics\n")
              << std::flush;
  });
  if (!(*server)->failure().empty()) std::cerr << "tandem: " << (*server)->failure() << "\n";
  return code;
}

struct AskOptions {
  std::string prompt;
  int max_tokens = 0;
  double temperature = -1;
};

int WithClient(const ServeOptions& options, const std::function<int(GenerateClient&)>& talk) {
  return RunWithServer(options, [&](const ReadyServer& ready) {
    const auto key = ClientApiKey(options);
    GenerateClient client(absl::StrCat("127.0.0.1:", ready.ports.grpc), key.ok() ? *key : "");
    return talk(client);
  });
}

bool Answer(GenerateClient& client, std::vector<ChatTurn>& turns, const AskOptions& ask) {
  const auto text = client.Chat(turns, {ask.max_tokens, ask.temperature},
                                [](std::string_view piece) { std::cout << piece << std::flush; });
  std::cout << std::endl;
  if (!text.ok()) {
    std::cerr << "tandem: " << text.status().message() << "\n";
    return false;
  }
  turns.push_back({"assistant", *text});
  return true;
}

int RunOnce(const ServeOptions& options, const AskOptions& ask) {
  return WithClient(options, [&](GenerateClient& client) {
    std::vector<ChatTurn> turns = {{"user", ask.prompt}};
    return Answer(client, turns, ask) ? kExitOk : kExitFailure;
  });
}

int Chat(const ServeOptions& options, const AskOptions& ask) {
  return WithClient(options, [&](GenerateClient& client) {
    const bool terminal = isatty(STDIN_FILENO) != 0;
    if (terminal) std::cerr << "Ask; an empty line or Ctrl-D ends.\n";
    std::vector<ChatTurn> turns;
    for (std::string line;;) {
      if (terminal) std::cerr << "> " << std::flush;
      if (!std::getline(std::cin, line) || line.empty()) return static_cast<int>(kExitOk);
      turns.push_back({"user", line});
      if (!Answer(client, turns, ask)) turns.pop_back();
    }
  });
}

int Main(int argc, char** argv) {
  OptionParser parser("tandem", "Serves mixture-of-experts models from one machine");
  ServeOptions serve_options;
  OptionParser serve(parser, "serve", "Start the server and keep it running");
  serve_options.Register(serve);

  ServeOptions run_options = PrivateServerOptions();
  AskOptions ask;
  OptionParser run(parser, "run", "Answer one prompt");
  run_options.Register(run);
  run.AddPositional("prompt", "What to ask", &ask.prompt);
  run.Required();
  OptionParser chat(parser, "chat", "Talk with the model in the terminal");
  ServeOptions chat_options = PrivateServerOptions();
  chat_options.Register(chat);
  for (OptionParser* command : {&run, &chat}) {
    command->Add("max-tokens", "Longest answer; 0: what the context leaves", &ask.max_tokens,
                 {.min = 0, .max = 1 << 24});
    command->Add("temperature", "0 is greedy; negative: the model's default", &ask.temperature);
  }
  QuantizeOptions quantize_options;
  OptionParser quantize(parser, "quantize", "Write a model with quantized weights");
  quantize_options.Register(quantize);
  EvalOptions eval_options;
  OptionParser eval(parser, "eval", "Measure a model: bytes, speed, perplexity, task accuracy");
  eval_options.Register(eval);
  PackOptions pack_options;
  OptionParser pack(parser, "pack", "Write a model's packed expert weights to the state directory");
  pack_options.Register(pack);
  TraceOptions trace_options;
  OptionParser trace(parser, "trace", "Record what a running server does, as a timeline");
  trace_options.Register(trace);
  parser.RequireSubcommand();
  if (const auto exit_code = parser.Parse(argc, argv)) return *exit_code;

  if (quantize.Chosen()) return RunQuantize(quantize_options);
  if (pack.Chosen()) return RunPack(pack_options);
  if (trace.Chosen()) return RunTrace(trace_options);
  const ServeOptions* options = &chat_options;
  if (serve.Chosen()) options = &serve_options;
  if (run.Chosen()) options = &run_options;
  if (eval.Chosen()) options = &eval_options.serve;
  InitLogging("tandem", options->log_level);
  if (serve.Chosen()) return Serve(*options);
  if (eval.Chosen()) return RunEval(eval_options);
  return run.Chosen() ? RunOnce(*options, ask) : Chat(*options, ask);
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) { return tandem::Main(argc, argv); }
