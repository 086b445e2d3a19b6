#include "gateway/api/json_writer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

namespace tandem::gateway {
namespace {

TEST(JsonWriter, WritesNestedValues) {
  JsonWriter json;
  json.BeginObject().Key("a").BeginArray().Int(-1).Uint(2).Bool(true).Null().EndArray();
  json.Key("b").BeginObject().EndObject().Key("c").OptionalString(std::nullopt).EndObject();
  EXPECT_EQ(json.Take(), R"({"a":[-1,2,true,null],"b":{},"c":null})");
}

TEST(JsonWriter, AnyBytesMakeStrictJson) {
  std::mt19937 random(20261129);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(random() % 24, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    JsonWriter json;
    json.BeginObject().Key(bytes).String(bytes).EndObject();
    EXPECT_TRUE(nlohmann::json::accept(json.Take()));
  }
}

TEST(JsonWriter, ValidTextIsUnchanged) {
  const std::string text = "a\"\\\n\t\x01\x7f/\xC3\xA9\xF0\x9F\x99\x82";
  JsonWriter json;
  json.String(text);
  EXPECT_EQ(nlohmann::json::parse(json.Take()).get<std::string>(), text);
}

TEST(JsonWriter, FloatsReadBackTheSame) {
  std::mt19937 random(7);
  for (int round = 0; round < 20000; ++round) {
    const uint32_t bits = static_cast<uint32_t>(random());
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    if (!std::isfinite(value)) continue;
    JsonWriter json;
    json.Float(value);
    const std::string text = json.Take();
    EXPECT_EQ(std::strtof(text.c_str(), nullptr), value) << text;
    EXPECT_TRUE(nlohmann::json::parse(text).is_number_float()) << text;
  }
}

TEST(JsonWriter, NumbersThatJsonLacksBecomeTheFloor) {
  for (const float value :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    JsonWriter json;
    json.Float(value);
    EXPECT_EQ(json.Take(), "-9999.0");
  }
}

}  // namespace
}  // namespace tandem::gateway
