#include "common/quantize/quantize_checkpoint.h"

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_group.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/checkpoint/weight_matrix.h"
#include "common/quantize/output_directory.h"
#include "common/quantize/packed_tensors.h"
#include "common/quantize/safetensors_writer.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Action = QuantizeItem::Action;
using Json = nlohmann::ordered_json;

constexpr uint64_t kCopyBytes = 8 << 20;
constexpr uint64_t kMaxConfigBytes = 16 << 20;
constexpr int kJsonIndent = 2;
constexpr const char* kIndexFile = "model.safetensors.index.json";

// One task: rows of a matrix, or bytes of a tensor that is copied.
struct Piece {
  const QuantizeItem* item = nullptr;
  uint64_t begin = 0;
  uint64_t end = 0;
};

uint64_t TensorBytes(const Checkpoint::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.view.Elements()) * DTypeBytes(tensor.view.dtype);
}

std::vector<Piece> CutIntoPieces(const QuantizeFile& file) {
  std::vector<Piece> pieces;
  for (const QuantizeItem& item : file.items) {
    const bool copied = item.action == Action::kCopy;
    const uint64_t size =
        copied ? TensorBytes(*item.source) : static_cast<uint64_t>(item.source->view.shape[0]);
    const uint64_t step = copied ? kCopyBytes : kPackRows;
    for (uint64_t begin = 0; begin < size; begin += step) {
      pieces.push_back({&item, begin, std::min(size, begin + step)});
    }
  }
  return pieces;
}

// Does the pieces of all files and keeps their sums; `Run` of one file at a time.
class Writer {
 public:
  Writer(const Checkpoint& checkpoint, const QuantizePlan& plan, const QuantizeProgress& progress)
      : checkpoint_(checkpoint), plan_(plan), progress_(progress) {}

  absl::Status Run(const QuantizeFile& file, const std::string& path) {
    ASSIGN_OR_RETURN(const auto out, SafetensorsWriter::Create(path, file.outputs));
    const std::vector<Piece> pieces = CutIntoPieces(file);
    losses_.clear();
    losses_.resize(file.items.size());
    oneapi::tbb::task_group_context context;
    oneapi::tbb::parallel_for(
        size_t{0}, pieces.size(),
        [&](size_t i) {
          const auto done = Do(pieces[i], *out);
          if (!Note(done, pieces[i], file)) context.cancel_group_execution();
        },
        context);
    RETURN_IF_ERROR(status_);
    Judge(file);
    return out->Finish();
  }

  QuantizeReport& report() { return report_; }

 private:
  absl::StatusOr<EncodeLoss> Do(const Piece& piece, SafetensorsWriter& out) const {
    const QuantizeItem& item = *piece.item;
    if (item.action == Action::kCopy) {
      const auto* const bytes = item.source->view.As<const char>();
      RETURN_IF_ERROR(out.Write(item.first_output, piece.begin,
                                {bytes + piece.begin, piece.end - piece.begin}));
      return EncodeLoss{};
    }
    const int64_t cols = item.source->view.shape[1];
    const Range rows = {static_cast<int64_t>(piece.begin), static_cast<int64_t>(piece.end)};
    const size_t elements = static_cast<size_t>(rows.size() * cols);
    ASSIGN_OR_RETURN(const WeightMatrix matrix,
                     WeightMatrix::Create(checkpoint_, item.source->name,
                                          item.source->view.shape[0], cols, plan_.source_scheme));
    if (item.action == Action::kWriteBf16) {
      std::vector<uint16_t> values(elements);
      RETURN_IF_ERROR(matrix.ReadBf16(rows, {0, cols}, values));
      RETURN_IF_ERROR(
          out.Write(item.first_output, piece.begin * static_cast<uint64_t>(cols) * sizeof(uint16_t),
                    {reinterpret_cast<const char*>(values.data()), elements * sizeof(uint16_t)}));
      return EncodeLoss{};
    }
    std::vector<float> values(elements);
    RETURN_IF_ERROR(matrix.ReadF32(rows, {0, cols}, values));
    return Quantize(item, rows, values, out);
  }

