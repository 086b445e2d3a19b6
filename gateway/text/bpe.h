#pragma once

// Byte-level byte-pair encoding: a word's bytes become single-byte tokens, and the pair of
// neighbours that comes first in the list of merges (the leftmost of equals) is merged until none
// is left. [Sennrich et al. 2016, section 3.2; on bytes as in GPT-2.]
//
// Vocabulary files spell bytes as printable characters (byte 0x20 is "Ġ"); spellings are mapped
// back at load, so that everything here works on bytes.
//
// Thread safety: immutable; Scratch has one owner. Cost of a word of n bytes: O(n log n), and no
// allocation once the scratch has grown.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gateway/text/tokenizer_spec.h"

namespace tandem::gateway {

class BpeModel {
 public:
  struct Scratch {
    struct Symbol {
      TokenId id;
      uint32_t previous, next;  // neighbours' indices; kNone at the ends
      uint32_t rank;            // of merging this symbol with the next; kNone: cannot
    };
    std::vector<Symbol> symbols;
    std::vector<std::pair<uint32_t, uint32_t>> heap;  // (rank, index of the left symbol)
    std::string spelling;
    std::string known;  // a word without the bytes that have no token
  };

  static absl::StatusOr<BpeModel> Build(const BpeSpec& spec, std::string_view source);

  // Appends the tokens of one word. REQUIRES: word.size() < 2^32.
  void EncodeWord(std::string_view word, Scratch* scratch, std::vector<TokenId>* out) const;

  // Highest id + 1.
  uint32_t size() const { return static_cast<uint32_t>(bytes_offsets_.size()); }
  // The bytes of a token; empty for an id without one.
  std::string_view TokenBytes(TokenId id) const;
  std::optional<TokenId> Find(std::string_view spelling) const;

  // What a token's spelling stands for: its characters' bytes, or the spelling itself if one of its
  // characters stands for no byte.
  static std::string SpellingToBytes(std::string_view spelling);

 private:
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  // Open addressing from (left, right) to (rank, merged); at most half full.
  struct Merge {
    uint64_t pair;
    uint32_t rank;
    TokenId merged;
  };
  const Merge* FindMerge(TokenId left, TokenId right) const;
  void InsertMerge(const Merge& merge);
  size_t Slot(uint64_t pair) const;

  absl::Status LoadVocab(const BpeSpec& spec, const std::string& source);
  absl::Status LoadMerges(const BpeSpec& spec, const std::string& source);
  uint32_t RankOf(const Scratch& scratch, uint32_t left) const;
  void MergeShort(Scratch* scratch) const;
  void MergeLong(Scratch* scratch) const;
  // Merges `left` with its next symbol; returns false if there was nothing to merge.
  void MergeAt(Scratch* scratch, uint32_t left) const;

  void EncodeKnown(std::string_view word, Scratch* scratch, std::vector<TokenId>* out) const;

  bool ignore_merges_ = false;
  bool has_all_bytes_ = true;
  std::array<TokenId, 256> byte_ids_{};  // kNone: the vocabulary has no such token
  std::string spellings_;  // all spellings one after the other; by_spelling_ points into it
  absl::flat_hash_map<absl::string_view, TokenId> by_spelling_;
  std::string bytes_;
  std::vector<std::pair<uint32_t, uint32_t>> bytes_offsets_;  // (offset, size) by id
  std::vector<Merge> merges_;
  uint32_t slot_shift_ = 64;
};

}  // namespace tandem::gateway
