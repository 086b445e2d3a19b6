#include "gateway/text/bpe.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "gateway/text/json_reader.h"
#include "gateway/text/utf8.h"

namespace tandem::gateway {
namespace {

constexpr uint64_t kEmptyPair = ~uint64_t{0};

uint64_t PairKey(TokenId left, TokenId right) { return uint64_t{left} << 32 | right; }

absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

// GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onward.
struct ByteAlphabet {
  std::array<char16_t, 256> character{};
  std::array<int16_t, 0x144> byte{};

  constexpr ByteAlphabet() {
    for (auto& b : byte) b = -1;
    char16_t spare = 0x100;
    for (int i = 0; i < 256; ++i) {
      const bool printable =
          (i >= '!' && i <= '~') || (i >= 0xA1 && i <= 0xAC) || (i >= 0xAE && i <= 0xFF);
      character[i] = printable ? static_cast<char16_t>(i) : spare++;
      byte[character[i]] = static_cast<int16_t>(i);
    }
  }
};
constexpr ByteAlphabet kAlphabet;

void AppendByteSpelling(unsigned char byte, std::string* out) {
  const char16_t c = kAlphabet.character[byte];
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else {
    out->push_back(static_cast<char>(0xC0 | c >> 6));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

// Bytes that no UTF-8 text contains; a vocabulary may lack them.
bool OccursInUtf8(int byte) { return byte < 0xC0 || (byte >= 0xC2 && byte < 0xF5); }

}  // namespace

std::string BpeModel::SpellingToBytes(std::string_view spelling) {
  std::string out;
  out.reserve(spelling.size());
  for (size_t i = 0; i < spelling.size(); i += Utf8Length(spelling[i])) {
    const char32_t code = Utf8CodePoint(spelling, i);
    if (code >= kAlphabet.byte.size() || kAlphabet.byte[code] < 0) return std::string(spelling);
    out.push_back(static_cast<char>(kAlphabet.byte[code]));
  }
  return out;
}

absl::StatusOr<BpeModel> BpeModel::Build(const BpeSpec& spec, std::string_view source) {
  BpeModel model;
  const std::string name(source);
  model.ignore_merges_ = spec.ignore_merges;
  RETURN_IF_ERROR(model.LoadVocab(spec, name));
  RETURN_IF_ERROR(model.LoadMerges(spec, name));
  return model;
}

absl::Status BpeModel::LoadVocab(const BpeSpec& spec, const std::string& source) {
  TokenId highest = 0;
  size_t bytes = 0;
  for (const auto& [spelling, id] : spec.vocab) {
    highest = std::max(highest, id);
    bytes += spelling.size();
  }
  if (bytes > kMaxTokenizerBytes)
    return absl::InvalidArgumentError(source + ": vocab is too large");
  bytes_offsets_.assign(spec.vocab.empty() ? 0 : size_t{highest} + 1, {0, 0});
  spellings_.reserve(bytes);  // never grows beyond: by_spelling_ points into it
  bytes_.reserve(bytes);
  by_spelling_.reserve(spec.vocab.size());
  for (const auto& [spelling, id] : spec.vocab) {
    if (spelling.empty()) continue;
    auto& [offset, size] = bytes_offsets_[id];
    if (size != 0) {
      return absl::InvalidArgumentError(absl::StrCat(source, ": model.vocab: id ", id,
                                                     " is given to two tokens, one is \"",
                                                     Excerpt(spelling), "\""));
    }
    const size_t begin = spellings_.size();
    spellings_.append(spelling);
    by_spelling_.emplace(ToAbsl(std::string_view(spellings_).substr(begin)), id);
    offset = static_cast<uint32_t>(bytes_.size());
    bytes_ += SpellingToBytes(spelling);
    size = static_cast<uint32_t>(bytes_.size() - offset);
  }
  for (int byte = 0; byte < 256; ++byte) {
    std::string spelling;
    AppendByteSpelling(static_cast<unsigned char>(byte), &spelling);
    const auto id = Find(spelling);
    if (!id && OccursInUtf8(byte)) has_all_bytes_ = false;
    if (!id && OccursInUtf8(byte) && !spec.skips_unknown_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": model.vocab: no token for byte ", byte, " (\"", spelling, "\")"));
    }
    byte_ids_[byte] = id.value_or(kNone);
  }
  return absl::OkStatus();
}

absl::Status BpeModel::LoadMerges(const BpeSpec& spec, const std::string& source) {
  const size_t slots = std::bit_ceil(std::max<size_t>(16, spec.merges.size() * 2));
  merges_.assign(slots, {kEmptyPair, 0, 0});
  slot_shift_ = 64 - static_cast<uint32_t>(std::bit_width(slots) - 1);
  std::string joined;
  uint32_t rank = 0;
  for (const auto& [left, right] : spec.merges) {
    joined.assign(left).append(right);
    const auto left_id = Find(left);
    const auto right_id = Find(right);
    const auto joined_id = Find(joined);
    if (!left_id || !right_id || !joined_id) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": model.merges[", rank, "]: \"",
                       Excerpt(!left_id    ? left
                               : !right_id ? right
                                           : std::string_view(joined)),
                       "\" is not in the vocabulary"));
    }
    InsertMerge({PairKey(*left_id, *right_id), rank++, *joined_id});
  }
  return absl::OkStatus();
}

