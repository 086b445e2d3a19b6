#include "common/model/quant_config.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"

namespace tandem {
namespace {

constexpr IntBounds kGroupBounds{.min = -1, .max = 1 << 20};

void Unsupported(HubConfig& config, std::string_view key, std::string_view value,
                 std::string_view supported) {
  config.Fail(
      key, absl::StrCat("is ", QuoteForMessage(value), ", supported are ", std::string(supported)));
}

// -1, 0 and absence are one group over all inputs.
int64_t GroupColumns(HubConfig& config, std::string_view key) {
  return std::max(0, config.IntOr(key, -1, kGroupBounds));
}

void ReadBlock(HubConfig& config, std::string_view key, QuantScheme& scheme) {
  if (!config.Has(key)) return;
  const std::vector<int> block = config.Ints(key, {.max = 1 << 20});
  if (block.size() == 2) {
    scheme.block = {block[0], block[1]};
  } else {
    config.Fail(key, "is not [rows, columns]");
  }
}

void ReadFp8(HubConfig& config, QuantScheme& scheme) {
  scheme.method = QuantMethod::kFp8;
  ReadBlock(config, "weight_block_size", scheme);
  const std::string format = config.StringOr("fmt", "e4m3");
  if (format != "e4m3" && format != "float8_e4m3fn") Unsupported(config, "fmt", format, "e4m3");
}

void ReadMxfp4(HubConfig&, QuantScheme& scheme) { scheme.method = QuantMethod::kMxfp4; }
void ReadMxfp8(HubConfig&, QuantScheme& scheme) { scheme.method = QuantMethod::kMxfp8; }

void ReadIntegerWeights(HubConfig& config, QuantScheme& scheme) {
  scheme.weights.push_back({.bits = config.Int("bits", {.min = 1, .max = 16}),
                            .group_columns = GroupColumns(config, "group_size"),
                            .symmetric = config.BoolOr("sym", true)});
}

void ReadAwq(HubConfig& config, QuantScheme& scheme) {
  scheme.method = QuantMethod::kAwq;
  ReadIntegerWeights(config, scheme);
  scheme.weights.back().symmetric = false;
  if (!config.BoolOr("zero_point", true)) {
    config.Fail("zero_point", "is false, only AWQ with zero points is supported");
  }
  const std::string version = config.StringOr("version", "gemm");
  if (version != "gemm" && version != "GEMM") Unsupported(config, "version", version, "gemm");
}

// A "dynamic" rule gives the modules that its pattern names other bits or groups; "-:" exempts
// them, which the tensors show.
void CheckDynamic(HubConfig& config) {
  const nlohmann::json* rules = config.Object("dynamic");
  if (rules == nullptr) return;
  for (const auto& rule : rules->items()) {
    if (rule.key().starts_with("-:") || !rule.value().is_object() || rule.value().empty()) continue;
    config.Fail("dynamic", absl::StrCat("quantizes ", QuoteForMessage(rule.key()),
                                        " in a way of its own, which is not supported"));
    return;
  }
}

void ReadGptq(HubConfig& config, QuantScheme& scheme) {
  scheme.method = QuantMethod::kGptq;
  ReadIntegerWeights(config, scheme);
  CheckDynamic(config);
  const std::string format = config.StringOr("checkpoint_format", "gptq");
  if (format != "gptq" && format != "gptq_v2") {
    Unsupported(config, "checkpoint_format", format, "gptq and gptq_v2");
  }
  scheme.zero_minus_one = format == "gptq";
}

// One config group of compressed-tensors: a set of linears. Floats need no more than the block.
void ReadConfigGroup(HubConfig& weights, QuantScheme& scheme) {
  const int bits = weights.Int("num_bits", {.min = 1, .max = 16});
  const std::string type = weights.StringOr("type", "int");
  const std::string strategy = weights.StringOr("strategy", "tensor");
  if (weights.BoolOr("dynamic", false)) {
    weights.Fail("dynamic", "is true: weights are not quantized on disk");
  }
  if (type == "float") {
    if (strategy == "block") ReadBlock(weights, "block_structure", scheme);
    return;
  }
  if (type != "int") return Unsupported(weights, "type", type, "int and float");
  const bool grouped = strategy == "group";
  if (!grouped && strategy != "channel" && strategy != "tensor") {
    return Unsupported(weights, "strategy", strategy, "tensor, channel and group");
  }
  scheme.weights.push_back({.bits = bits,
                            .group_columns = grouped ? GroupColumns(weights, "group_size") : 0,
                            .symmetric = weights.BoolOr("symmetric", true)});
}

void ReadCompressedTensors(HubConfig& config, QuantScheme& scheme) {
  scheme.method = QuantMethod::kCompressedTensors;
  constexpr std::string_view kFormats[] = {
      "pack-quantized",  "int-quantized",        "float-quantized",
      "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
      "mxfp8-quantized", "mixed-precision",      "dense"};
  const std::string format = config.StringOr("format", "dense");
  if (std::find(std::begin(kFormats), std::end(kFormats), format) == std::end(kFormats)) {
    std::string supported;
    for (std::string_view one : kFormats) {
      absl::StrAppend(&supported, supported.empty() ? "" : ", ", std::string(one));
    }
    Unsupported(config, "format", format, supported);
  }
  if (const nlohmann::json* sparsity = config.Object("sparsity_config")) {
    HubConfig reader(*sparsity, config.where() + ": sparsity_config");
    const std::string sparse = reader.StringOr("format", "dense");
    if (sparse != "dense") Unsupported(reader, "format", sparse, "dense");
    config.Adopt(reader.status());
  }
  const nlohmann::json* groups = config.Object("config_groups");
  if (groups == nullptr) return;
  for (const auto& group : groups->items()) {
    if (!group.value().is_object()) {
      return config.Fail("config_groups",
                         absl::StrCat(QuoteForMessage(group.key()), " is not an object"));
    }
    HubConfig outer(group.value(), absl::StrCat(config.where(),
                                                ": config_groups: ", QuoteForMessage(group.key())));
    if (const nlohmann::json* weights = outer.Object("weights")) {
      HubConfig reader(*weights, outer.where() + ": weights");
      ReadConfigGroup(reader, scheme);
      outer.Adopt(reader.status());
    }
    config.Adopt(outer.status());
  }
}

void ReadModelOpt(HubConfig& config, QuantScheme& scheme) {
  scheme.method = QuantMethod::kModelOpt;
  const std::string algorithm = config.StringOr("quant_algo", "");
  if (algorithm != "NVFP4" && algorithm != "FP8" && algorithm != "MIXED_PRECISION") {
    Unsupported(config, "quant_algo", algorithm, "NVFP4, FP8 and MIXED_PRECISION");
  }
}

struct Method {
  std::string_view name;
  void (*read)(HubConfig&, QuantScheme&);
};
constexpr Method kMethods[] = {
    {"fp8", ReadFp8},
    {"fbgemm_fp8", ReadFp8},
    {"mxfp8", ReadMxfp8},
    {"mxfp4", ReadMxfp4},
    {"compressed-tensors", ReadCompressedTensors},
    {"awq", ReadAwq},
    {"gptq", ReadGptq},
    {"modelopt", ReadModelOpt},
};

QuantScheme ReadObject(HubConfig& quantization) {
  QuantScheme scheme;
  const std::string method = quantization.StringOr("quant_method", "");
  std::string supported;
  for (const Method& one : kMethods) {
    if (one.name == method) {
      one.read(quantization, scheme);
      return scheme;
    }
    absl::StrAppend(&supported, supported.empty() ? "" : ", ", std::string(one.name));
  }
  Unsupported(quantization, "quant_method", method, supported);
  return scheme;
}

// False: the object has no such key.
bool ReadFromKey(HubConfig& config, QuantScheme& scheme) {
  // The last is what early compressed-tensors wrote.
  for (const char* key : {"quantization_config", "compression_config"}) {
    const nlohmann::json* object = config.Object(key);
    if (object == nullptr) continue;
    HubConfig quantization(*object, absl::StrCat(config.where(), ": ", key));
    scheme = ReadObject(quantization);
    config.Adopt(quantization.status());
    return true;
  }
  return false;
}

}  // namespace

QuantScheme ReadQuantScheme(HubConfig& config) {
  QuantScheme scheme;
  if (ReadFromKey(config, scheme)) return scheme;
  if (const nlohmann::json* text = config.Object("text_config")) {
    HubConfig nested(*text, config.where() + ": text_config");
    ReadFromKey(nested, scheme);
    config.Adopt(nested.status());
  }
  return scheme;
}

absl::StatusOr<QuantScheme> ReadModelOptScheme(const nlohmann::json& root,
                                               const std::string& file) {
  HubConfig config(root, file);
  QuantScheme scheme;
  if (const nlohmann::json* object = config.Object("quantization")) {
    HubConfig quantization(*object, file + ": quantization");
    ReadModelOpt(quantization, scheme);
    config.Adopt(quantization.status());
  }
  RETURN_IF_ERROR(config.status());
  return scheme;
}

}  // namespace tandem
