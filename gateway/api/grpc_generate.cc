#include "gateway/api/grpc_generate.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "gateway/api/grpc_convert.h"

namespace tandem::gateway {

GenerateCall* GenerateCall::Start(const GrpcParts& parts, grpc::CallbackServerContext* context,
                                  const serving::v1::GenerateRequest* request) {
  std::shared_ptr<GenerateCall> call(new GenerateCall(parts, context, request));
  call->self_ = call;
  boost::asio::post(*parts.pool, [call] { call->Prepare(); });
  return call.get();
}

GenerateCall::GenerateCall(const GrpcParts& parts, grpc::CallbackServerContext* context,
                           const serving::v1::GenerateRequest* request)
    : parts_(parts),
      context_(context),
      request_(request),
      events_(std::make_shared<GenerationStream>(parts.engine, parts.stream)),
      request_id_(request->request_id().empty() ? NewRequestId() : request->request_id()) {}

void GenerateCall::Prepare() {
  const absl::Status status = Submit();
  if (!status.ok()) {
    End(status);
    return;
  }
  bool cancelled = false;
  {
    const std::lock_guard lock(mutex_);
    started_ = true;
    cancelled = cancelled_;
  }
  if (cancelled) {
    End(absl::CancelledError("The client left."));
  } else {
    Pump();
  }
}

absl::Status GenerateCall::Submit() {
  ASSIGN_OR_RETURN(const std::string tenant, GrpcTenant(parts_, *context_));
  if (!IsRequestId(request_id_)) {
    request_id_ = NewRequestId();
    return FieldError("request_id", "request_id must be 1 to 128 printable characters");
  }
  ASSIGN_OR_RETURN(const ServedModel model, parts_.builder->Model(request_->model()));
  ASSIGN_OR_RETURN(const Prompt prompt, PromptOf(*request_));
  ASSIGN_OR_RETURN(std::vector<uint32_t> ids, parts_.builder->Tokenize(prompt, "prompt"));
  std::vector<std::vector<uint32_t>> prompts;
  prompts.push_back(std::move(ids));
  ASSIGN_OR_RETURN(
      BuiltRequest built,
      parts_.builder->Build(model, FieldsOf(*request_), std::move(prompts), request_id_, tenant));
  if (built.discard_output) {
    return FieldError("max_tokens", "max_tokens must be at least 1");
  }
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_) return absl::CancelledError("The client left.");
    prompt_tokens_ = static_cast<uint32_t>(built.requests.front().prompt.size());
    completion_tokens_.resize(built.requests.size());
    cached_tokens_.resize(built.requests.size());
  }
  events_->SetWakeup([call = weak_from_this()] {
    if (const auto alive = call.lock()) alive->Pump();
  });
  return events_->Start(std::move(built.requests));
}

void GenerateCall::Pump() {
  absl::Status status;
  bool write = false;
  {
    const std::lock_guard lock(mutex_);
    if (!started_ || finished_) return;
    if (writing_) {
      // Only a cancelled call gives back a write that the client does not take.
      if (events_->Overflowed()) context_->TryCancel();
      return;
    }
    const std::optional<GenerationStream::Item> item = events_->Pop();
    if (!item && !events_->Done()) return;
    if (item) status = EventError(item->event);
    write = writing_ = item && status.ok();
    if (write) FillResponse(*item);
  }
  // Without the lock: the reaction may come before StartWrite returns.
  if (write) {
    StartWrite(&response_);
  } else {
    End(status);
  }
}

void GenerateCall::FillResponse(const GenerationStream::Item& item) {
  completion_tokens_[item.choice] = item.event.completion_tokens;
  cached_tokens_[item.choice] = item.event.cached_tokens;
  response_ = ResponseOf(item.event, item.choice, parts_.builder->tokenizer());
  response_.set_request_id(request_id_);
  if (!events_->Done()) return;
  serving::v1::Usage* const usage = response_.mutable_usage();
  usage->set_prompt_tokens(prompt_tokens_);
  usage->set_completion_tokens(
      std::accumulate(completion_tokens_.begin(), completion_tokens_.end(), 0u));
  usage->set_cached_tokens(cached_tokens_.front());
}

void GenerateCall::OnWriteDone(bool ok) {
  bool cancelled = false;
  {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    cancelled = cancelled_ || !ok;
  }
  if (cancelled) {
    End(absl::CancelledError("The client left."));
  } else {
    Pump();
  }
}

void GenerateCall::OnCancel() {
  bool end = false;
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    // Otherwise Submit or OnWriteDone sees the flag and ends the call.
    end = started_ && !writing_;
  }
  events_->Close();
  if (end) End(absl::CancelledError("The client left."));
}

void GenerateCall::End(const absl::Status& status) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(finished_, true)) return;
  }
  events_->Close();
  const grpc::Status final_status = ToGrpcStatus(status);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  parts_.metrics->Count("grpc", "Generate", GrpcCodeName(final_status), elapsed.count());
  LogInfo("grpc_call",
          {{"request_id", request_id_},
           {"method", "Generate"},
           {"code", GrpcCodeName(final_status)},
           {"error", status.ok() ? std::string("none") : std::string(status.message())},
           {"duration_ms", LogValue(static_cast<int64_t>(elapsed.count() * 1e3))},
           {"prompt_tokens", LogValue(prompt_tokens_)},
           {"completion_tokens",
            LogValue(std::accumulate(completion_tokens_.begin(), completion_tokens_.end(), 0u))}});
  context_->AddTrailingMetadata("x-request-id", request_id_);
  Finish(final_status);
}

void GenerateCall::OnDone() { self_.reset(); }

}  // namespace tandem::gateway
