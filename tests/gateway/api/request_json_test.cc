#include "gateway/api/request_json.h"

#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "gateway/api/api_error.h"

namespace tandem::gateway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ParamOf(std::string_view text, const JsonLimits& limits = {}) {
  const absl::StatusOr<Json> document = ParseRequestJson(text, limits);
  return document.ok() ? "parsed" : ErrorParam(document.status()).value_or("none");
}

TEST(RequestJson, KeepsOrderAndNumbers) {
  const std::string text = R"({"z":1,"a":[1.5,-2,18446744073709551615,true,null],"m":{"b":"é"}})";
  const absl::StatusOr<Json> document = ParseRequestJson(text);
  ASSERT_TRUE(document.ok()) << document.status();
  EXPECT_EQ(document->dump(), text);
}

TEST(RequestJson, ErrorsNameTheValueAtFault) {
  EXPECT_EQ(ParamOf(R"({"a":{"b":[{"c":"\ud800"}]}})"), "a.b[0].c");
  EXPECT_EQ(ParamOf(R"({"a":[1,"\udc00"]})"), "a[1]");
  EXPECT_EQ(ParamOf("{\"a\":\"\xC3\"}"), "a");
  EXPECT_EQ(ParamOf("{\"a\":\"\xED\xA0\x80\"}"), "a");  // a surrogate written as UTF-8
  EXPECT_EQ(ParamOf(R"({"a":1,"b":{"x":1,"y":2,"x":3}})"), "b.x");
  EXPECT_EQ(ParamOf(R"({"a":1e999})"), "a");
  EXPECT_EQ(ParamOf(R"({"a":"b)"), "a");
  EXPECT_EQ(ParamOf(R"({"a":1} x)"), "none");
  EXPECT_EQ(ParamOf("[1]"), "none");
  EXPECT_EQ(ParamOf(""), "none");
}

TEST(RequestJson, DepthAndSizeAreBounded) {
  EXPECT_EQ(ParamOf(R"({"a":[[[1]]]})", {.max_depth = 4}), "parsed");
  EXPECT_EQ(ParamOf(R"({"a":[[[[1]]]]})", {.max_depth = 4}), "a[0][0][0]");
  EXPECT_EQ(ParamOf(R"({"a":[1,2,3]})", {.max_values = 5}), "parsed");
  EXPECT_EQ(ParamOf(R"({"a":[1,2,3,4]})", {.max_values = 5}), "a[3]");
}

TEST(RequestJson, ManyKeysTakeNoQuadraticTime) {
  std::string text = "{\"k\":0";
  for (int i = 0; i < 200'000; ++i) absl::StrAppend(&text, ",\"k", i, "\":0");
  EXPECT_TRUE(ParseRequestJson(text + "}").ok());
}

TEST(FieldReader, ReadsTypesAndKeepsTheFirstError) {
  const Json document = *ParseRequestJson(
      R"({"b":true,"n":1.5,"i":16.0,"big":9223372036854775808,"s":"x","ids":[1,2],"null":null})");
  FieldReader reader(document);
  bool boolean = false;
  std::optional<double> number;
  std::optional<int64_t> integer;
  std::optional<std::string> text = "kept";
  std::vector<uint32_t> ids;
  reader.Boolean("b", &boolean);
  reader.Number("n", &number);
  reader.Integer("i", &integer);
  reader.TokenIds("ids", &ids);
  reader.Text("null", &text);
  reader.Text("absent", &text);
  EXPECT_TRUE(reader.status().ok());
  EXPECT_TRUE(boolean);
  EXPECT_EQ(number, 1.5);
  EXPECT_EQ(integer, 16);
  EXPECT_EQ(text, "kept");
  EXPECT_THAT(ids, ElementsAre(1, 2));
  reader.Integer("big", &integer);
  reader.Boolean("s", &boolean);
  EXPECT_EQ(ErrorParam(reader.status()), "big");
}

TEST(FieldReader, RefusesTokenIdsOutOfRange) {
  for (const char* text : {R"({"ids":[-1]})", R"({"ids":[4294967296]})", R"({"ids":[1.5]})",
                           R"({"ids":["1"]})", R"({"ids":1})"}) {
    const Json document = *ParseRequestJson(text);
    FieldReader reader(document);
    std::vector<uint32_t> ids;
    reader.TokenIds("ids", &ids);
    EXPECT_EQ(ErrorParam(reader.status()), "ids") << text;
  }
}

}  // namespace
}  // namespace tandem::gateway
