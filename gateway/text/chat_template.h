#pragma once

// Renders chat templates (Jinja2 programs that come with a model) to prompts.
//
// The program is untrusted and may loop or allocate without end, so it runs in a helper process:
// the same binary, started again as `--template-helper`, with an embedded Python interpreter, the
// Jinja2 sandbox and a memory limit. A render that exceeds its time is ended by killing the helper;
// the next render starts a new one.
//
//   // in main(), before anything else:
//   if (IsTemplateHelper(argc, argv)) return TemplateHelperMain();
//   ...
//   ASSIGN_OR_RETURN(auto chat, ChatTemplate::Create(tokenizer->config(),
//                                                    tokenizer->added_tokens(), {}));
//   ASSIGN_OR_RETURN(PromptText prompt, chat->Render({.messages_json = ...}));
//   ASSIGN_OR_RETURN(auto ids, tokenizer->Encode(prompt, {}));
//
// Text of messages and tools cannot forge control tokens: PromptText::breaks keeps spellings in it
// from being recognised (an assistant message keeps its own tags such as <think>). The text itself
// is exactly what the template writes.
//
// Thread safety: Render may be called from any thread; renders run one after another in one helper.
// Errors of Render: INVALID_ARGUMENT with the template's own sentence when the template refuses the
// conversation (raise_exception), INVALID_ARGUMENT for broken JSON, FAILED_PRECONDITION when the
// template fails in another way (type errors and the like; message without template source),
// DEADLINE_EXCEEDED and RESOURCE_EXHAUSTED for its time, memory, output and queue limits,
// UNAVAILABLE when the helper cannot be started or died.

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/text/prompt_text.h"
#include "gateway/text/tokenizer.h"

namespace tandem::gateway {

struct ChatTemplateOptions {
  std::chrono::milliseconds render_limit{2000};
  // Start of the interpreter and compilation of the templates.
  std::chrono::milliseconds start_limit{15000};
  uint64_t memory_limit_bytes = uint64_t{512} << 20;  // address space beyond the bare process's
  uint64_t output_limit_bytes = uint64_t{16} << 20;
  uint64_t input_limit_bytes = uint64_t{64} << 20;
  uint32_t max_waiting = 64;  // renders that wait for their turn
  std::chrono::milliseconds wait_limit{10000};
  // The binary to run; it must call TemplateHelperMain for --template-helper. Default: this one.
  std::string helper_binary = "/proc/self/exe";
};

// All JSON is text, so that numbers and the order of keys reach the template unchanged.
struct ChatRequest {
  std::string messages_json{};  // array of OpenAI-shaped messages
  std::string tools_json{};     // array, or empty: none
  std::string kwargs_json{};    // object of further template variables, or empty
  bool add_generation_prompt = true;
  // Recognise control tokens spelled in messages and tools as tokens (transformers' behaviour).
  bool parse_special_in_content = false;
  // Empty: "tool_use" if there are tools and the model has it, else "default".
  std::string template_name{};
  // What strftime_now reads, as UTC. Empty: the present, in local time.
  std::optional<int64_t> now_unix_s{};
};

class ChatTemplate {
 public:
  // Starts a helper and compiles all templates of `config`: a template with a syntax error is
  // INVALID_ARGUMENT here. NOT_FOUND if the config has no template.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Create(
      const TokenizerConfig& config, const std::vector<AddedToken>& added_tokens,
      ChatTemplateOptions options);
  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  absl::StatusOr<PromptText> Render(const ChatRequest& request) const;

  // The running helper's process id, 0 if none runs at the moment (tests, diagnostics).
  pid_t helper_pid() const;

 private:
  struct State;
  explicit ChatTemplate(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Whether this process was started as a template helper.
bool IsTemplateHelper(int argc, char** argv);
// Serves one ChatTemplate until its end; returns the exit code. Call it first thing in main.
int TemplateHelperMain();

}  // namespace tandem::gateway
