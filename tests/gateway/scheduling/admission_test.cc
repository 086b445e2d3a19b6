#include "gateway/scheduling/admission.h"

#include <gtest/gtest.h>

namespace tandem::gateway {
namespace {

TEST(Admission, RefusesWhenRequestsAreTooMany) {
  Admission admission({.max_requests = 2, .max_tokens = 1000});
  EXPECT_TRUE(admission.TryEnter(1).ok());
  EXPECT_TRUE(admission.TryEnter(1).ok());
  EXPECT_EQ(admission.TryEnter(1).code(), absl::StatusCode::kResourceExhausted);
  admission.Leave(1);
  EXPECT_TRUE(admission.TryEnter(1).ok());
}

TEST(Admission, RefusesWhenTokensAreTooMany) {
  Admission admission({.max_requests = 100, .max_tokens = 10});
  EXPECT_TRUE(admission.TryEnter(6).ok());
  EXPECT_EQ(admission.TryEnter(5).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(admission.TryEnter(4).ok());
  EXPECT_EQ(admission.requests(), 2u);
  EXPECT_EQ(admission.tokens(), 10u);
  admission.Leave(6);
  admission.Leave(4);
  EXPECT_EQ(admission.tokens(), 0u);
}

TEST(Admission, LetsALongPromptInWhenNobodyWaits) {
  Admission admission({.max_requests = 100, .max_tokens = 10});
  EXPECT_TRUE(admission.TryEnter(50).ok());
  EXPECT_FALSE(admission.TryEnter(1).ok());
}

TEST(CheckFits, NamesTheLimitThatIsExceeded) {
  const CapacityLimits limits = {.max_context_tokens = 100,
                                 .groups = {{.block_tokens = 4, .block_count = 16}}};
  EXPECT_TRUE(CheckFits(limits, 60, 5).ok());
  const absl::Status cache = CheckFits(limits, 60, 6);
  EXPECT_EQ(cache.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(cache.message().find("prompt (60 tokens) and max_tokens (6)"), absl::string_view::npos);
  EXPECT_NE(cache.message().find("KV cache of 65"), absl::string_view::npos);
  const absl::Status context = CheckFits(limits, 60, 41);
  EXPECT_EQ(context.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(context.message().find("context of 100"), absl::string_view::npos);
  EXPECT_EQ(CheckFits(limits, UINT32_MAX, UINT32_MAX).code(), absl::StatusCode::kInvalidArgument);
}

TEST(UsableContext, IsTheSmallerOfContextAndCache) {
  EXPECT_EQ(UsableContext({.max_context_tokens = 100, .groups = {{4, 16}}}), 65u);
  EXPECT_EQ(UsableContext({.max_context_tokens = 100, .groups = {{4, 16}, {4, 2}}}), 9u);
  EXPECT_EQ(UsableContext({.max_context_tokens = 100, .groups = {{4, 1000}}}), 100u);
}

}  // namespace
}  // namespace tandem::gateway
