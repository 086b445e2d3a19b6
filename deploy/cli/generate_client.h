#pragma once

// A client of the public gRPC API, as `tandem run` and `tandem chat` need it.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem {

struct ChatTurn {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

struct GenerateSettings {
  int max_tokens = 0;       // 0: what is left of the context
  double temperature = -1;  // < 0: the model's default
};

class GenerateClient {
 public:
  GenerateClient(const std::string& address, std::string api_key);
  ~GenerateClient();

  // OK when the server answers and serves a model.
  absl::Status Ready(int timeout_ms);
  // Streams the answer to `turns`; `on_text` gets each piece as it comes. Returns the whole.
  absl::StatusOr<std::string> Chat(const std::vector<ChatTurn>& turns,
                                   const GenerateSettings& settings,
                                   const std::function<void(std::string_view)>& on_text);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
