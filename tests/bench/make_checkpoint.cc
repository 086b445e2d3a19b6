// A model directory with random weights, from a config.json:
//   make_checkpoint --config FILE --out DIR [--tokenizer DIR] [--experts FORMAT] [--group N]

#include <cstdio>
#include <string>

#include "common/base/options.h"
#include "tests/bench/random_checkpoint.h"

namespace tandem::bench {
namespace {

struct Format {
  const char* name;
  EncodeTarget target;
};

constexpr Format kFormats[] = {
    {"int4", {WeightFormat::kInt4Bf16, 32, 1}}, {"int4-zero", {WeightFormat::kInt4ZeroBf16, 32, 1}},
    {"int8", {WeightFormat::kInt8Bf16, 0, 1}},  {"fp8", {WeightFormat::kFp8, 128, 128}},
    {"mxfp4", {WeightFormat::kMxfp4, 32, 1}},
};

int Main(int argc, char** argv) {
  RandomCheckpointRequest request;
  std::string experts = "bf16";
  int group = 0;
  int64_t seed = 1;
  OptionParser parser("make_checkpoint", "Writes a model directory with random weights");
  parser.Add("config", "The model's config.json", &request.config_file);
  parser.Required();
  parser.Add("out", "Directory to make", &request.output_dir);
  parser.Required();
  parser.Add("tokenizer", "Directory whose tokenizer files are copied", &request.tokenizer_dir);
  parser.AddChoice("experts", "Format of routed experts", &experts,
                   {"bf16", "int4", "int4-zero", "int8", "fp8", "mxfp4"});
  parser.Add("group", "Inputs a scale, where the format has groups; 0: its usual number", &group,
             {.min = 0, .max = 65536});
  parser.Add("seed", "Of the random numbers", &seed, {.min = 0});
  parser.AddFlag("overwrite", "Replace an existing directory", &request.overwrite);
  if (const auto code = parser.Parse(argc, argv)) return *code;
  request.seed = static_cast<uint64_t>(seed);
  for (const Format& format : kFormats) {
    if (experts != format.name) continue;
    request.experts = format.target;
    if (group > 0 && format.target.group_columns > 0 && format.target.group_rows == 1) {
      request.experts->group_columns = static_cast<uint32_t>(group);
    }
  }
  const auto report = WriteRandomCheckpoint(request);
  if (!report.ok()) {
    std::fprintf(stderr, "%s\n", std::string(report.status().message()).c_str());
    return 1;
  }
  std::printf("%s: %.2f GB in %llu tensors, %d files\n", request.output_dir.c_str(),
              static_cast<double>(report->bytes) * 1e-9,
              static_cast<unsigned long long>(report->tensors), report->files);
  return 0;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) { return tandem::bench::Main(argc, argv); }