  absl::StatusOr<EncodeLoss> Quantize(const QuantizeItem& item, Range rows,
                                      const std::vector<float>& values,
                                      SafetensorsWriter& out) const {
    const EncodeTarget& target = *item.target;
    const int64_t matrix_rows = item.source->view.shape[0];
    const int64_t cols = item.source->view.shape[1];
    std::vector<uint8_t> codes(values.size());
    std::vector<GroupParameters> groups(static_cast<size_t>(rows.size()) *
                                        GroupsInRow(cols, target));
    const auto loss = Encode(values.data(), rows.size(), cols, target, ScaleSearch::kLeastSquares,
                             codes.data(), groups.data());
    if (!loss.ok()) {
      return TensorError(*item.source, absl::StrCat("rows from ", rows.begin, ": ",
                                                    std::string(loss.status().message())));
    }
    const std::vector<PackedTensor> tensors = PackedTensors(target, matrix_rows, cols);
    const std::vector<std::string> packed =
        PackRows(target, matrix_rows, cols, rows.size(), codes.data(), groups.data());
    for (size_t i = 0; i < packed.size(); ++i) {
      const std::optional<uint64_t> offset = tensors[i].OffsetOf(rows.begin);
      if (offset) RETURN_IF_ERROR(out.Write(item.first_output + i, *offset, packed[i]));
    }
    return loss;
  }

  // Keeps the first error; false: stop.
  bool Note(const absl::StatusOr<EncodeLoss>& done, const Piece& piece, const QuantizeFile& file) {
    const std::lock_guard lock(mutex_);
    if (!status_.ok()) return false;
    if (!done.ok()) {
      status_ = done.status();
      return false;
    }
    losses_[static_cast<size_t>(piece.item - file.items.data())] += *done;
    const uint64_t row_bytes = piece.item->action == Action::kCopy
                                   ? 1
                                   : TensorBytes(*piece.item->source) /
                                         static_cast<uint64_t>(piece.item->source->view.shape[0]);
    done_bytes_ += (piece.end - piece.begin) * row_bytes;
    if (progress_ && !progress_(done_bytes_, plan_.source_bytes)) {
      status_ = absl::CancelledError("interrupted");
    }
    return status_.ok();
  }

  void Judge(const QuantizeFile& file) {
    for (size_t i = 0; i < losses_.size(); ++i) {
      report_.loss += losses_[i];
      if (losses_[i].Relative() <= report_.worst_loss) continue;
      report_.worst_loss = losses_[i].Relative();
      report_.worst_matrix = std::string(file.items[i].module());
    }
  }

  const Checkpoint& checkpoint_;
  const QuantizePlan& plan_;
  const QuantizeProgress& progress_;
  std::mutex mutex_;  // guards what follows while pieces run
  absl::Status status_;
  std::vector<EncodeLoss> losses_;  // one an item of the file
  uint64_t done_bytes_ = 0;
  QuantizeReport report_;
};

absl::StatusOr<Json> ReadConfig(const std::string& dir) {
  const std::string path = dir + "/config.json";
  std::error_code error;
  const uint64_t bytes = fs::file_size(path, error);
  if (error) return absl::NotFoundError(path + ": cannot be read");
  if (bytes > kMaxConfigBytes) return absl::InvalidArgumentError(path + ": is too large");
  std::ifstream in(path);
  Json json = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError(path + ": is not a JSON object");
  return json;
}

absl::Status WriteJson(const Json& json, const std::string& path) {
  std::ofstream out(path);
  out << json.dump(kJsonIndent, ' ', false, Json::error_handler_t::replace) << "\n";
  out.close();
  if (!out.good()) return absl::DataLossError(path + ": cannot be written");
  return absl::OkStatus();
}

