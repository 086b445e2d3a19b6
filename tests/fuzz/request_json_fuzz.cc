// Bodies of the HTTP API from strangers: parsing, field checks and limits must hold for any bytes,
// and an error's body must be strict JSON whatever the request held.

#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "gateway/api/api_error.h"
#include "gateway/api/openai_request.h"
#include "gateway/api/request_json.h"

namespace {

using namespace tandem::gateway;  // NOLINT: a fuzz target is one function

void Check(const absl::Status& status) {
  if (status.ok()) return;
  if (!nlohmann::json::accept(ErrorBody(ToApiError(status), "id"))) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<Json> body = ParseRequestJson(text, {.max_depth = 16, .max_values = 10'000});
  Check(body.status());
  if (!body.ok()) return 0;
  const auto chat = ParseChatRequest(*body);
  Check(chat.status());
  if (chat.ok()) Check(BuildSampling(chat->fields, {}, 1000).status());
  const auto completion = ParseCompletionRequest(*body);
  Check(completion.status());
  if (completion.ok()) Check(BuildSampling(completion->fields, {}, 1000).status());
  Check(ParseTokenizeRequest(*body).status());
  Check(ParseDetokenizeRequest(*body).status());
  return 0;
}
