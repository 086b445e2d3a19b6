#include "gateway/text/json_walker.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace tandem::gateway {
namespace {

constexpr size_t kMaxDepth = 64;

class Copier : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Copier(const JsonVisitor& visitor) : visitor_(visitor) {}

  bool null() override { return Put("null"); }
  bool boolean(bool value) override { return Put(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return Put(absl::StrCat(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Put(absl::StrCat(value)); }
  bool number_float(number_float_t, const string_t& spelling) override { return Put(spelling); }
  bool binary(binary_t&) override { return false; }

  bool string(string_t& value) override {
    Separate();
    out_ += visitor_.value(path_, value);
    return true;
  }

  bool start_object(std::size_t) override { return Open('{'); }
  bool end_object() override { return Close('}'); }
  bool start_array(std::size_t) override { return Open('['); }
  bool end_array() override { return Close(']'); }

  bool key(string_t& value) override {
    if (members_.back()++ > 0) out_.push_back(',');
    path_.pop_back();
    out_ += visitor_.key(path_, value);
    out_.push_back(':');
    path_.push_back({true, value, 0});
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    error_ = absl::StrCat("not JSON at byte ", position);
    return false;
  }

  std::string Take() { return std::move(out_); }
  const std::string& error() const { return error_; }

 private:
  // Before an element of an array: its comma, and its index for the path.
  void Separate() {
    if (path_.empty() || path_.back().in_object) return;
    if (members_.back() > 0) out_.push_back(',');
    path_.back().index = members_.back()++;
  }

  bool Put(std::string_view text) {
    Separate();
    out_ += text;
    return true;
  }

  bool Open(char bracket) {
    Separate();
    if (path_.size() >= kMaxDepth) {
      error_ = "JSON is nested too deeply";
      return false;
    }
    out_.push_back(bracket);
    path_.push_back({bracket == '{', {}, 0});
    members_.push_back(0);
    return true;
  }

  bool Close(char bracket) {
    out_.push_back(bracket);
    path_.pop_back();
    members_.pop_back();
    return true;
  }

  const JsonVisitor& visitor_;
  JsonPath path_;
  std::vector<size_t> members_;  // seen so far, of each open object and array
  std::string out_;
  std::string error_;
};

}  // namespace

absl::StatusOr<std::string> CopyJson(std::string_view json, const JsonVisitor& visitor) {
  Copier copier(visitor);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &copier)) {
    return absl::InvalidArgumentError(copier.error().empty() ? "not JSON" : copier.error());
  }
  return copier.Take();
}

bool JsonBeginsWith(std::string_view json, char open) {
  const size_t first = json.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && json[first] == open;
}

}  // namespace tandem::gateway
