#include "deploy/cli/evaluation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <string>

#include "deploy/cli/eval_command.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using testing::TempDir;

constexpr const char* kQuestions =
    R"({"task": "sums", "messages": [{"role": "user", "content": "1 + 1"}], "expected": "2"}
{"task": "tools", "messages": [], "tools": [{"z": 1}], "prompt": "<s>call", "expected": "called"}

{"task": "sums", "messages": [{"role": "user", "content": "2 + 2"}], "expected": "4"}
)";

// A server that knows one answer a question and gives every prompt token the probability 1/4.
class FakeServer {
 public:
  absl::StatusOr<EvalJson> Ask(const std::string& path, const EvalJson& body) {
    ++calls;
    if (body.at("model") != "m") return absl::NotFoundError("another model");
    if (path == "/tokenize") {
      const std::string content = body.at("messages").at(0).at("content");
      if (body.contains("tools") || body.contains("chat_template_kwargs")) {
        return absl::InvalidArgumentError("no tools are taken");
      }
      return EvalJson{{"tokens", {content == "1 + 1" ? 1 : 2}}};
    }
    if (path != "/v1/completions") return absl::NotFoundError(path);
    EXPECT_EQ(body.at("temperature"), 0);
    EvalJson choice = {{"text", ""}};
    if (body.contains("echo")) {
      EvalJson logprobs = EvalJson::array({nullptr});
      for (size_t i = 1; i < body.at("prompt").size() - missing_logprobs; ++i) {
        logprobs.push_back(std::log(0.25));
      }
      choice["logprobs"] = {{"token_logprobs", logprobs}};
    } else if (body.at("prompt") == EvalJson::array({1})) {
      choice["text"] = " 2\n";
    } else if (body.at("prompt") == EvalJson::array({2})) {
      choice["text"] = "5";
    } else if (body.at("prompt") == "<s>call") {
      choice["text"] = "called";
    }
    EvalJson answer = {{"choices", {choice}}};
    if (with_usage) answer["usage"] = {{"prompt_tokens", 7}, {"completion_tokens", 3}};
    return answer;
  }

  std::atomic<int> calls{0};
  size_t missing_logprobs = 0;
  bool with_usage = true;
};

EvalSettings Settings() {
  EvalSettings settings;
  settings.model = "m";
  settings.streams = 3;
  settings.speed_tokens = 8;
  return settings;
}

TEST(Evaluation, CountsRightAnswersByTaskAndAveragesLogProbabilities) {
  TempDir dir;
  dir.Write("eval.jsonl", kQuestions);
  dir.Write("eval.json", R"({"perplexity_rows": [[5, 6, 7], [5, 6, 7, 8, 9]]})");
  const auto sets = LoadEvalSets(dir.path());
  ASSERT_TRUE(sets.ok()) << sets.status();
  FakeServer server;
  size_t shown = 0;
  EvalSettings settings = Settings();
  settings.progress = [&](size_t done, size_t total) {
    EXPECT_EQ(total, 5u);
    shown = done;
  };
  const auto result = Evaluate(
      *sets, [&](const auto& path, const auto& body) { return server.Ask(path, body); }, settings);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_TRUE(result->perplexity.has_value());
  EXPECT_NEAR(*result->perplexity, 4.0, 1e-9);
  ASSERT_EQ(result->tasks.size(), 2u);
  EXPECT_EQ(result->tasks[0].task, "sums");
  EXPECT_EQ(result->tasks[0].right, 1);
  EXPECT_EQ(result->tasks[0].total, 2);
  EXPECT_EQ(result->tasks[1].right, 1);
  EXPECT_EQ(result->Total().right, 2);
  EXPECT_GT(result->tokens_per_second, 0);
  EXPECT_GT(result->prompt_tokens_per_second.value_or(0), 0);
  EXPECT_GT(result->answer_tokens_per_second.value_or(0), 0);
  EXPECT_EQ(shown, 5u);
}

TEST(Evaluation, SetsMayLackOneFile) {
  TempDir dir;
  dir.Write("eval.jsonl", kQuestions);
  const auto sets = LoadEvalSets(dir.path());
  ASSERT_TRUE(sets.ok());
  FakeServer server;
  const auto result = Evaluate(
      *sets, [&](const auto& path, const auto& body) { return server.Ask(path, body); },
      Settings());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->perplexity.has_value());
  EXPECT_FALSE(result->prompt_tokens_per_second.has_value());
  EXPECT_TRUE(result->answer_tokens_per_second.has_value());
}

