#include "deploy/cli/eval_command.h"

#include <unistd.h>

#include <fstream>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/model/expert_tensors.h"
#include "common/model/memory_plan.h"
#include "common/model/model_loader.h"
#include "deploy/cli/exit_code.h"
#include "deploy/cli/http_client.h"
#include "deploy/cli/local_server.h"

namespace tandem {
namespace {

// A format as people call it; the type of its scales is left out.
const char* PlainName(WeightFormat format) {
  constexpr const char* kNames[] = {
      "f32",    "bf16",   "f16",       "fp8",       "mxfp8",     "int8",      "int8",  "int8",
      "int4",   "int4",   "int4",      "int4-asym", "int4-asym", "int4-asym", "mxfp4", "nvfp4",
      "q4_1",   "q5_0",   "q5_1",      "q2_k",      "q3_k",      "q4_k",      "q5_k",  "q6_k",
      "iq4_nl", "iq4_xs", "int8-asym", "int8-asym", "int8-asym"};
  static_assert(std::size(kNames) == static_cast<size_t>(WeightFormat::kCount));
  return kNames[static_cast<size_t>(format)];
}

std::string StorageName(const WeightMatrix& matrix) {
  const char* const name = PlainName(matrix.format());
  if (IsPlain(matrix.format())) return name;
  if (matrix.group_columns() == 0) return absl::StrCat(name, " channel");
  return absl::StrCat(name, " g", matrix.group_columns());
}

absl::StatusOr<std::string> ServedModelName(const HttpClient& client) {
  ASSIGN_OR_RETURN(const EvalJson models, client.Get("/v1/models"));
  if (!models.is_object() || !models.contains("data") || !models["data"].is_array() ||
      models["data"].empty() || !models["data"][0].contains("id") ||
      !models["data"][0]["id"].is_string()) {
    return absl::InternalError("the server lists no model");
  }
  return models["data"][0]["id"].get<std::string>();
}

void ShowProgress(size_t done, size_t total) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::cerr << "\rasked " << done << " of " << total << (done == total ? "\r\033[K" : "")
            << std::flush;
}

absl::StatusOr<EvalResult> AskAll(const EvalOptions& options, const EvalSets& sets,
                                  const std::string& url) {
  ASSIGN_OR_RETURN(const std::string key, ClientApiKey(options.serve));
  const HttpClient client(url, key);
  EvalSettings settings;
  settings.streams = options.streams;
  settings.speed_tokens = options.speed_tokens;
  settings.progress = ShowProgress;
  ASSIGN_OR_RETURN(settings.model, ServedModelName(client));
  const AskServer ask = [&client](const std::string& path, const EvalJson& body) {
    return client.Post(path, body);
  };
  return Evaluate(sets, ask, settings);
}

int Report(const EvalOptions& options, const EvalReport& report) {
  std::cout << FormatEvalTable(report);
  if (options.json.empty()) return kExitOk;
  std::ofstream out(options.json);
  out << EvalToJson(report).dump(2) << "\n";
  out.close();
  if (out.good()) return kExitOk;
  return PrintRefusal(absl::UnavailableError(options.json + ": cannot be written"));
}

std::string SpeedText(const std::optional<double>& tokens_per_second) {
  return tokens_per_second ? absl::StrFormat("%.0f", *tokens_per_second) : "-";
}

EvalJson OptionalJson(const std::optional<double>& value) {
  return value ? EvalJson(*value) : EvalJson();
}

}  // namespace

EvalOptions::EvalOptions() { serve = PrivateServerOptions(); }

void EvalOptions::Register(OptionParser& parser) {
  serve.max_sequences = 16;
  serve.Register(parser);
  parser.Add("url", "A running server (http://host:port) instead of one of its own", &url);
  parser.Add("tasks", "Directory with eval.json and eval.jsonl; the model's by default", &tasks);
  parser.Add("json", "File to write the result to", &json);
  parser.Add("streams", "Questions asked at once", &streams, {.min = 1, .max = 256});
  parser.Add("speed-tokens", "Tokens generated to measure the speed", &speed_tokens,
             {.min = 1, .max = 1 << 16});
}

