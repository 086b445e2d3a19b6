#include "deploy/cli/evaluation.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace tandem {
namespace {

constexpr const char* kRowsFile = "/eval.json";
constexpr const char* kQuestionsFile = "/eval.jsonl";

absl::Status LoadRows(const std::string& path, EvalSets* sets) {
  std::ifstream in(path);
  const EvalJson json = EvalJson::parse(in, nullptr, /*allow_exceptions=*/false);
  const auto rows = json.is_object() ? json.find("perplexity_rows") : json.end();
  if (!json.is_object() || rows == json.end() || !rows->is_array()) {
    return absl::InvalidArgumentError(path + ": has no list 'perplexity_rows'");
  }
  for (const EvalJson& row : *rows) {
    if (!row.is_string() && !row.is_array()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": row ", sets->rows.size(),
                                                     " is neither a text nor a list of token ids"));
    }
    sets->rows.push_back(row);
  }
  return absl::OkStatus();
}

bool IsText(const EvalJson& json, const char* key) {
  return json.contains(key) && json[key].is_string();
}

absl::Status LoadQuestions(const std::string& path, EvalSets* sets) {
  std::ifstream in(path);
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    const EvalJson json = EvalJson::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool has_prompt = json.is_object() && IsText(json, "prompt");
    const bool has_messages =
        json.is_object() && json.contains("messages") && json["messages"].is_array();
    if ((!has_prompt && !has_messages) || !IsText(json, "task") || !IsText(json, "expected")) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": line ", number, " has no task, expected answer and messages or prompt"));
    }
    if (!has_prompt && json.contains("tools") && !json["tools"].empty()) {
      return absl::UnimplementedError(absl::StrCat(
          path, ": line ", number, " has tools: it needs a 'prompt', rendered with them"));
    }
    sets->questions.push_back({json["task"], has_prompt ? json["prompt"] : EvalJson(),
                               has_messages ? json["messages"] : EvalJson(), json["expected"]});
  }
  return absl::OkStatus();
}

// Runs `work(i)` for every i below `count` on `threads` threads; the first error ends it.
absl::Status ForEach(size_t count, int threads, const std::function<absl::Status(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  absl::Status status;
  const auto loop = [&] {
    for (size_t i = next++; i < count; i = next++) {
      const absl::Status done = work(i);
      if (done.ok()) continue;
      const std::lock_guard lock(mutex);
      if (status.ok()) status = done;
      next = count;
    }
  };
  std::vector<std::thread> pool;
  const size_t wanted = std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), count);
  for (size_t i = 0; i < wanted; ++i) pool.emplace_back(loop);
  for (std::thread& thread : pool) thread.join();
  return status;
}

absl::Status Unexpected(std::string_view what) {
  return absl::InternalError(absl::StrCat("the server's answer has no ", std::string(what)));
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::max(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
                  1e-9);
}

// A completion with at least one choice.
absl::StatusOr<EvalJson> Complete(const AskServer& ask, EvalJson body) {
  body["temperature"] = 0;
  ASSIGN_OR_RETURN(const EvalJson answer, ask("/v1/completions", body));
  if (!answer.is_object() || !answer.contains("choices") || !answer["choices"].is_array() ||
      answer["choices"].empty() || !IsText(answer["choices"][0], "text")) {
    return Unexpected("choices with text");
  }
  return answer;
}

// Adds a count of the answer's usage.
absl::Status CountTokens(const EvalJson& answer, const char* count, int64_t* tokens) {
  const auto usage = answer.find("usage");
  if (usage == answer.end() || !usage->is_object() || !usage->contains(count) ||
      !(*usage)[count].is_number_integer()) {
    return Unexpected(absl::StrCat("usage with ", count));
  }
  *tokens += (*usage)[count].get<int64_t>();
  return absl::OkStatus();
}

struct NegativeLog {
  double sum = 0;
  int64_t tokens = 0;
  int64_t prompt_tokens = 0;  // those without a log-probability too
};

