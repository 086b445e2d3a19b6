// The merge loop against an obvious one: look for the best pair, merge it, start again.

#include "gateway/text/bpe.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tests/gateway/text/text_testing.h"

namespace tandem::gateway {
namespace {

using testing::ByteSpelling;

struct Small {
  std::vector<std::string> spellings;  // keep the spec's views alive
  std::vector<std::pair<std::string, std::string>> merges;
  BpeSpec spec;
};

// 256 bytes and `count` random merges over the letters a to d.
Small RandomVocabulary(std::mt19937* random, size_t count) {
  Small out;
  for (int byte = 0; byte < 256; ++byte) out.spellings.push_back(ByteSpelling(byte));
  std::vector<std::string> parts = {"a", "b", "c", "d"};
  while (out.merges.size() < count) {
    const std::string left = parts[(*random)() % parts.size()];
    const std::string right = parts[(*random)() % parts.size()];
    if (left.size() + right.size() > 12) continue;
    if (std::find(parts.begin(), parts.end(), left + right) == parts.end()) {
      parts.push_back(left + right);
      out.spellings.push_back(left + right);
    }
    out.merges.emplace_back(left, right);
  }
  for (size_t id = 0; id < out.spellings.size(); ++id) {
    out.spec.vocab.emplace_back(out.spellings[id], static_cast<TokenId>(id));
  }
  for (const auto& [left, right] : out.merges) out.spec.merges.emplace_back(left, right);
  return out;
}

std::vector<std::string> ObviousMerge(const std::string& word, const Small& small) {
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (size_t i = 0; i < small.merges.size(); ++i) ranks[small.merges[i]] = i;
  std::vector<std::string> parts;
  for (const char c : word) parts.emplace_back(1, c);
  while (true) {
    size_t best = parts.size();
    size_t best_rank = SIZE_MAX;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto it = ranks.find({parts[i], parts[i + 1]});
      if (it != ranks.end() && it->second < best_rank) {
        best_rank = it->second;
        best = i;
      }
    }
    if (best == parts.size()) return parts;
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
}

TEST(BpeModel, EqualsTheObviousMergeOnShortAndLongWords) {
  constexpr uint32_t kSeed = 20240607;
  SCOPED_TRACE(kSeed);
  std::mt19937 random(kSeed);
  for (int round = 0; round < 20; ++round) {
    const Small small = RandomVocabulary(&random, 1 + random() % 40);
    const auto model = BpeModel::Build(small.spec, "test");
    ASSERT_TRUE(model.ok()) << model.status();
    BpeModel::Scratch scratch;
    for (const size_t size : {1, 2, 3, 7, 20, 47, 48, 49, 50, 130, 300}) {
      std::string word;
      while (word.size() < size) word.push_back(static_cast<char>('a' + random() % 4));
      std::vector<TokenId> ids;
      model->EncodeWord(word, &scratch, &ids);
      std::vector<std::string> parts;
      for (const TokenId id : ids) parts.emplace_back(model->TokenBytes(id));
      EXPECT_EQ(parts, ObviousMerge(word, small)) << word;
    }
  }
}

TEST(BpeModel, EveryByteSurvives) {
  std::mt19937 random(1);
  const Small small = RandomVocabulary(&random, 4);
  const auto model = BpeModel::Build(small.spec, "test");
  ASSERT_TRUE(model.ok()) << model.status();
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  BpeModel::Scratch scratch;
  std::vector<TokenId> ids;
  model->EncodeWord(all, &scratch, &ids);
  std::string back;
  for (const TokenId id : ids) back += model->TokenBytes(id);
  EXPECT_EQ(back, all);
}

TEST(BpeModel, SpellingsWithOtherCharactersStandForThemselves) {
  EXPECT_EQ(BpeModel::SpellingToBytes("\xC4\xA0hi"), " hi");             // G with dot: a blank
  EXPECT_EQ(BpeModel::SpellingToBytes("a b"), "a b");                    // a blank is no spelling
  EXPECT_EQ(BpeModel::SpellingToBytes("\xEF\xBD\x9C"), "\xEF\xBD\x9C");  // full width bar
}

TEST(BpeModel, IgnoreMergesTakesWholeWords) {
  auto json = testing::SmallTokenizerJson({{"b", "c"}});
  json["model"]["vocab"]["abc"] = 400;
  for (const bool ignore : {false, true}) {
    json["model"]["ignore_merges"] = ignore;
    const auto tokenizer = Tokenizer::FromJson(json.dump(), "test");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const std::vector<TokenId> expected =
        ignore ? std::vector<TokenId>{400} : std::vector<TokenId>{'a', 256};
    EXPECT_EQ(*(*tokenizer)->Encode("abc", {}), expected);
  }
}

}  // namespace
}  // namespace tandem::gateway
