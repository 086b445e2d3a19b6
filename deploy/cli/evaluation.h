#pragma once

// What a served model is worth: perplexity over rows of text, accuracy over questions with one
// right answer each, and how fast it is at both and for a single stream, all asked over the OpenAI
// HTTP API, so that what is measured is what clients get.
//
// A directory of sets holds either or both of
//   eval.json   {"perplexity_rows": [row ...]}, a row a list of token ids or a text
//   eval.jsonl  one question a line: {"task", "expected", "messages" or "prompt"}
// as the shipped model does. "prompt" is the text that the chat template gives, and goes before
// messages: questions with tools need it, since the server takes no tools to render.
//
// Perplexity is exp of the mean negative log-probability of all tokens of all rows but each row's
// first. An answer is right when it equals `expected` without surrounding blanks. Messages are
// rendered by the server's /tokenize; answers come greedily from /v1/completions, whose text no
// parser of reasoning or tools has touched.
//
// Functions; thread-safe. `ask` is called by `streams` threads at once. Errors name file and line,
// or what the server did not say.

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem {

using EvalJson = nlohmann::ordered_json;

struct EvalQuestion {
  std::string task;
  EvalJson prompt;  // a text, or null: messages are rendered
  EvalJson messages;
  std::string expected;
};

struct EvalSets {
  std::vector<EvalJson> rows;
  std::vector<EvalQuestion> questions;
};

// Errors: NOT_FOUND when the directory has neither file.
absl::StatusOr<EvalSets> LoadEvalSets(const std::string& dir);

// Posts a body to a path and returns the answer of status 200.
using AskServer =
    std::function<absl::StatusOr<EvalJson>(const std::string& path, const EvalJson& body)>;

struct EvalSettings {
  std::string model;  // its name in the API
  int streams = 8;
  int max_tokens = 120;                                     // of an answer
  int speed_tokens = 128;                                   // generated to measure the speed
  std::function<void(size_t done, size_t total)> progress;  // of rows and questions; may be null
};

struct TaskScore {
  std::string task;
  int right = 0;
  int total = 0;

  double Share() const { return total == 0 ? 0 : static_cast<double>(right) / total; }
};

struct EvalResult {
  std::optional<double> perplexity;  // absent: no rows
  std::vector<TaskScore> tasks;      // in the order of the file
  // Of the rows' prompts, and of the questions' answers (their prompts take time, but do not
  // count): `streams` at once. Absent where there are none.
  std::optional<double> prompt_tokens_per_second;
  std::optional<double> answer_tokens_per_second;
  double tokens_per_second = 0;  // of one stream, prefill not counted

  TaskScore Total() const;
};

absl::StatusOr<EvalResult> Evaluate(const EvalSets& sets, const AskServer& ask,
                                    const EvalSettings& settings);

}  // namespace tandem