absl::StatusOr<NegativeLog> RowLoss(const AskServer& ask, const std::string& model,
                                    const EvalJson& row) {
  ASSIGN_OR_RETURN(
      const EvalJson answer,
      Complete(
          ask,
          {{"model", model}, {"prompt", row}, {"max_tokens", 0}, {"echo", true}, {"logprobs", 0}}));
  const EvalJson& choice = answer["choices"][0];
  const auto logprobs = choice.find("logprobs");
  if (logprobs == choice.end() || !logprobs->is_object() || !logprobs->contains("token_logprobs")) {
    return Unexpected("log-probabilities of the prompt");
  }
  NegativeLog loss;
  RETURN_IF_ERROR(CountTokens(answer, "prompt_tokens", &loss.prompt_tokens));
  for (const EvalJson& logprob : (*logprobs)["token_logprobs"]) {
    if (!logprob.is_number()) continue;  // the first token has none
    loss.sum -= logprob.get<double>();
    ++loss.tokens;
  }
  if (row.is_array() && loss.tokens + 1 != static_cast<int64_t>(row.size())) {
    return Unexpected("log-probability for every token of the prompt");
  }
  return loss;
}

absl::StatusOr<EvalJson> PromptOf(const AskServer& ask, const EvalSettings& settings,
                                  const EvalQuestion& question) {
  if (!question.prompt.is_null()) return question.prompt;
  ASSIGN_OR_RETURN(const EvalJson rendered,
                   ask("/tokenize", {{"model", settings.model}, {"messages", question.messages}}));
  if (!rendered.is_object() || !rendered.contains("tokens")) return Unexpected("tokens");
  return rendered["tokens"];
}

struct Answer {
  bool right = false;
  int64_t tokens = 0;
};

absl::StatusOr<Answer> AskQuestion(const AskServer& ask, const EvalSettings& settings,
                                   const EvalQuestion& question) {
  ASSIGN_OR_RETURN(const EvalJson prompt, PromptOf(ask, settings, question));
  ASSIGN_OR_RETURN(const EvalJson reply, Complete(ask, {{"model", settings.model},
                                                        {"prompt", prompt},
                                                        {"max_tokens", settings.max_tokens}}));
  const std::string text = reply["choices"][0]["text"];
  Answer answer;
  answer.right = absl::StripAsciiWhitespace(text) == absl::StripAsciiWhitespace(question.expected);
  RETURN_IF_ERROR(CountTokens(reply, "completion_tokens", &answer.tokens));
  return answer;
}

absl::StatusOr<double> SecondsFor(const AskServer& ask, const std::string& model,
                                  const EvalJson& prompt, int tokens) {
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(
      Complete(ask,
               {{"model", model}, {"prompt", prompt}, {"max_tokens", tokens}, {"ignore_eos", true}})
          .status());
  return SecondsSince(start);
}

// Longer minus shorter generation, so that prefill and the request itself cancel; median of three.
absl::StatusOr<double> TokensPerSecond(const AskServer& ask, const EvalSettings& settings,
                                       const EvalJson& prompt) {
  constexpr int kShort = 4;
  constexpr size_t kRounds = 3;
  std::vector<double> speeds;
  for (size_t round = 0; round < kRounds; ++round) {
    ASSIGN_OR_RETURN(const double few, SecondsFor(ask, settings.model, prompt, kShort));
    ASSIGN_OR_RETURN(const double many,
                     SecondsFor(ask, settings.model, prompt, kShort + settings.speed_tokens));
    speeds.push_back(settings.speed_tokens / std::max(many - few, 1e-9));
  }
  std::nth_element(speeds.begin(), speeds.begin() + kRounds / 2, speeds.end());
  return speeds[kRounds / 2];
}

std::vector<TaskScore> Score(const std::vector<EvalQuestion>& questions,
                             const std::vector<Answer>& answers) {
  std::vector<TaskScore> tasks;
  for (size_t i = 0; i < questions.size(); ++i) {
    auto task = std::find_if(tasks.begin(), tasks.end(), [&](const TaskScore& score) {
      return score.task == questions[i].task;
    });
    if (task == tasks.end()) task = tasks.insert(tasks.end(), {questions[i].task});
    task->right += answers[i].right ? 1 : 0;
    ++task->total;
  }
  return tasks;
}

