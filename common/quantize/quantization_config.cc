#include "common/quantize/quantization_config.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/quote.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

const char* FormatName(WeightFormat format) {
  switch (format) {
    case WeightFormat::kInt8Bf16:
      return "int-quantized";
    case WeightFormat::kFp8:
      return "float-quantized";
    case WeightFormat::kMxfp4:
      return "mxfp4-pack-quantized";
    default:
      return "pack-quantized";
  }
}

Json WeightsJson(const EncodeTarget& target) {
  const WeightFormat format = target.format;
  const bool is_float = format == WeightFormat::kFp8 || format == WeightFormat::kMxfp4;
  const bool is_wide = format == WeightFormat::kFp8 || format == WeightFormat::kInt8Bf16;
  Json weights = {{"num_bits", is_wide ? 8 : 4},
                  {"type", is_float ? "float" : "int"},
                  {"symmetric", format != WeightFormat::kInt4ZeroBf16},
                  {"dynamic", false}};
  if (target.group_rows > 1) {
    weights["strategy"] = "block";
    weights["block_structure"] = {target.group_rows, target.group_columns};
  } else if (target.group_columns == 0) {
    weights["strategy"] = "channel";
  } else {
    weights["strategy"] = "group";
    weights["group_size"] = target.group_columns;
  }
  if (format == WeightFormat::kMxfp4) {
    weights["scale_dtype"] = "torch.uint8";
    weights["zp_dtype"] = "torch.uint8";
  }
  return weights;
}

Json ConfigGroup(Json targets, const EncodeTarget& target) {
  return {{"targets", std::move(targets)},
          {"weights", WeightsJson(target)},
          {"input_activations", nullptr},
          {"output_activations", nullptr}};
}

std::string LastPart(std::string_view module) {
  return std::string(module.substr(module.rfind('.') + 1));
}

// Every matrix that is not quantized; "lm_head" even where it is tied and has no tensor.
Json IgnoredModules(const std::vector<QuantizeFile>& files) {
  std::set<std::string> ignored = {"lm_head"};
  for (const QuantizeFile& file : files) {
    for (const QuantizeItem& item : file.items) {
      const bool matrix = item.source->view.rank == 2 && item.source->name.ends_with(".weight");
      if (matrix && !item.target) ignored.insert(std::string(item.module()));
    }
  }
  return Json(ignored);
}

using TargetsByGroup =
    std::map<uint32_t, std::pair<EncodeTarget, std::set<std::string>>, std::greater<>>;

absl::StatusOr<TargetsByGroup> CollectGroups(const std::vector<QuantizeFile>& files) {
  TargetsByGroup groups;
  std::map<std::string, uint32_t> group_of_part;
  for (const QuantizeFile& file : files) {
    for (const QuantizeItem& item : file.items) {
      if (!item.target) continue;
      const uint32_t columns = item.target->group_columns;
      const std::string part = LastPart(item.module());
      const auto [known, added] = group_of_part.emplace(part, columns);
      if (!added && known->second != columns) {
        return TensorError(*item.source,
                           absl::StrCat("needs groups of ", columns, ", other modules called ",
                                        QuoteForMessage(part), " groups of ", known->second,
                                        "; choose the smaller for all"));
      }
      auto& group = groups[columns];
      group.first = *item.target;
      group.second.insert(part);
    }
  }
  return groups;
}

}  // namespace

absl::StatusOr<Json> MakeQuantizationConfig(const std::vector<QuantizeFile>& files) {
  ASSIGN_OR_RETURN(const TargetsByGroup groups, CollectGroups(files));
  Json config_groups = Json::object();
  for (const auto& [columns, group] : groups) {
    Json targets = Json::array({"Linear"});
    if (groups.size() > 1) {
      targets = Json::array();
      for (const std::string& part : group.second) {
        targets.push_back(absl::StrCat("re:.*\\.", part, "$"));
      }
    }
    config_groups[absl::StrCat("group_", config_groups.size())] =
        ConfigGroup(std::move(targets), group.first);
  }
  return Json{{"quant_method", "compressed-tensors"},
              {"format", FormatName(groups.begin()->second.first.format)},
              {"quantization_status", "compressed"},
              {"config_groups", std::move(config_groups)},
              {"ignore", IgnoredModules(files)},
              {"kv_cache_scheme", nullptr},
              {"global_compression_ratio", nullptr}};
}

}  // namespace tandem
