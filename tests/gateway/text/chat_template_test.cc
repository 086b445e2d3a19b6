// The helper process: limits on time, memory and output, its death, and what templates may do.

#include "gateway/text/chat_template.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <thread>

#include "tests/gateway/text/text_testing.h"

namespace tandem::gateway {
namespace {

using std::chrono::milliseconds;

TokenizerConfig Config(const std::string& source) {
  TokenizerConfig config;
  config.chat_templates["default"] = source;
  config.special_tokens["bos_token"] = "<s>";
  return config;
}

std::unique_ptr<ChatTemplate> Make(const std::string& source,
                                   ChatTemplateOptions options = testing::PatientOptions()) {
  auto chat = ChatTemplate::Create(Config(source), {}, options);
  EXPECT_TRUE(chat.ok()) << chat.status();
  return chat.ok() ? std::move(*chat) : nullptr;
}

absl::StatusOr<std::string> Render(const ChatTemplate& chat, const std::string& kwargs = {}) {
  const auto prompt = chat.Render(
      {.messages_json = R"([{"role": "user", "content": "hi"}])", .kwargs_json = kwargs});
  if (!prompt.ok()) return prompt.status();
  return prompt->text;
}

// The renders of one template text that spells its case's name with `{{ ... }}` parts.
std::string MustRender(const std::string& source, const std::string& kwargs = {}) {
  const auto chat = Make(source);
  if (chat == nullptr) return "(no template)";
  const auto text = Render(*chat, kwargs);
  return text.ok() ? *text : text.status().ToString();
}

// A template that hangs or not as its variable says.
constexpr char kMayHang[] =
    "{% if hang %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}ok";

TEST(ChatTemplate, EndlessTemplateIsKilledAndTheNextRenderSucceeds) {
  ChatTemplateOptions options = testing::PatientOptions();
  options.render_limit = milliseconds(2000);
  const auto chat = Make(kMayHang, options);
  ASSERT_NE(chat, nullptr);
  const pid_t first = chat->helper_pid();
  ASSERT_GT(first, 0);
  EXPECT_EQ(Render(*chat, R"({"hang": true})").status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(chat->helper_pid(), 0);
  EXPECT_EQ(kill(first, 0), -1) << "the helper still runs";
  EXPECT_EQ(*Render(*chat), "ok");
  EXPECT_NE(chat->helper_pid(), first);
}

TEST(ChatTemplate, LongComputationInsideCCodeIsKilledToo) {
  ChatTemplateOptions options = testing::PatientOptions();
  options.render_limit = milliseconds(2000);
  const auto chat = Make("{{ (7 ** (7 ** n)) % 2 if n else 'ok' }}", options);
  ASSERT_NE(chat, nullptr);
  EXPECT_EQ(Render(*chat, R"({"n": 9})").status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(*Render(*chat, R"({"n": 0})"), "ok");
}

TEST(ChatTemplate, MemoryBombEndsAtTheLimit) {
  ChatTemplateOptions options = testing::PatientOptions();
  options.memory_limit_bytes = uint64_t{256} << 20;
  const auto chat =
      Make("{% set x = 'a' * n %}{% if n > 1000 %}{% set y = x * 1000 %}{% endif %}ok", options);
  ASSERT_NE(chat, nullptr);
  const absl::StatusCode code = Render(*chat, R"({"n": 100000000})").status().code();
  // Where the allocator aborts instead of failing (sanitizers), the helper dies.
  EXPECT_TRUE(code == absl::StatusCode::kResourceExhausted ||
              code == absl::StatusCode::kUnavailable)
      << static_cast<int>(code);
  EXPECT_EQ(*Render(*chat, R"({"n": 10})"), "ok");
}

TEST(ChatTemplate, OutputIsBounded) {
  ChatTemplateOptions options = testing::PatientOptions();
  options.output_limit_bytes = 10000;
  const auto chat = Make("{% for i in range(n) %}0123456789{% endfor %}", options);
  ASSERT_NE(chat, nullptr);
  EXPECT_EQ(Render(*chat, R"({"n": 1000})")->size(), 10000u);
  EXPECT_EQ(Render(*chat, R"({"n": 1001})").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Render(*chat, R"({"n": 1})")->size(), 10u);
}

TEST(ChatTemplate, HelpersDeathIsOneErrorOrNone) {
  const auto chat = Make("{{ messages[0].content }}");
  ASSERT_NE(chat, nullptr);
  const pid_t first = chat->helper_pid();
  kill(first, SIGKILL);
  const auto during = Render(*chat);
  EXPECT_TRUE(during.ok() || during.status().code() == absl::StatusCode::kUnavailable)
      << during.status();
  EXPECT_EQ(*Render(*chat), "hi");
  EXPECT_NE(chat->helper_pid(), first);
}

TEST(ChatTemplate, TheHelperEndsWithItsOwner) {
  pid_t pid = 0;
  {
    const auto chat = Make("x");
    ASSERT_NE(chat, nullptr);
    pid = chat->helper_pid();
    EXPECT_EQ(kill(pid, 0), 0);
  }
  EXPECT_EQ(kill(pid, 0), -1);
}

TEST(ChatTemplate, MissingBinaryIsUnavailable) {
  ChatTemplateOptions options = testing::PatientOptions();
  options.helper_binary = "/nonexistent/tandem-gateway";
  EXPECT_EQ(ChatTemplate::Create(Config("x"), {}, options).status().code(),
            absl::StatusCode::kUnavailable);
  // One that is no helper: it ends at once.
  options.helper_binary = "/bin/true";
  EXPECT_EQ(ChatTemplate::Create(Config("x"), {}, options).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(ChatTemplate, SyntaxErrorsAreFoundAtTheStart) {
  const auto chat = ChatTemplate::Create(Config("a\n{% if %}"), {}, testing::PatientOptions());
  EXPECT_EQ(chat.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(chat.status().message().find("line 2"), std::string::npos) << chat.status();
  EXPECT_EQ(ChatTemplate::Create({}, {}, {}).status().code(), absl::StatusCode::kNotFound);
}

TEST(ChatTemplate, ManyThreadsShareOneHelper) {
  ChatTemplateOptions options = testing::PatientOptions();
  const auto chat = Make("{{ n }}", options);
  ASSERT_NE(chat, nullptr);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&chat, t] {
      for (int i = 0; i < 20; ++i) {
        const std::string n = std::to_string(t * 1000 + i);
        const auto text = Render(*chat, "{\"n\": " + n + "}");
        ASSERT_TRUE(text.ok()) << text.status();
        EXPECT_EQ(*text, n);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ChatTemplate, QueueIsBounded) {
  ChatTemplateOptions options = testing::PatientOptions();
  options.max_waiting = 1;
  const auto chat = Make("ok", options);
  ASSERT_NE(chat, nullptr);
  const pid_t helper = chat->helper_pid();
  ASSERT_EQ(kill(helper, SIGSTOP), 0);
  // Nothing finishes now: of three renders one is in the helper, one waits, and one must be refused
  // (two, if the second comes before the first has been taken).
  std::promise<void> first_refusal;
  std::atomic<int> refused = 0;
  std::atomic<int> rendered = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      const auto text = Render(*chat);
      if (text.ok()) {
        ++rendered;
      } else if (absl::IsResourceExhausted(text.status()) && ++refused == 1) {
        first_refusal.set_value();
      }
    });
  }
  first_refusal.get_future().wait();
  kill(helper, SIGCONT);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused + rendered, 3);
  EXPECT_GE(rendered, 1);
}

// What a program that came with a model must not reach: it fails, or sees nothing.
TEST(ChatTemplate, SandboxKeepsTemplatesInside) {
  const auto chat = Make(
      "{% if n == 0 %}{{ ''.__class__.__mro__[1].__subclasses__() }}"
      "{% elif n == 1 %}{{ messages.__class__ }}"
      "{% elif n == 2 %}{{ raise_exception.__globals__ }}"
      "{% elif n == 3 %}{{ messages.insert(0, 1) or 'inserted' }}"
      "{% elif n == 4 %}{{ messages[0].update({'a': 1}) }}"
      "{% elif n == 5 %}{% set f = ''|attr('__class__') %}{{ f.mro() }}"
      "{% elif n == 6 %}{{ '{0.__class__.__mro__}'.format(1) }}"
      "{% elif n == 7 %}{% import 'os' as os %}{{ os }}"
      "{% elif n == 8 %}{% include '/etc/passwd' %}"
      "{% elif n == 9 %}{{ messages.append.__self__.__class__ }}"
      "{% elif n == 10 %}{{ self._TemplateReference__context.environment }}"
      "{% else %}reached{% endif %}");
  ASSERT_NE(chat, nullptr);
  for (int n = 0; n <= 10; ++n) {
    const auto text = Render(*chat, "{\"n\": " + std::to_string(n) + "}");
    if (text.ok()) {
      EXPECT_EQ(*text, "") << n;
    } else {
      EXPECT_EQ(text.status().code(), absl::StatusCode::kFailedPrecondition) << n;
    }
  }
  EXPECT_EQ(*Render(*chat, R"({"n": 11})"), "reached");
}

TEST(ChatTemplate, InterpreterIgnoresTheEnvironment) {
  setenv("PYTHONHOME", "/nonexistent", 1);
  setenv("PYTHONPATH", "/nonexistent", 1);
  setenv("PATH", "/nonexistent", 1);
  EXPECT_EQ(MustRender("ok"), "ok");
  unsetenv("PYTHONHOME");
  unsetenv("PYTHONPATH");
}

TEST(ChatTemplate, OffersWhatTemplatesExpect) {
  EXPECT_EQ(MustRender("{{ bos_token }}|{{ eos_token }}|{{ tools is none }}|"
                       "{{ add_generation_prompt }}"),
            "<s>||True|True");
  EXPECT_EQ(MustRender("{% generation %}a{{ 1 }}{% endgeneration %}"), "a1");
  EXPECT_EQ(MustRender("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
                       "{% endfor %}"),
            "01");
  EXPECT_EQ(MustRender("  {% if true %}\nx\n  {% endif %}\ny"), "x\ny");
  EXPECT_EQ(MustRender("{% set l = [] %}{% set _ = l.append(1) %}{{ l }}"), "[1]");
  EXPECT_EQ(MustRender("{{ messages|map(attribute='role')|tojson }}"), "[\"user\"]");
  EXPECT_EQ(MustRender("{{ v|tojson }}|{{ v|tojson(indent=1) }}|{{ v|tojson(ensure_ascii=True) }}",
                       "{\"v\": {\"\xC3\xA9\": 1.0, \"a\": \"<&>\"}}"),
            "{\"\xC3\xA9\": 1.0, \"a\": \"<&>\"}|{\n \"\xC3\xA9\": 1.0,\n \"a\": \"<&>\"\n}|"
            "{\"\\u00e9\": 1.0, \"a\": \"<&>\"}");
  EXPECT_EQ(MustRender("{{ ('{\"a\": [1]}'|from_json).a[0] }}"), "1");
  EXPECT_EQ(MustRender("{{ strftime_now('%Y') | length }}"), "4");
  EXPECT_EQ(MustRender("{{ n|tojson }} {{ f|tojson }}",
                       R"({"n": 123456789012345678901234567890, "f": 1e2})"),
            "123456789012345678901234567890 100.0");
}

TEST(ChatTemplate, RefusalCarriesOnlyTheSentence) {
  const auto chat = Make("{{ raise_exception('Roles must alternate: ' + messages[0].content) }}");
  ASSERT_NE(chat, nullptr);
  const auto text = Render(*chat);
  EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(text.status().message(), "Roles must alternate: hi");
}

TEST(ChatTemplate, BrokenRequestsAreInvalidArguments) {
  const auto chat = Make("x");
  ASSERT_NE(chat, nullptr);
  const ChatRequest requests[] = {
      {.messages_json = ""},
      {.messages_json = "{}"},
      {.messages_json = "[{]"},
      {.messages_json = "[\"\xFF\"]"},
      {.messages_json = "[\"\\ud800\"]"},
      {.messages_json = std::string(100, '[') + std::string(100, ']')},
      {.messages_json = "[]", .tools_json = "{}"},
      {.messages_json = "[]", .kwargs_json = "[]"},
      {.messages_json = "[]", .kwargs_json = R"({"messages": []})"},
      {.messages_json = "[]", .template_name = "rag"},
      {.messages_json = "[1e999]"},
  };
  for (const ChatRequest& request : requests) {
    EXPECT_EQ(chat->Render(request).status().code(), absl::StatusCode::kInvalidArgument)
        << request.messages_json << request.kwargs_json;
  }
  EXPECT_EQ(*Render(*chat), "x");
}

TEST(ChatTemplate, NamedTemplatesAreChosen) {
  TokenizerConfig config = Config("plain");
  config.chat_templates["tool_use"] = "with tools";
  ChatTemplateOptions options = testing::PatientOptions();
  const auto chat = ChatTemplate::Create(config, {}, options);
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_EQ((*chat)->Render({.messages_json = "[]"})->text, "plain");
  EXPECT_EQ((*chat)->Render({.messages_json = "[]", .tools_json = "[]"})->text, "with tools");
  EXPECT_EQ((*chat)->Render({.messages_json = "[]", .template_name = "tool_use"})->text,
            "with tools");
}

TEST(ChatTemplate, ShippedModelsTemplateRenders) {
  const Tokenizer* tokenizer = testing::SharedTokenizer("models/tandem-tiny");
  if (tokenizer == nullptr) GTEST_SKIP() << "no models/tandem-tiny";
  const auto chat = ChatTemplate::Create(tokenizer->config(), tokenizer->added_tokens(),
                                         testing::PatientOptions());
  ASSERT_TRUE(chat.ok()) << chat.status();
  const auto prompt =
      (*chat)->Render({.messages_json = R"([{"role": "user", "content": "What is 17 + 25?"}])"});
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_EQ(prompt->text, "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_TRUE(prompt->breaks.empty());
}

}  // namespace
}  // namespace tandem::gateway