using Note = std::function<void()>;

absl::Status ScoreRows(const EvalSets& sets, const AskServer& ask, const EvalSettings& settings,
                       const Note& note, EvalResult* result) {
  if (sets.rows.empty()) return absl::OkStatus();
  std::mutex mutex;
  NegativeLog loss;
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(ForEach(sets.rows.size(), settings.streams, [&](size_t i) -> absl::Status {
    ASSIGN_OR_RETURN(const NegativeLog row, RowLoss(ask, settings.model, sets.rows[i]));
    const std::lock_guard lock(mutex);
    loss.sum += row.sum;
    loss.tokens += row.tokens;
    loss.prompt_tokens += row.prompt_tokens;
    note();
    return absl::OkStatus();
  }));
  result->prompt_tokens_per_second = static_cast<double>(loss.prompt_tokens) / SecondsSince(start);
  if (loss.tokens > 0) result->perplexity = std::exp(loss.sum / static_cast<double>(loss.tokens));
  return absl::OkStatus();
}

absl::Status AskQuestions(const EvalSets& sets, const AskServer& ask, const EvalSettings& settings,
                          const Note& note, EvalResult* result) {
  if (sets.questions.empty()) return absl::OkStatus();
  std::mutex mutex;
  std::vector<Answer> answers(sets.questions.size());
  int64_t tokens = 0;
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(ForEach(sets.questions.size(), settings.streams, [&](size_t i) -> absl::Status {
    ASSIGN_OR_RETURN(const Answer answer, AskQuestion(ask, settings, sets.questions[i]));
    const std::lock_guard lock(mutex);
    answers[i] = answer;
    tokens += answer.tokens;
    note();
    return absl::OkStatus();
  }));
  result->answer_tokens_per_second = static_cast<double>(tokens) / SecondsSince(start);
  result->tasks = Score(sets.questions, answers);
  return absl::OkStatus();
}

}  // namespace

TaskScore EvalResult::Total() const {
  TaskScore total = {"total"};
  for (const TaskScore& task : tasks) {
    total.right += task.right;
    total.total += task.total;
  }
  return total;
}

absl::StatusOr<EvalSets> LoadEvalSets(const std::string& dir) {
  EvalSets sets;
  const std::string rows = dir + kRowsFile;
  const std::string questions = dir + kQuestionsFile;
  std::error_code error;
  const bool has_rows = std::filesystem::exists(rows, error);
  const bool has_questions = std::filesystem::exists(questions, error);
  if (!has_rows && !has_questions) {
    return absl::NotFoundError(dir +
                               ": has neither eval.json nor eval.jsonl; --tasks names a "
                               "directory that has");
  }
  if (has_rows) RETURN_IF_ERROR(LoadRows(rows, &sets));
  if (has_questions) RETURN_IF_ERROR(LoadQuestions(questions, &sets));
  if (sets.rows.empty() && sets.questions.empty()) {
    return absl::InvalidArgumentError(dir + ": its sets are empty");
  }
  return sets;
}

absl::StatusOr<EvalResult> Evaluate(const EvalSets& sets, const AskServer& ask,
                                    const EvalSettings& settings) {
  const size_t total = sets.rows.size() + sets.questions.size();
  size_t done = 0;
  const Note note = [&] {
    if (settings.progress) settings.progress(++done, total);
  };
  EvalResult result;
  RETURN_IF_ERROR(ScoreRows(sets, ask, settings, note, &result));
  RETURN_IF_ERROR(AskQuestions(sets, ask, settings, note, &result));
  EvalJson prompt = "Once upon a time";
  if (!sets.rows.empty()) {
    prompt = sets.rows[0];
    if (prompt.is_array() && prompt.size() > 16) prompt.erase(prompt.begin() + 16, prompt.end());
  }
  ASSIGN_OR_RETURN(result.tokens_per_second, TokensPerSecond(ask, settings, prompt));
  return result;
}

}  // namespace tandem
