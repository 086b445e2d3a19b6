// Normalization against utf8proc's own, and its fast path.

#include "gateway/text/normalizer.h"

#include <gtest/gtest.h>
#include <utf8proc.h>

#include <random>

namespace tandem::gateway {
namespace {

std::string Utf8(utf8proc_int32_t code) {
  utf8proc_uint8_t bytes[4];
  const auto size = utf8proc_encode_char(code, bytes);
  return std::string(reinterpret_cast<char*>(bytes), static_cast<size_t>(size));
}

std::string Reference(const std::string& text, utf8proc_uint8_t* (*form)(const utf8proc_uint8_t*)) {
  utf8proc_uint8_t* bytes = form(reinterpret_cast<const utf8proc_uint8_t*>(text.c_str()));
  std::string out(reinterpret_cast<char*>(bytes));
  free(bytes);
  return out;
}

TEST(Normalizer, EqualsUtf8procOnRandomText) {
  constexpr uint32_t kSeed = 11;
  SCOPED_TRACE(kSeed);
  std::mt19937 random(kSeed);
  const struct {
    UnicodeForm form;
    utf8proc_uint8_t* (*reference)(const utf8proc_uint8_t*);
  } forms[] = {{UnicodeForm::kNfc, utf8proc_NFC},
               {UnicodeForm::kNfd, utf8proc_NFD},
               {UnicodeForm::kNfkc, utf8proc_NFKC},
               {UnicodeForm::kNfkd, utf8proc_NFKD}};
  const std::pair<int, int> ranges[] = {{'a', 'z'},       {0xC0, 0x17F},    {0x300, 0x36F},
                                        {0x1100, 0x11FF}, {0xAC00, 0xAD00}, {0x3040, 0x30FF},
                                        {0x900, 0x9FF},   {0xFB00, 0xFDFF}, {0x1D100, 0x1D1FF}};
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (int i = 0; i < 12; ++i) {
      const auto [first, last] = ranges[random() % std::size(ranges)];
      text += Utf8(first + static_cast<int>(random() % static_cast<unsigned>(last - first + 1)));
    }
    for (const auto& [form, reference] : forms) {
      EXPECT_EQ(Normalizer({form}).Apply(text), Reference(text, reference)) << text;
    }
  }
}

// A character that passes for normalized must be left alone beside any other that does.
TEST(Normalizer, FastPathHoldsForEveryCharacter) {
  const Normalizer nfc({UnicodeForm::kNfc});
  size_t stable = 0;
  for (utf8proc_int32_t code = 1; code < 0x110000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    const std::string text = Utf8(code);
    if (!nfc.IsNormalized(text)) continue;
    ++stable;
    const utf8proc_property_t* property = utf8proc_get_property(code);
    ASSERT_EQ(property->combining_class, 0) << std::hex << code;
    ASSERT_EQ(Reference(text, utf8proc_NFC), text) << std::hex << code;
    // Would follow a base and combine with it: only characters from U+0300 on do.
    ASSERT_EQ(Reference("a" + text, utf8proc_NFC), "a" + text) << std::hex << code;
    ASSERT_EQ(Reference("\xE1\x84\x80" + text, utf8proc_NFC), "\xE1\x84\x80" + text) << code;
  }
  EXPECT_GT(stable, 40000u);
}

TEST(Normalizer, LeavesTextAloneWithoutForms) {
  const Normalizer none({});
  EXPECT_TRUE(none.IsNormalized("e\xCC\x81"));
  EXPECT_EQ(none.Apply("e\xCC\x81"), "e\xCC\x81");
}

// Sorting a run of marks must not be quadratic: half a million of them in one run.
TEST(Normalizer, LongRunsOfMarks) {
  std::string text = "a";
  for (int i = 0; i < 250000; ++i) text += "\xCC\x81\xCC\xA3";  // above, below
  const std::string out = Normalizer({UnicodeForm::kNfd}).Apply(text);
  ASSERT_EQ(out.size(), text.size());
  EXPECT_EQ(out.substr(1, 4), "\xCC\xA3\xCC\xA3");
  EXPECT_EQ(out.substr(out.size() - 4), "\xCC\x81\xCC\x81");
}

}  // namespace
}  // namespace tandem::gateway
