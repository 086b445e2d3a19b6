#include "gateway/api/grpc_convert.h"

#include <google/protobuf/any.pb.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/api/api_error.h"
#include "gateway/api/openai_request.h"

namespace tandem::gateway {
namespace {

namespace v1 = serving::v1;

absl::StatusOr<Prompt> ChatPromptOf(const v1::ChatPrompt& chat) {
  Json messages = Json::array();
  for (const v1::ChatMessage& message : chat.messages()) {
    Json entry = Json::object();
    entry["role"] = message.role();
    entry["content"] = message.content();
    messages.push_back(std::move(entry));
  }
  ChatPrompt prompt;
  ASSIGN_OR_RETURN(prompt.messages_json, NormalizeMessages(messages, "messages"));
  if (!chat.template_arguments_json().empty()) {
    const absl::StatusOr<Json> arguments = ParseRequestJson(chat.template_arguments_json());
    if (!arguments.ok()) {
      return FieldError("template_arguments_json",
                        absl::StrCat("template_arguments_json: ", arguments.status().message()));
    }
    prompt.kwargs_json = arguments->dump();
  }
  return prompt;
}

void WriteLogprob(const TokenLogprob& entry, const Tokenizer* tokenizer, v1::TokenLogprob* out) {
  out->set_token_id(entry.token_id);
  if (tokenizer != nullptr) out->set_token(std::string(tokenizer->TokenBytes(entry.token_id)));
  out->set_logprob(entry.logprob);
  for (const TopLogprob& top : entry.top) {
    v1::TokenAlternative* const alternative = out->add_top();
    alternative->set_token_id(top.token_id);
    alternative->set_logprob(top.logprob);
  }
}

// Length-delimited protobuf field. google.rpc's messages are not among the distribution's packages;
// the few fields used here are written by number (google/rpc/status.proto, error_details.proto).
std::string BytesField(int number, std::string_view bytes) {
  std::string out;
  {
    google::protobuf::io::StringOutputStream stream(&out);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.WriteTag(static_cast<uint32_t>(number) << 3 | 2);
    coded.WriteVarint32(static_cast<uint32_t>(bytes.size()));
    coded.WriteRaw(bytes.data(), static_cast<int>(bytes.size()));
  }
  return out;
}

std::string DetailField(std::string_view type, std::string_view message) {
  google::protobuf::Any any;
  any.set_type_url(absl::StrCat("type.googleapis.com/google.rpc.", std::string(type)));
  any.set_value(std::string(message));
  return BytesField(3, any.SerializeAsString());
}

// A serialized google.rpc.Status.
std::string ErrorDetails(const grpc::Status& status, const std::optional<std::string>& param,
                         const std::optional<std::string>& code) {
  std::string out =
      absl::StrCat(std::string("\x08"), std::string(1, static_cast<char>(status.error_code())));
  out += BytesField(2, status.error_message());
  if (param) {
    const std::string violation = BytesField(1, *param) + BytesField(2, status.error_message());
    out += DetailField("BadRequest", BytesField(1, violation));
  }
  if (code) out += DetailField("ErrorInfo", BytesField(1, *code) + BytesField(2, "tandem"));
  return out;
}

}  // namespace

absl::StatusOr<Prompt> PromptOf(const v1::GenerateRequest& request) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kChat:
      return ChatPromptOf(request.chat());
    case v1::GenerateRequest::kText:
      return TextPrompt{.text = request.text(), .add_special_tokens = true};
    case v1::GenerateRequest::kTokenIds:
      return std::vector<uint32_t>(request.token_ids().ids().begin(),
                                   request.token_ids().ids().end());
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return FieldError("prompt", "One of chat, text and token_ids is required.");
}

absl::StatusOr<Prompt> PromptOf(const v1::TokenizeRequest& request) {
  if (request.has_chat()) return ChatPromptOf(request.chat());
  if (!request.has_text()) return FieldError("input", "One of text and chat is required.");
  return TextPrompt{.text = request.text(), .add_special_tokens = request.add_special_tokens()};
}

GenerationFields FieldsOf(const v1::GenerateRequest& request) {
  GenerationFields fields;
  const v1::SamplingParameters& sampling = request.sampling();
  if (sampling.has_temperature()) fields.temperature = sampling.temperature();
  if (sampling.has_top_k()) fields.top_k = sampling.top_k();
  if (sampling.has_top_p()) fields.top_p = sampling.top_p();
  if (sampling.has_min_p()) fields.min_p = sampling.min_p();
  if (sampling.has_presence_penalty()) fields.presence_penalty = sampling.presence_penalty();
  if (sampling.has_frequency_penalty()) fields.frequency_penalty = sampling.frequency_penalty();
  if (sampling.has_repetition_penalty()) fields.repetition_penalty = sampling.repetition_penalty();
  if (sampling.has_seed()) fields.seed = sampling.seed();
  for (const auto& [id, bias] : sampling.logit_bias()) fields.logit_bias.emplace_back(id, bias);

  const v1::StoppingParameters& stopping = request.stopping();
  if (stopping.has_max_tokens()) fields.max_tokens = stopping.max_tokens();
  if (stopping.has_min_tokens()) fields.min_tokens = stopping.min_tokens();
  fields.stop.assign(stopping.stop().begin(), stopping.stop().end());
  fields.stop_token_ids.assign(stopping.stop_token_ids().begin(), stopping.stop_token_ids().end());
  fields.ignore_eos = stopping.ignore_eos();

  if (request.n() != 0) fields.n = request.n();
  if (request.has_top_logprobs()) fields.top_logprobs = request.top_logprobs();
  if (request.prompt_logprobs()) {
    fields.prompt_logprobs = true;
    fields.top_logprobs = fields.top_logprobs.value_or(0);
  }
  return fields;
}

v1::GenerateResponse ResponseOf(const GenerationEvent& event, size_t index,
                                const Tokenizer* tokenizer) {
  v1::GenerateResponse response;
  response.set_index(static_cast<uint32_t>(index));
  response.set_text_delta(event.text);
  response.mutable_token_ids()->Add(event.token_ids.begin(), event.token_ids.end());
  for (const TokenLogprob& entry : event.logprobs) {
    WriteLogprob(entry, tokenizer, response.add_logprobs());
  }
  for (const TokenLogprob& entry : event.prompt_logprobs) {
    WriteLogprob(entry, tokenizer, response.add_prompt_logprobs());
  }
  if (event.finished) {
    response.set_finish_reason(event.reason == FinishReason::kStop ? v1::FINISH_REASON_STOP
                                                                   : v1::FINISH_REASON_LENGTH);
    response.set_matched_stop(event.matched_stop);
  }
  return response;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // Both sets of codes are the canonical ones, with the same numbers.
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const grpc::Status plain(code, ToApiError(status).message);
  const std::string details = ErrorDetails(plain, ErrorParam(status), ErrorCode(status));
  return grpc::Status(code, plain.error_message(), details);
}

std::string GrpcCodeName(const grpc::Status& status) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
}

}  // namespace tandem::gateway
