#include "tests/bench/random_checkpoint.h"

#include <oneapi/tbb/parallel_for.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <deque>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status.h"
#include "common/model/hub_config.h"
#include "common/model/model_loader.h"
#include "common/model/model_tensors.h"
#include "common/quantize/output_directory.h"
#include "common/quantize/packed_tensors.h"
#include "common/quantize/quantization_config.h"
#include "common/quantize/quantize_plan.h"
#include "common/quantize/safetensors_writer.h"

namespace tandem::bench {
namespace {

namespace fs = std::filesystem;

// SplitMix64 (Steele, Lea, Flood 2014): any state is a good one, so each piece seeds its own.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

constexpr uint16_t Bf16(float value) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + 0x8000) >> 16);
}

// A uniform value in [-sqrt(3), sqrt(3)) has deviation 1.
float Uniform(uint16_t bits) {
  return (static_cast<float>(bits) - 32767.5f) * (1.7320508f / 32768.0f);
}

// How a format's random codes are drawn: a table of codes to pick from by a random byte, and the
// deviation of their values.
struct CodeTable {
  uint8_t codes[256];
  double deviation;
};

CodeTable MakeCodeTable(WeightFormat format) {
  CodeTable table{};
  double squares = 0;
  for (int i = 0; i < 256; ++i) {
    uint8_t code = 0;
    double value = 0;
    switch (format) {
      case WeightFormat::kInt8Bf16:
        value = i == 128 ? 0 : static_cast<int8_t>(i);
        code = static_cast<uint8_t>(static_cast<int8_t>(value));
        break;
      case WeightFormat::kFp8: {
        // Exponents 5 to 8 of 15: magnitudes from 1/4 to 3.75.
        code = static_cast<uint8_t>((i & 0x80) | ((5 + ((i >> 3) & 3)) << 3) | (i & 7));
        value = std::ldexp(1.0 + (code & 7) / 8.0, ((code >> 3) & 15) - 7);
        break;
      }
      case WeightFormat::kMxfp4:
        code = i & 15;
        value = kE2m1Values[code];
        break;
      default:
        // -8 has no counterpart: 0 in its place keeps the mean at 0.
        code = (i & 15) == 0 ? 8 : i & 15;
        value = code - 8;
        break;
    }
    table.codes[i] = code;
    squares += value * value / 256;
  }
  table.deviation = std::sqrt(squares);
  return table;
}

GroupParameters GroupOf(WeightFormat format, double scale) {
  GroupParameters group;
  group.scale = Bf16(static_cast<float>(scale));
  if (format == WeightFormat::kFp8) group.scale <<= 16;
  if (format == WeightFormat::kMxfp4) {
    group.scale = static_cast<uint32_t>(std::clamp(std::lround(std::log2(scale)) + 127, 1L, 254L));
  }
  if (format == WeightFormat::kInt4ZeroBf16) group.min = 8;
  return group;
}

class Generator {
 public:
  Generator(const RandomCheckpointRequest& request, const ModelSpec& spec)
      : request_(request), spec_(spec) {
    if (request.experts) codes_ = MakeCodeTable(request.experts->format);
  }