size_t BpeModel::Slot(uint64_t pair) const {
  return static_cast<size_t>((pair * 0x9E3779B97F4A7C15u) >> slot_shift_);
}

void BpeModel::InsertMerge(const Merge& merge) {
  size_t slot = Slot(merge.pair);
  while (merges_[slot].pair != kEmptyPair && merges_[slot].pair != merge.pair) {
    slot = (slot + 1) & (merges_.size() - 1);
  }
  merges_[slot] = merge;
}

const BpeModel::Merge* BpeModel::FindMerge(TokenId left, TokenId right) const {
  const uint64_t pair = PairKey(left, right);
  size_t slot = Slot(pair);
  while (merges_[slot].pair != pair) {
    if (merges_[slot].pair == kEmptyPair) return nullptr;
    slot = (slot + 1) & (merges_.size() - 1);
  }
  return &merges_[slot];
}

std::string_view BpeModel::TokenBytes(TokenId id) const {
  if (id >= bytes_offsets_.size()) return {};
  const auto [offset, size] = bytes_offsets_[id];
  return std::string_view(bytes_).substr(offset, size);
}

std::optional<TokenId> BpeModel::Find(std::string_view spelling) const {
  const auto it = by_spelling_.find(ToAbsl(spelling));
  if (it == by_spelling_.end()) return std::nullopt;
  return it->second;
}

uint32_t BpeModel::RankOf(const Scratch& scratch, uint32_t left) const {
  const Scratch::Symbol& symbol = scratch.symbols[left];
  if (symbol.next == kNone) return kNone;
  const Merge* merge = FindMerge(symbol.id, scratch.symbols[symbol.next].id);
  return merge == nullptr ? kNone : merge->rank;
}

void BpeModel::MergeAt(Scratch* scratch, uint32_t left) const {
  auto& symbols = scratch->symbols;
  Scratch::Symbol& symbol = symbols[left];
  const Scratch::Symbol& eaten = symbols[symbol.next];
  symbol.id = FindMerge(symbol.id, eaten.id)->merged;
  symbols[symbol.next].rank = kNone;
  symbol.next = eaten.next;
  if (symbol.next != kNone) symbols[symbol.next].previous = left;
  symbol.rank = RankOf(*scratch, left);
  if (symbol.previous != kNone) symbols[symbol.previous].rank = RankOf(*scratch, symbol.previous);
}

// For ordinary words, looking through all pairs is faster than keeping a heap.
void BpeModel::MergeShort(Scratch* scratch) const {
  auto& symbols = scratch->symbols;
  while (true) {
    uint32_t best = kNone;
    uint32_t best_rank = kNone;
    for (uint32_t i = 0; i != kNone; i = symbols[i].next) {
      if (symbols[i].rank < best_rank) {
        best_rank = symbols[i].rank;
        best = i;
      }
    }
    if (best == kNone) return;
    MergeAt(scratch, best);
  }
}

void BpeModel::MergeLong(Scratch* scratch) const {
  auto& symbols = scratch->symbols;
  auto& heap = scratch->heap;
  heap.clear();
  const auto push = [&](uint32_t index) {
    if (index == kNone || symbols[index].rank == kNone) return;
    heap.emplace_back(symbols[index].rank, index);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  for (uint32_t i = 0; i < symbols.size(); ++i) push(i);
  while (!heap.empty()) {
    const auto [rank, left] = heap.front();
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
    // Entries are not removed when their pair changes; they no longer fit then.
    if (symbols[left].rank != rank) continue;
    MergeAt(scratch, left);
    push(left);
    push(symbols[left].previous);
  }
}

void BpeModel::EncodeWord(std::string_view word, Scratch* scratch,
                          std::vector<TokenId>* out) const {
  if (has_all_bytes_) return EncodeKnown(word, scratch, out);
  scratch->known.clear();
  for (const char c : word) {
    if (byte_ids_[static_cast<unsigned char>(c)] != kNone) scratch->known.push_back(c);
  }
  EncodeKnown(scratch->known, scratch, out);
}

void BpeModel::EncodeKnown(std::string_view word, Scratch* scratch,
                           std::vector<TokenId>* out) const {
  constexpr size_t kShortBytes = 48;
  if (word.empty()) return;
  TANDEM_DCHECK(word.size() < kNone);
  if (word.size() == 1) {
    out->push_back(byte_ids_[static_cast<unsigned char>(word[0])]);
    return;
  }
  if (ignore_merges_) {
    scratch->spelling.clear();
    for (const char c : word) AppendByteSpelling(static_cast<unsigned char>(c), &scratch->spelling);
    if (const auto id = Find(scratch->spelling)) {
      out->push_back(*id);
      return;
    }
  }
  const auto size = static_cast<uint32_t>(word.size());
  scratch->symbols.resize(size);
  for (uint32_t i = 0; i < size; ++i) {
    scratch->symbols[i] = {byte_ids_[static_cast<unsigned char>(word[i])], i == 0 ? kNone : i - 1,
                           i + 1 == size ? kNone : i + 1, kNone};
  }
  for (uint32_t i = 0; i + 1 < size; ++i) scratch->symbols[i].rank = RankOf(*scratch, i);
  if (size <= kShortBytes) {
    MergeShort(scratch);
  } else {
    MergeLong(scratch);
  }
  for (uint32_t i = 0; i != kNone; i = scratch->symbols[i].next) {
    out->push_back(scratch->symbols[i].id);
  }
}

}  // namespace tandem::gateway
