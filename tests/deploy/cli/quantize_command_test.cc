#include "deploy/cli/quantize_command.h"

#include <gtest/gtest.h>

#include "common/base/options.h"

namespace tandem {
namespace {

TEST(ParseTarget, KnowsEveryPairOfFormatAndGroup) {
  struct Row {
    const char* format;
    const char* group;
    WeightFormat weight_format;
    uint32_t group_columns, group_rows;
  };
  for (const Row& row : {Row{"int8", "auto", WeightFormat::kInt8Bf16, 0, 1},
                         Row{"int8", "64", WeightFormat::kInt8Bf16, 64, 1},
                         Row{"int4", "auto", WeightFormat::kInt4Bf16, 32, 1},
                         Row{"int4", "128", WeightFormat::kInt4Bf16, 128, 1},
                         Row{"int4", "channel", WeightFormat::kInt4Bf16, 0, 1},
                         Row{"int4-asym", "64", WeightFormat::kInt4ZeroBf16, 64, 1},
                         Row{"fp8", "auto", WeightFormat::kFp8, 0, 1},
                         Row{"fp8", "block", WeightFormat::kFp8, 128, 128},
                         Row{"mxfp4", "auto", WeightFormat::kMxfp4, 32, 1},
                         Row{"mxfp4", "32", WeightFormat::kMxfp4, 32, 1}}) {
    const auto target = ParseTarget(row.format, row.group);
    ASSERT_TRUE(target.ok()) << row.format << " " << row.group;
    EXPECT_EQ(target->format, row.weight_format) << row.format << " " << row.group;
    EXPECT_EQ(target->group_columns, row.group_columns) << row.format << " " << row.group;
    EXPECT_EQ(target->group_rows, row.group_rows) << row.format << " " << row.group;
  }
}

TEST(ParseTarget, RefusesPairsThatDoNotExist) {
  for (const auto& [format, group] :
       {std::pair("fp8", "32"), std::pair("int8", "block"), std::pair("int4", "block"),
        std::pair("mxfp4", "64"), std::pair("mxfp4", "channel")}) {
    const auto target = ParseTarget(format, group);
    ASSERT_FALSE(target.ok()) << format << " " << group;
    EXPECT_NE(target.status().message().find(group), std::string::npos) << target.status();
  }
}

TEST(QuantizeOptions, RefusesUnknownChoicesAndAMissingOutput) {
  const auto parse = [](std::vector<const char*> arguments) {
    OptionParser parser("tandem", "");
    QuantizeOptions options;
    OptionParser quantize(parser, "quantize", "");
    options.Register(quantize);
    arguments.insert(arguments.begin(), {"tandem", "quantize"});
    return parser.Parse(static_cast<int>(arguments.size()), arguments.data());
  };
  EXPECT_EQ(parse({"--output=x"}), std::nullopt);
  EXPECT_EQ(parse({"--output=x", "--format=q9"}), 2);
  EXPECT_EQ(parse({"--output=x", "--group=33"}), 2);
  EXPECT_EQ(parse({"--output=x", "--scope=all"}), 2);
  EXPECT_EQ(parse({"--format=int4"}), 2);
}

}  // namespace
}  // namespace tandem
