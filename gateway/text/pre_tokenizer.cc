#include "gateway/text/pre_tokenizer.h"

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace tandem::gateway {
namespace {

// Collects the parts of one word, alternately matching and not, and merges them as `behavior` says.
class Collector {
 public:
  Collector(SplitBehavior behavior, bool invert, size_t origin, std::vector<WordSpan>* out)
      : behavior_(behavior), invert_(invert), origin_(origin), first_(out->size()), out_(out) {}

  void Add(size_t begin, size_t end, bool matches) {
    if (begin == end) return;
    const bool match = matches != invert_;
    const bool joins = out_->size() > first_ && Joins(match);
    if (behavior_ == SplitBehavior::kRemoved && match) {
      // Leaves a gap.
    } else if (joins) {
      out_->back().end = origin_ + end;
    } else {
      out_->push_back({origin_ + begin, origin_ + end});
    }
    last_match_ = match;
  }

 private:
  bool Joins(bool match) const {
    switch (behavior_) {
      case SplitBehavior::kMergedWithPrevious:
        return match && !last_match_;
      case SplitBehavior::kMergedWithNext:
        return !match && last_match_;
      case SplitBehavior::kContiguous:
        return match == last_match_;
      default:
        return false;
    }
  }

  SplitBehavior behavior_;
  bool invert_;
  size_t origin_;
  size_t first_;  // spans before this one belong to earlier words
  std::vector<WordSpan>* out_;
  bool last_match_ = false;
};

void PrefixSpaces(Words* words) {
  Words out;
  out.text.reserve(words->text.size() + words->spans.size());
  out.spans.reserve(words->spans.size());
  for (const WordSpan& span : words->spans) {
    const size_t begin = out.text.size();
    if (words->text[span.begin] != ' ') out.text.push_back(' ');
    out.text.append(words->text, span.begin, span.end - span.begin);
    out.spans.push_back({begin, out.text.size()});
  }
  *words = std::move(out);
}

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::Build(const std::vector<PreTokenizerStep>& steps,
                                                 std::string_view source) {
  PreTokenizer out;
  for (const PreTokenizerStep& spec : steps) {
    Step step{std::nullopt, spec.behavior, spec.invert};
    if (spec.kind == PreTokenizerStep::Kind::kPattern) {
      auto regex =
          spec.literal ? Regex::CompileLiteral(spec.pattern) : Regex::Compile(spec.pattern);
      if (!regex.ok()) {
        return Annotate(regex.status(),
                        absl::StrCat(std::string(source), ": pre_tokenizer: Split"));
      }
      step.regex = std::move(*regex);
    }
    out.steps_.push_back(std::move(step));
  }
  return out;
}

absl::Status PreTokenizer::Split(Words* words, Regex::Scratch* scratch) const {
  for (const Step& step : steps_) {
    if (!step.regex) {
      PrefixSpaces(words);
      continue;
    }
    std::vector<WordSpan> spans;
    spans.reserve(words->spans.size());
    const std::string_view text = words->text;
    for (const WordSpan& span : words->spans) {
      const std::string_view word = text.substr(span.begin, span.end - span.begin);
      Collector collector(step.behavior, step.invert, span.begin, &spans);
      size_t done = 0;
      RETURN_IF_ERROR(step.regex->ForEach(word, scratch, [&](size_t begin, size_t end) {
        collector.Add(done, begin, false);
        collector.Add(begin, end, true);
        done = end;
      }));
      collector.Add(done, word.size(), false);
    }
    words->spans = std::move(spans);
  }
  return absl::OkStatus();
}

}  // namespace tandem::gateway
