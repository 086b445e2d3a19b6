#include "common/quantize/packed_tensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/quantize/safetensors_writer.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem {
namespace {

using ::tandem::testing::SharedPath;
using ::tandem::testing::TempDir;

struct GoldenCase {
  const char* file;
  const char* name;
  EncodeTarget target;
  QuantizedWeights weights;
};

// Files that compressed-tensors packed: reading their codes and packing them again must give the
// same bytes.
class PackRowsTest : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(PackRowsTest, GivesTheBytesThatCompressedTensorsPacked) {
  const GoldenCase& golden = GetParam();
  const auto path = SharedPath(std::string("golden/quant/") + golden.file);
  if (!path) GTEST_SKIP() << "no golden/quant/" << golden.file;
  TempDir dir;
  std::filesystem::copy_file(*path, dir.path() / "model.safetensors");
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::string name = golden.name;
  const auto expected = (*checkpoint)->Get(name + ".expected");
  ASSERT_TRUE(expected.ok()) << expected.status();
  const int64_t rows = (*expected)->view.shape[0], cols = (*expected)->view.shape[1];
  QuantScheme scheme;
  scheme.method = QuantMethod::kCompressedTensors;
  scheme.weights = {golden.weights};
  const auto matrix = WeightMatrix::Create(**checkpoint, name + ".weight", rows, cols, scheme);
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  ASSERT_EQ(matrix->format(), golden.target.format);
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols));
  std::vector<GroupParameters> groups(rows * GroupsInRow(cols, golden.target));
  ASSERT_TRUE(matrix->ReadCodes({0, rows}, {0, cols}, codes.data(), groups.data()).ok());

  const auto tensors = PackedTensors(golden.target, rows, cols);
  const auto packed = PackRows(golden.target, rows, cols, rows, codes.data(), groups.data());
  ASSERT_EQ(tensors.size(), packed.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto tensor = (*checkpoint)->Get(name + "." + tensors[i].suffix, tensors[i].shape);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ((*tensor)->view.dtype, tensors[i].dtype) << tensors[i].suffix;
    const std::string bytes(
        (*tensor)->view.As<const char>(),
        static_cast<size_t>((*tensor)->view.Elements()) * DTypeBytes((*tensor)->view.dtype));
    EXPECT_EQ(packed[i], bytes) << tensors[i].suffix;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Golden, PackRowsTest,
    ::testing::Values(
        GoldenCase{
            "ct_int4.safetensors", "g32_sym", {WeightFormat::kInt4Bf16, 32, 1}, {4, 32, true}},
        GoldenCase{"ct_int4.safetensors",
                   "g32_asym",
                   {WeightFormat::kInt4ZeroBf16, 32, 1},
                   {4, 32, false}},
        GoldenCase{
            "ct_int4.safetensors", "g128_sym", {WeightFormat::kInt4Bf16, 128, 1}, {4, 128, true}},
        GoldenCase{
            "ct_int4.safetensors", "channel_sym", {WeightFormat::kInt4Bf16, 0, 1}, {4, 0, true}},
        GoldenCase{"ct_int8.safetensors", "channel", {WeightFormat::kInt8Bf16, 0, 1}, {8, 0, true}},
        GoldenCase{
            "fp8_channel.safetensors", "channel_bf16", {WeightFormat::kFp8, 0, 1}, {8, 0, true}},
        GoldenCase{"mxfp4.safetensors", "ct", {WeightFormat::kMxfp4, 32, 1}, {4, 32, true}}),
    [](const auto& info) {
      const std::string file = info.param.file;
      return file.substr(0, file.find('.')) + "_" + info.param.name;
    });

TEST(PackedTensors, RefusesColumnsThatDoNotDivide) {
  EXPECT_TRUE(CheckPackable({WeightFormat::kInt4Bf16, 128, 1}, 7, 256).ok());
  EXPECT_FALSE(CheckPackable({WeightFormat::kInt4Bf16, 128, 1}, 7, 192).ok());
  EXPECT_FALSE(CheckPackable({WeightFormat::kInt4Bf16, 0, 1}, 7, 12).ok());
  EXPECT_FALSE(CheckPackable({WeightFormat::kMxfp4, 32, 1}, 7, 48).ok());
  EXPECT_TRUE(CheckPackable({WeightFormat::kFp8, 128, 128}, 7, 48).ok());
  EXPECT_FALSE(CheckPackable({WeightFormat::kInt8Bf16, 0, 1}, 0, 48).ok());
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  TempDir dir;
  const std::string path = dir.path() / "model.safetensors";
  const std::vector<TensorToWrite> tensors = {{"a \"quoted\\\" name", DType::kF32, {2, 3}},
                                              {"scalar", DType::kBF16, {}},
                                              {"empty", DType::kU8, {0, 4}},
                                              {"b", DType::kF8E4M3, {5}}};
  {
    auto writer = SafetensorsWriter::Create(path, tensors);
    ASSERT_TRUE(writer.ok()) << writer.status();
    EXPECT_FALSE(SafetensorsWriter::Create(path, tensors).ok()) << "the file exists";
    // In any order and in parts.
    ASSERT_TRUE((*writer)->Write(3, 2, "cde").ok());
    ASSERT_TRUE((*writer)->Write(3, 0, "ab").ok());
    ASSERT_TRUE((*writer)->Write(1, 0, "xy").ok());
    ASSERT_TRUE((*writer)->Write(0, 0, "123456789012345678901234").ok());
    ASSERT_TRUE((*writer)->Finish().ok());
  }
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ((*file)->entries().size(), tensors.size());
  for (const SafetensorsEntry& entry : (*file)->entries()) {
    const auto written = std::find_if(tensors.begin(), tensors.end(), [&](const auto& tensor) {
      return tensor.name == entry.name;
    });
    ASSERT_NE(written, tensors.end()) << entry.name;
    EXPECT_EQ(entry.dtype, written->dtype);
    EXPECT_EQ(entry.shape, written->shape);
    EXPECT_EQ(entry.end - entry.begin, written->Bytes());
    if (entry.name == "b") {
      EXPECT_EQ(std::memcmp((*file)->View(entry).data, "abcde", 5), 0);
    }
  }
  EXPECT_EQ(SafetensorsHeader(tensors).size() % 8, 0u);
  EXPECT_EQ(SafetensorsHeader(tensors).size() + 24 + 2 + 5, (*file)->file_bytes());
}

}  // namespace
}  // namespace tandem