  // Cuts the model's tensors into files.
  absl::Status Plan() {
    for (const RequiredTensor& need : RequiredTensors(spec_)) {
      const bool quantized = need.role == TensorRole::kRouted && request_.experts.has_value();
      if (quantized) {
        const absl::Status packable =
            CheckPackable(*request_.experts, need.shape[0], need.shape[1]);
        if (!packable.ok()) {
          return absl::InvalidArgumentError(
              absl::StrCat(need.name, ": ", std::string(packable.message())));
        }
      }
      needs_.push_back(need);
      Checkpoint::Tensor& tensor = tensors_.emplace_back();
      tensor.name = needs_.back().name;
      tensor.view.dtype = DType::kBF16;
      tensor.view.rank = static_cast<int>(need.shape.size());
      std::copy(need.shape.begin(), need.shape.end(), tensor.view.shape.begin());
      if (files_.empty() || files_.back().OutputBytes() > request_.max_file_bytes) {
        files_.emplace_back();
      }
      AddOutputs(need, tensor, quantized, files_.back());
    }
    for (size_t i = 0; i < files_.size(); ++i) {
      files_[i].name = files_.size() == 1 ? "model.safetensors"
                                          : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1,
                                                            files_.size());
    }
    return absl::OkStatus();
  }

  const std::vector<QuantizeFile>& files() const { return files_; }

  absl::Status WriteFile(const QuantizeFile& file, const std::string& dir) const {
    ASSIGN_OR_RETURN(const auto out,
                     SafetensorsWriter::Create(absl::StrCat(dir, "/", file.name), file.outputs));
    struct Piece {
      const QuantizeItem* item;
      int64_t first_row;
    };
    std::vector<Piece> pieces;
    for (const QuantizeItem& item : file.items) {
      for (int64_t row = 0; row < item.source->view.shape[0]; row += kPackRows) {
        pieces.push_back({&item, row});
      }
    }
    std::mutex mutex;
    absl::Status status;
    oneapi::tbb::parallel_for(size_t{0}, pieces.size(), [&](size_t i) {
      const absl::Status written = WritePiece(*pieces[i].item, pieces[i].first_row, *out);
      const std::lock_guard lock(mutex);
      if (status.ok()) status = written;
    });
    RETURN_IF_ERROR(status);
    return out->Finish();
  }

 private:
  void AddOutputs(const RequiredTensor& need, const Checkpoint::Tensor& tensor, bool quantized,
                  QuantizeFile& file) const {
    QuantizeItem item;
    item.source = &tensor;
    item.first_output = file.outputs.size();
    if (quantized) {
      item.action = QuantizeItem::Action::kQuantize;
      item.target = request_.experts;
      for (const PackedTensor& part :
           PackedTensors(*request_.experts, need.shape[0], need.shape[1])) {
        file.outputs.push_back(
            {absl::StrCat(std::string(item.module()), ".", part.suffix), part.dtype, part.shape});
      }
    } else {
      file.outputs.push_back({need.name, DType::kBF16, need.shape});
    }
    file.items.push_back(std::move(item));
  }

  // Deterministic in the seed, the tensor and the row, whatever thread writes it.
  uint64_t SeedOf(const QuantizeItem& item, int64_t row) const {
    uint64_t hash = request_.seed * 0x9E3779B97F4A7C15u;
    for (char c : item.source->name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
    return Random(hash + static_cast<uint64_t>(row)).Next();
  }

  absl::Status WritePiece(const QuantizeItem& item, int64_t first_row,
                          SafetensorsWriter& out) const {
    const TensorView& view = item.source->view;
    const int64_t rows = std::min(kPackRows, view.shape[0] - first_row);
    const int64_t cols = view.rank == 2 ? view.shape[1] : 1;
    Random random(SeedOf(item, first_row));
    if (item.target) return WriteCodes(item, {first_row, first_row + rows}, random, out);
    const double deviation = DeviationOf(item);
    std::string bytes(static_cast<size_t>(rows * cols) * 2, '\0');
    uint64_t bits = 0;
    for (size_t i = 0; i < bytes.size() / 2; ++i) {
      bits = i % 4 == 0 ? random.Next() : bits >> 16;
      const float value = deviation > 0
                              ? Uniform(static_cast<uint16_t>(bits)) * static_cast<float>(deviation)
                              : 1.0f;
      const uint16_t half = Bf16(value);
      bytes[2 * i] = static_cast<char>(half & 0xFF);
      bytes[2 * i + 1] = static_cast<char>(half >> 8);
    }
    return out.Write(item.first_output, static_cast<uint64_t>(first_row * cols) * 2, bytes);
  }

  // 0: a norm, all ones.
  double DeviationOf(const QuantizeItem& item) const {
    const TensorView& view = item.source->view;
    if (view.rank == 1) return item.source->name.ends_with("norm.weight") ? 0 : 0.02;
    // Of embedding and head: logits with a deviation of 2, so that choices are clear.
    const bool head = item.source->name == spec_.head || item.source->name == spec_.embedding;
    return (head ? 2 : 1) / std::sqrt(static_cast<double>(view.shape[1]));
  }

  absl::Status WriteCodes(const QuantizeItem& item, Range rows, Random& random,
                          SafetensorsWriter& out) const {
    const EncodeTarget& target = *item.target;
    const int64_t matrix_rows = item.source->view.shape[0];
    const int64_t cols = item.source->view.shape[1];
    std::vector<uint8_t> codes(static_cast<size_t>(rows.size() * cols));
    uint64_t bits = 0;
    for (size_t i = 0; i < codes.size(); ++i) {
      bits = i % 8 == 0 ? random.Next() : bits >> 8;
      codes[i] = codes_.codes[bits & 0xFF];
    }
    const double scale = DeviationOf(item) / codes_.deviation;
    const std::vector<GroupParameters> groups(
        static_cast<size_t>(rows.size()) * GroupsInRow(cols, target),
        GroupOf(target.format, scale));
    const std::vector<PackedTensor> tensors = PackedTensors(target, matrix_rows, cols);
    const std::vector<std::string> packed =
        PackRows(target, matrix_rows, cols, rows.size(), codes.data(), groups.data());
    for (size_t i = 0; i < packed.size(); ++i) {
      const std::optional<uint64_t> offset = tensors[i].OffsetOf(rows.begin);
      if (offset) RETURN_IF_ERROR(out.Write(item.first_output + i, *offset, packed[i]));
    }
    return absl::OkStatus();
  }

  const RandomCheckpointRequest& request_;
  const ModelSpec& spec_;
  CodeTable codes_{};
  std::deque<RequiredTensor> needs_;        // own the names
  std::deque<Checkpoint::Tensor> tensors_;  // what the items point to
  std::vector<QuantizeFile> files_;
};