TEST(Evaluation, ErrorOfTheServerEndsItEarly) {
  TempDir dir;
  std::string rows = R"({"perplexity_rows": [[1, 2])";
  for (int i = 0; i < 500; ++i) rows += ", [1, 2]";
  dir.Write("eval.json", rows + "]}");
  const auto sets = LoadEvalSets(dir.path());
  ASSERT_TRUE(sets.ok()) << sets.status();
  std::atomic<int> calls{0};
  const auto result = Evaluate(
      *sets,
      [&](const auto&, const auto&) -> absl::StatusOr<EvalJson> {
        ++calls;
        return absl::UnavailableError("gone");
      },
      Settings());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(calls.load(), 10);
}

TEST(Evaluation, AnswersWithoutWhatWasAskedForAreRefused) {
  TempDir dir;
  dir.Write("eval.json", R"({"perplexity_rows": [[5, 6, 7]]})");
  const auto sets = LoadEvalSets(dir.path());
  ASSERT_TRUE(sets.ok());
  FakeServer server;
  server.missing_logprobs = 1;
  const auto ask = [&](const auto& path, const auto& body) { return server.Ask(path, body); };
  EXPECT_FALSE(Evaluate(*sets, ask, Settings()).ok());
  FakeServer uncounted;
  uncounted.with_usage = false;
  const absl::Status status =
      Evaluate(
          *sets, [&](const auto& path, const auto& body) { return uncounted.Ask(path, body); },
          Settings())
          .status();
  EXPECT_NE(status.message().find("usage"), std::string::npos) << status;
  const auto empty = [&](const auto&, const auto&) -> absl::StatusOr<EvalJson> {
    return EvalJson::object();
  };
  EXPECT_FALSE(Evaluate(*sets, empty, Settings()).ok());
}

TEST(EvalReport, SpeedsStandBesideWhatTheyWereMeasuredWith) {
  EvalReport report;
  report.model = "m";
  report.experts = {"int4 g32", 5 << 20};
  report.streams = 8;
  report.result.prompt_tokens_per_second = 1234;
  report.result.tokens_per_second = 56;
  const std::string unknown = FormatEvalTable(report);
  EXPECT_EQ(unknown.find("threads"), std::string::npos) << unknown;
  EXPECT_TRUE(EvalToJson(report)["threads"].is_null());
  report.kernels = "avx512";
  report.threads = 2;
  const std::string text = FormatEvalTable(report);
  EXPECT_NE(text.find("avx512 kernels, 2 threads; prompts and answers 8 at a time"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("5.00 MiB       1234          -         56"), std::string::npos) << text;
  const EvalJson json = EvalToJson(report);
  EXPECT_EQ(json["threads"], 2);
  EXPECT_EQ(json["prompt_tokens_per_second"], 1234);
  EXPECT_TRUE(json["answer_tokens_per_second"].is_null());
}

TEST(LoadEvalSets, RefusesByFileAndLine) {
  TempDir none;
  EXPECT_EQ(LoadEvalSets(none.path()).status().code(), absl::StatusCode::kNotFound);
  TempDir bad_line;
  bad_line.Write("eval.jsonl", std::string(kQuestions) + "{\"task\": 3}\n");
  const auto line = LoadEvalSets(bad_line.path());
  ASSERT_FALSE(line.ok());
  EXPECT_NE(line.status().message().find("line 5"), std::string::npos) << line.status();
  TempDir tools;
  tools.Write("eval.jsonl", R"({"task": "t", "messages": [], "tools": [{}], "expected": "x"})");
  EXPECT_EQ(LoadEvalSets(tools.path()).status().code(), absl::StatusCode::kUnimplemented);
  TempDir bad_rows;
  bad_rows.Write("eval.json", R"({"perplexity_rows": [3]})");
  EXPECT_FALSE(LoadEvalSets(bad_rows.path()).ok());
  TempDir not_json;
  not_json.Write("eval.json", "nothing");
  EXPECT_FALSE(LoadEvalSets(not_json.path()).ok());
}

}  // namespace
}  // namespace tandem
