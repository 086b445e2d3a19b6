#include "gateway/api/generation_stream.h"

#include <gmock/gmock.h>

#include "gateway/api/api_keys.h"
#include "tests/fakes/fake_engine.h"
#include "tests/testing/temp_dir.h"

namespace tandem::gateway {
namespace {

// Keeps its listeners, so that a test sends the events.
class ManualEngine final : public Engine {
 public:
  absl::StatusOr<uint64_t> Submit(GenerationRequest,
                                  std::shared_ptr<GenerationListener> listener) override {
    if (listeners.size() == refuse_from) return absl::ResourceExhaustedError("full");
    listeners.push_back(std::move(listener));
    return listeners.size() - 1;
  }
  void Cancel(uint64_t handle) override { cancelled.push_back(handle); }
  absl::Status Ready() const override { return absl::OkStatus(); }
  void FollowServing(std::function<void(bool)>) override {}
  std::optional<ServedModel> Model() const override { return std::nullopt; }
  void Drain(int64_t) override {}

  std::vector<std::shared_ptr<GenerationListener>> listeners;
  std::vector<uint64_t> cancelled;
  size_t refuse_from = 100;
};

GenerationEvent Token(const std::string& text, uint32_t id) {
  GenerationEvent event;
  event.text = text;
  event.token_ids = {id};
  event.completion_tokens = id;
  return event;
}

GenerationEvent Last() {
  GenerationEvent event;
  event.finished = true;
  event.reason = FinishReason::kLength;
  event.completion_tokens = 9;
  return event;
}

TEST(GenerationStream, EventsOfAChoiceMergeUntilTheyAreRead) {
  ManualEngine engine;
  const auto stream = std::make_shared<GenerationStream>(&engine, GenerationStreamOptions{});
  int wakeups = 0;
  stream->SetWakeup([&] { ++wakeups; });
  ASSERT_TRUE(stream->Start(std::vector<GenerationRequest>(2)).ok());
  EXPECT_FALSE(stream->Pop().has_value());
  engine.listeners[0]->OnEvent(Token("a", 1));
  engine.listeners[1]->OnEvent(Token("x", 1));
  engine.listeners[0]->OnEvent(Token("b", 2));
  engine.listeners[0]->OnEvent(Last());
  EXPECT_EQ(wakeups, 4);
  const auto first = stream->Pop();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->choice, 0u);
  EXPECT_EQ(first->event.text, "ab");
  EXPECT_THAT(first->event.token_ids, ::testing::ElementsAre(1, 2));
  EXPECT_TRUE(first->event.finished);
  EXPECT_EQ(first->event.completion_tokens, 9u);
  EXPECT_FALSE(stream->Done());
  EXPECT_EQ(stream->Pop()->event.text, "x");
  engine.listeners[1]->OnEvent(Last());
  EXPECT_TRUE(stream->Pop()->event.finished);
  EXPECT_TRUE(stream->Done());
  stream->Close();
  EXPECT_TRUE(engine.cancelled.empty());
}

TEST(GenerationStream, AnErrorComesAfterTheTextBeforeIt) {
  ManualEngine engine;
  const auto stream = std::make_shared<GenerationStream>(&engine, GenerationStreamOptions{});
  ASSERT_TRUE(stream->Start(std::vector<GenerationRequest>(1)).ok());
  engine.listeners[0]->OnEvent(Token("a", 1));
  GenerationEvent error = Last();
  error.reason = FinishReason::kError;
  error.error = absl::UnavailableError("lost");
  engine.listeners[0]->OnEvent(error);
  const auto text = stream->Pop();
  EXPECT_EQ(text->event.text, "a");
  EXPECT_TRUE(EventError(text->event).ok());
  EXPECT_TRUE(absl::IsUnavailable(EventError(stream->Pop()->event)));
  EXPECT_TRUE(stream->Done());
}

TEST(GenerationStream, UnreadBytesAreBounded) {
  ManualEngine engine;
  const auto stream = std::make_shared<GenerationStream>(
      &engine, GenerationStreamOptions{.max_buffered_bytes = 100});
  ASSERT_TRUE(stream->Start(std::vector<GenerationRequest>(2)).ok());
  // One large event is no sign of a slow reader.
  engine.listeners[0]->OnEvent(Token(std::string(5000, 'x'), 1));
  EXPECT_EQ(stream->Pop()->event.text.size(), 5000u);
  engine.listeners[0]->OnEvent(Token(std::string(5000, 'x'), 2));
  engine.listeners[0]->OnEvent(Token("y", 3));
  EXPECT_TRUE(stream->Overflowed());
  EXPECT_THAT(engine.cancelled, ::testing::ElementsAre(0, 1));
  const auto error = stream->Pop();
  ASSERT_TRUE(error.has_value());
  EXPECT_TRUE(absl::IsResourceExhausted(EventError(error->event)));
  engine.listeners[1]->OnEvent(Last());
  EXPECT_FALSE(stream->Pop().has_value());
  EXPECT_TRUE(stream->Done());
}

TEST(GenerationStream, ARefusedChoiceCancelsTheOthers) {
  ManualEngine engine;
  engine.refuse_from = 2;
  const auto stream = std::make_shared<GenerationStream>(&engine, GenerationStreamOptions{});
  EXPECT_TRUE(absl::IsResourceExhausted(stream->Start(std::vector<GenerationRequest>(3))));
  EXPECT_THAT(engine.cancelled, ::testing::ElementsAre(0, 1));
}

TEST(GenerationStream, CloseCancelsWhatRunsAndEndsWakeups) {
  ManualEngine engine;
  const auto stream = std::make_shared<GenerationStream>(&engine, GenerationStreamOptions{});
  int wakeups = 0;
  stream->SetWakeup([&] { ++wakeups; });
  ASSERT_TRUE(stream->Start(std::vector<GenerationRequest>(2)).ok());
  engine.listeners[0]->OnEvent(Last());
  stream->Close();
  engine.listeners[1]->OnEvent(Token("late", 1));
  EXPECT_EQ(wakeups, 1);
  EXPECT_THAT(engine.cancelled, ::testing::ElementsAre(1));
}

TEST(ApiKeys, TenantsFollowKeys) {
  const ApiKeys keys({"one", "two"});
  ASSERT_TRUE(keys.Tenant("one").ok());
  EXPECT_EQ(*keys.Tenant("one"), *ApiKeys({"one"}).Tenant("one"));
  EXPECT_NE(*keys.Tenant("one"), *keys.Tenant("two"));
  EXPECT_TRUE(absl::IsUnauthenticated(keys.Tenant("three").status()));
  EXPECT_TRUE(absl::IsUnauthenticated(keys.Tenant("").status()));
  EXPECT_EQ(*ApiKeys().Tenant(""), "");
}

TEST(ApiKeys, FileHasAKeyALine) {
  const tandem::testing::TempDir dir;
  const auto keys = ApiKeys::ReadFile(dir.Write("keys", "# comment\n\nfirst\r\nsecond \n"));
  ASSERT_TRUE(keys.ok());
  EXPECT_THAT(*keys, ::testing::ElementsAre("first", "second"));
  EXPECT_FALSE(ApiKeys::ReadFile(dir.Write("empty", "# nothing\n")).ok());
  EXPECT_FALSE(ApiKeys::ReadFile(dir.path() / "absent").ok());
}

TEST(BearerKey, TakesTheSchemeInAnyCase) {
  EXPECT_EQ(BearerKey("Bearer abc"), "abc");
  EXPECT_EQ(BearerKey("bearer  abc"), "abc");
  EXPECT_EQ(BearerKey("Basic abc"), "");
  EXPECT_EQ(BearerKey(""), "");
}

}  // namespace
}  // namespace tandem::gateway