absl::Status WriteText(const fs::path& file, const std::string& text) {
  std::ofstream out(file, std::ios::binary);
  out << text;
  out.close();
  if (!out) return absl::UnavailableError(absl::StrCat("cannot write ", file.string()));
  return absl::OkStatus();
}

absl::Status WriteIndex(const std::vector<QuantizeFile>& files, uint64_t bytes,
                        const fs::path& dir) {
  nlohmann::ordered_json map;
  for (const QuantizeFile& file : files) {
    for (const TensorToWrite& tensor : file.outputs) map[tensor.name] = file.name;
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}},
                                        {"weight_map", std::move(map)}};
  return WriteText(dir / "model.safetensors.index.json", index.dump(1));
}

absl::Status CopyTokenizer(const fs::path& from, const fs::path& to) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(from, error)) {
    const std::string name = entry.path().filename().string();
    const bool weights = name.ends_with(".safetensors") || name.ends_with(".index.json");
    if (!entry.is_regular_file() || weights || name == "config.json") continue;
    fs::copy_file(entry.path(), to / name, error);
    if (error) break;
  }
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot copy from ", from.string(), ": ", error.message()));
}

}  // namespace

absl::StatusOr<RandomCheckpointReport> WriteRandomCheckpoint(
    const RandomCheckpointRequest& request) {
  ASSIGN_OR_RETURN(nlohmann::json config, ReadJsonObject(request.config_file));
  // What the source's weights were stored as says nothing about these.
  config.erase("quantization_config");
  config["torch_dtype"] = "bfloat16";
  const std::string text = config.dump();
  ASSIGN_OR_RETURN(const ModelSpec spec, ParseModelSpec(std::string_view(text),
                                                        ConfigSource{.file = request.config_file}));
  Generator generator(request, spec);
  RETURN_IF_ERROR(generator.Plan());
  RandomCheckpointReport report;
  for (const QuantizeFile& file : generator.files()) {
    report.bytes += file.OutputBytes();
    report.tensors += file.outputs.size();
    ++report.files;
  }
  ASSIGN_OR_RETURN(OutputDirectory output,
                   OutputDirectory::Create(request.output_dir, {.overwrite = request.overwrite,
                                                                .needed_bytes = report.bytes}));
  for (const QuantizeFile& file : generator.files()) {
    RETURN_IF_ERROR(generator.WriteFile(file, output.path()));
  }
  if (report.files > 1) {
    RETURN_IF_ERROR(WriteIndex(generator.files(), report.bytes, output.path()));
  }
  if (request.experts && spec.moe.experts > 0) {
    ASSIGN_OR_RETURN(const nlohmann::ordered_json quantization,
                     MakeQuantizationConfig(generator.files()));
    config["quantization_config"] = nlohmann::json::parse(quantization.dump());
  }
  RETURN_IF_ERROR(WriteText(fs::path(output.path()) / "config.json", config.dump(2)));
  if (!request.tokenizer_dir.empty()) {
    RETURN_IF_ERROR(CopyTokenizer(request.tokenizer_dir, output.path()));
  }
  RETURN_IF_ERROR(output.Commit());
  return report;
}

}  // namespace tandem::bench