absl::StatusOr<ExpertStorage> DescribeExperts(const std::string& model) {
  ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(model));
  ASSIGN_OR_RETURN(const ModelSpec spec, LoadModelSpec(*checkpoint));
  ASSIGN_OR_RETURN(const ExpertTensors experts, ExpertTensors::Create(*checkpoint, spec));
  ExpertStorage storage;
  for (int layer = 0; layer < static_cast<int>(spec.layers.size()); ++layer) {
    if (!experts.has_layer(layer)) continue;
    for (int expert = 0; expert < experts.experts(); ++expert) {
      for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
        const WeightMatrix& matrix = experts.matrix(layer, expert, part);
        if (storage.bytes == 0) storage.format = StorageName(matrix);
        storage.bytes += matrix.stored_bytes();
      }
    }
  }
  return storage;
}

std::string FormatEvalTable(const EvalReport& report) {
  const EvalResult& result = report.result;
  std::string head =
      absl::StrFormat("%-16s %12s %10s %10s %10s %10s %8s", "format", "experts", "prompt t/s",
                      "answer t/s", "stream t/s", "perplexity", "accuracy");
  const std::string perplexity =
      result.perplexity ? absl::StrFormat("%.5f", *result.perplexity) : "-";
  const std::string accuracy =
      result.tasks.empty() ? "-" : absl::StrFormat("%.1f %%", 100 * result.Total().Share());
  std::string row =
      absl::StrFormat("%-16s %12s %10s %10s %10s %10s %8s", report.experts.format,
                      FormatBytes(report.experts.bytes), SpeedText(result.prompt_tokens_per_second),
                      SpeedText(result.answer_tokens_per_second),
                      SpeedText(result.tokens_per_second), perplexity, accuracy);
  for (const TaskScore& task : result.tasks) {
    const int width = std::max(6, static_cast<int>(task.task.size()));
    absl::StrAppendFormat(&head, "  %*s", width, task.task);
    absl::StrAppendFormat(&row, "  %*.1f", width, 100 * task.Share());
  }
  std::string text = head + "\n" + row + "\n";
  if (!report.kernels.empty()) {
    absl::StrAppend(&text, report.kernels, " kernels, ", report.threads, " threads; ");
  }
  absl::StrAppend(&text, "prompts and answers ", report.streams, " at a time\n");
  return text;
}

EvalJson EvalToJson(const EvalReport& report) {
  const EvalResult& result = report.result;
  EvalJson tasks = EvalJson::object();
  for (const TaskScore& task : result.tasks) {
    tasks[task.task] = {{"right", task.right}, {"total", task.total}};
  }
  const TaskScore total = result.Total();
  const bool known = !report.kernels.empty();
  return {{"model", report.model},
          {"format", report.experts.format},
          {"expert_bytes", report.experts.bytes},
          {"kernels", known ? EvalJson(report.kernels) : EvalJson()},
          {"threads", known ? EvalJson(report.threads) : EvalJson()},
          {"streams", report.streams},
          {"prompt_tokens_per_second", OptionalJson(result.prompt_tokens_per_second)},
          {"answer_tokens_per_second", OptionalJson(result.answer_tokens_per_second)},
          {"tokens_per_second", result.tokens_per_second},
          {"perplexity", OptionalJson(result.perplexity)},
          {"accuracy", total.total > 0 ? EvalJson(total.Share()) : EvalJson()},
          {"tasks", std::move(tasks)}};
}

int RunEval(const EvalOptions& options) {
  EvalReport report;
  report.model = options.serve.model;
  report.streams = options.streams;
  const auto sets = LoadEvalSets(options.tasks.empty() ? report.model : options.tasks);
  if (!sets.ok()) return PrintRefusal(sets.status());
  auto experts = DescribeExperts(report.model);
  if (!experts.ok()) return PrintRefusal(experts.status());
  report.experts = *std::move(experts);
  const auto measure = [&](const std::string& url) {
    auto result = AskAll(options, *sets, url);
    if (!result.ok()) return PrintRefusal(result.status());
    report.result = *std::move(result);
    return Report(options, report);
  };
  if (!options.url.empty()) return measure(options.url);
  return RunWithServer(options.serve, [&](const ReadyServer& ready) {
    report.kernels = ready.kernels;
    report.threads = ready.threads;
    return measure(absl::StrCat("http://127.0.0.1:", ready.ports.http));
  });
}

}  // namespace tandem