// Weights in any form, and what is written anew.
bool IsCopied(const fs::path& file) {
  constexpr std::array<std::string_view, 9> kWeights = {
      ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt"};
  const std::string name = file.filename().string();
  if (name == "config.json" || name.ends_with(".index.json")) return false;
  return std::none_of(kWeights.begin(), kWeights.end(),
                      [&](std::string_view suffix) { return name.ends_with(suffix); });
}

std::vector<fs::path> FilesToCopy(const std::string& dir) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (entry.is_regular_file(error) && IsCopied(entry.path())) files.push_back(entry.path());
  }
  return files;
}

absl::Status CopyFile(const fs::path& from, const fs::path& to) {
  // Through streams: the copy is writable even where the source is not.
  std::ifstream in(from, std::ios::binary);
  std::ofstream out(to, std::ios::binary);
  if (in.peek() != std::ifstream::traits_type::eof()) out << in.rdbuf();
  out.close();
  if (in.bad() || !out.good()) {
    return absl::DataLossError(absl::StrCat(from.string(), ": cannot be copied"));
  }
  return absl::OkStatus();
}

Json IndexJson(const QuantizePlan& plan) {
  uint64_t total_bytes = 0;
  Json map = Json::object();
  for (const QuantizeFile& file : plan.files) {
    for (const TensorToWrite& output : file.outputs) {
      map[output.name] = file.name;
      total_bytes += output.Bytes();
    }
  }
  return {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", std::move(map)}};
}

absl::Status CheckNotInside(const std::string& model_dir, const std::string& output_dir) {
  std::error_code error;
  const fs::path model = fs::weakly_canonical(model_dir, error);
  const fs::path output = fs::weakly_canonical(fs::absolute(output_dir), error);
  const auto [end, at] = std::mismatch(model.begin(), model.end(), output.begin(), output.end());
  if (end != model.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(output_dir, ": the output cannot be the model's directory or inside of it"));
}

}  // namespace

absl::StatusOr<QuantizeReport> QuantizeCheckpoint(const QuantizeRequest& request,
                                                  const QuantizeProgress& progress) {
  RETURN_IF_ERROR(CheckNotInside(request.model_dir, request.output_dir));
  ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(request.model_dir));
  ASSIGN_OR_RETURN(const Json config, ReadConfig(request.model_dir));
  ASSIGN_OR_RETURN(const QuantizePlan plan,
                   PlanQuantize(*checkpoint, config, request.target, request.scope));
  const std::vector<fs::path> copied = FilesToCopy(request.model_dir);
  uint64_t weight_bytes = 0;
  for (const QuantizeFile& file : plan.files) weight_bytes += file.OutputBytes();
  uint64_t other_bytes = 0;
  std::error_code ignored;
  for (const fs::path& file : copied) other_bytes += fs::file_size(file, ignored);
  ASSIGN_OR_RETURN(
      OutputDirectory output,
      OutputDirectory::Create(request.output_dir, {request.overwrite, weight_bytes + other_bytes}));
  const fs::path dir = output.path();
  Writer writer(*checkpoint, plan, progress);
  for (const QuantizeFile& file : plan.files) {
    RETURN_IF_ERROR(writer.Run(file, (dir / file.name).string()));
  }
  for (const fs::path& file : copied) {
    RETURN_IF_ERROR(CopyFile(file, dir / file.filename()));
  }
  if (plan.files.size() > 1) {
    RETURN_IF_ERROR(WriteJson(IndexJson(plan), (dir / kIndexFile).string()));
  }
  RETURN_IF_ERROR(WriteJson(plan.config, (dir / "config.json").string()));
  RETURN_IF_ERROR(output.Commit());
  QuantizeReport report = std::move(writer.report());
  report.matrices = plan.quantized_matrices;
  report.matrix_bytes_before = plan.quantized_source_bytes;
  report.matrix_bytes_after = plan.quantized_output_bytes;
  report.weight_bytes = weight_bytes;
  return report;
}

}  // namespace tandem
