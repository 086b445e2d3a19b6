// Packed experts on disk: one file for every cut, refused and packed again when it is damaged.

#include "expert_worker/engine/packed_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "tests/expert_worker/quantized_fakes.h"

namespace tandem::expert {
namespace {

using shm::UniqueFd;

class PackedFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char dir[] = "/tmp/tandem-packed-XXXXXX";
    ASSERT_NE(mkdtemp(dir), nullptr);
    state_dir_ = dir;
    shape_.layers = 4;
    shape_.moe_layers = {1, 3};
    shape_.intermediate = 77;
    shape_.biases = true;
  }
  void TearDown() override { std::filesystem::remove_all(state_dir_); }

  StoreSpec SpecOf(const KnownExperts& experts, SegmentRange range) const {
    return experts.Spec(experts.quantum(), range);
  }
  absl::StatusOr<PackedFile> OpenOrPack(const KnownExperts& experts) {
    const StoreSpec spec = SpecOf(experts, experts.all());
    return PackedFile::OpenOrPack(PackedFile::PathFor(state_dir_, spec), spec, experts, 2,
                                  &progress_);
  }
  // Every byte of every segment, and the biases, equal those of a store packed in memory.
  void ExpectSame(const WeightStore& a, const WeightStore& b) {
    ASSERT_EQ(a.segments(), b.segments());
    ASSERT_EQ(a.width(), b.width());
    EXPECT_EQ(a.data_bytes(), b.data_bytes());
    for (const uint32_t layer : {1u, 3u}) {
      for (uint32_t e = 0; e < shape_.experts; ++e) {
        for (uint32_t s = 0; s < a.segments(); ++s) {
          EXPECT_EQ(std::memcmp(a.GateUp(layer, e, s).data, b.GateUp(layer, e, s).data,
                                a.segment_bytes(layer)),
                    0);
        }
        const float* bias = a.DownBias(layer, e);
        ASSERT_EQ(bias == nullptr, b.DownBias(layer, e) == nullptr);
        if (bias == nullptr) continue;
        EXPECT_EQ(std::memcmp(bias, b.DownBias(layer, e), shape_.hidden * sizeof(float)), 0);
      }
    }
  }
  static UniqueFd Memfd() {
    return UniqueFd(memfd_create("store", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  }
  static void FlipByte(const std::string& path, uint64_t offset) {
    const UniqueFd fd(open(path.c_str(), O_RDWR));
    char byte = 0;
    ASSERT_EQ(pread(fd.get(), &byte, 1, static_cast<off_t>(offset)), 1);
    byte = static_cast<char>(byte ^ 0x10);
    ASSERT_EQ(pwrite(fd.get(), &byte, 1, static_cast<off_t>(offset)), 1);
  }

  FakeShape shape_;
  std::string state_dir_;
  LoadProgress progress_;
};

TEST_F(PackedFileTest, EveryCutIsReadFromOneFile) {
  const FakeExperts experts(shape_, 1);
  const auto file = OpenOrPack(experts);
  ASSERT_TRUE(file.ok()) << file.status();
  const uint32_t segments = experts.all().size();
  for (const SegmentRange range : {SegmentRange{0, segments}, SegmentRange{0, 1},
                                   SegmentRange{1, segments}, SegmentRange{2, 3}}) {
    const StoreSpec spec = SpecOf(experts, range);
    const UniqueFd packed_fd = Memfd(), loaded_fd = Memfd();
    const auto want =
        WeightStore::Build(packed_fd.get(), spec, experts, {.threads = 2}, &progress_);
    ASSERT_TRUE(want.ok()) << want.status();
    const int reads = experts.reads;
    const auto loaded = file->Load(loaded_fd.get(), spec, {.threads = 2}, &progress_);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE((*loaded)->sealed());
    EXPECT_EQ(progress_.loaded_bytes, progress_.total_bytes);
    ExpectSame(**loaded, **want);
    EXPECT_TRUE(WeightStore::Attach(loaded_fd.get(), spec).ok());
    const auto mapped = file->Map(spec);
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    ExpectSame(**mapped, **want);
    EXPECT_EQ(experts.reads, reads);
  }
  const UniqueFd fd = Memfd();
  EXPECT_TRUE(file->Load(fd.get(), SpecOf(experts, {2, 2}), {.threads = 2}, &progress_).ok());
}

TEST_F(PackedFileTest, QuantizedFormats) {
  shape_.biases = false;
  shape_.hidden = 288;
  shape_.intermediate = 256;
  for (const WeightFormat format :
       {WeightFormat::kInt4F16, WeightFormat::kQ4K, WeightFormat::kMxfp4, WeightFormat::kFp8}) {
    const MatrixFormat m{format, kernels::UsualGroup(format)};
    const QuantizedExperts experts(shape_, m, m, 2);
    const auto file = OpenOrPack(experts);
    ASSERT_TRUE(file.ok()) << file.status();
    const StoreSpec spec = SpecOf(experts, {1, 3});
    const UniqueFd packed_fd = Memfd(), loaded_fd = Memfd();
    const auto want =
        WeightStore::Build(packed_fd.get(), spec, experts, {.threads = 2}, &progress_);
    const auto loaded = file->Load(loaded_fd.get(), spec, {.threads = 2}, &progress_);
    ASSERT_TRUE(want.ok() && loaded.ok()) << want.status() << loaded.status();
    ExpectSame(**loaded, **want);
  }
}

TEST_F(PackedFileTest, IsPackedOnceByManyWorkers) {
  const FakeExperts experts(shape_, 3);
  std::vector<std::thread> workers;
  for (int i = 0; i < 4; ++i) {
    workers.emplace_back([&] {
      LoadProgress progress;
      const StoreSpec spec = SpecOf(experts, experts.all());
      EXPECT_TRUE(
          PackedFile::OpenOrPack(PackedFile::PathFor(state_dir_, spec), spec, experts, 1, &progress)
              .ok());
    });
  }
  for (std::thread& worker : workers) worker.join();
  const int reads = experts.reads;
  ASSERT_TRUE(OpenOrPack(experts).ok());
  EXPECT_EQ(experts.reads, reads);
  const int expert_reads = static_cast<int>(2 * experts.all().size() + 1);
  EXPECT_EQ(reads, 2 * static_cast<int>(shape_.experts) * expert_reads);
}

TEST_F(PackedFileTest, DamagedFileIsNamedAndPackedAgain) {
  const FakeExperts experts(shape_, 4);
  const StoreSpec spec = SpecOf(experts, experts.all());
  const std::string path = PackedFile::PathFor(state_dir_, spec);
  ASSERT_TRUE(OpenOrPack(experts).ok());
  const uint64_t bytes = std::filesystem::file_size(path);
  const auto refusal = [&] {
    const auto file = PackedFile::Open(path, spec);
    EXPECT_NE(std::string(file.status().message()).find(path), std::string::npos);
    return file.status().code();
  };
  // Not written to its end; another manifest; a changed checksum; cut off.
  FlipByte(path, offsetof(StoreManifest, complete));
  EXPECT_EQ(refusal(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(OpenOrPack(experts).ok());
  FlipByte(path, offsetof(StoreManifest, hidden));
  EXPECT_EQ(refusal(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(OpenOrPack(experts).ok());
  FlipByte(path, sizeof(StoreManifest) + 9);
  EXPECT_EQ(refusal(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(OpenOrPack(experts).ok());
  std::filesystem::resize_file(path, bytes - 4096);
  EXPECT_EQ(refusal(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(OpenOrPack(experts).ok());
  EXPECT_EQ(std::filesystem::file_size(path), bytes);
}

TEST_F(PackedFileTest, ChangedWeightsAreFoundWhileLoading) {
  const FakeExperts experts(shape_, 5);
  const StoreSpec spec = SpecOf(experts, experts.all());
  const auto file = OpenOrPack(experts);
  ASSERT_TRUE(file.ok());
  FlipByte(file->path(), std::filesystem::file_size(file->path()) - 1);
  const UniqueFd fd = Memfd();
  const auto loaded = file->Load(fd.get(), spec, {.threads = 2}, &progress_);
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(std::string(loaded.status().message()).find(file->path()), std::string::npos);
  EXPECT_EQ(file->Map(spec).status().code(), absl::StatusCode::kDataLoss);
  // The worker that owns other segments is not concerned.
  const UniqueFd other_fd = Memfd();
  EXPECT_TRUE(file->Load(other_fd.get(), SpecOf(experts, {0, 1}), {.threads = 2}, &progress_).ok());
  EXPECT_TRUE(file->Map(SpecOf(experts, {0, 1})).ok());
  file->Discard();
  const auto again = OpenOrPack(experts);
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->Load(fd.get(), spec, {.threads = 2}, &progress_).ok());
}

TEST_F(PackedFileTest, FailedPackingLeavesNoFile) {
  FakeExperts experts(shape_, 6);
  experts.fail_expert = 2;
  EXPECT_EQ(OpenOrPack(experts).status().code(), absl::StatusCode::kDataLoss);
  progress_.cancel = true;
  experts.fail_expert = -1;
  EXPECT_EQ(OpenOrPack(experts).status().code(), absl::StatusCode::kCancelled);
  progress_.cancel = false;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(state_dir_ + "/packed")) {
    files += entry.path().extension() == ".lock" ? 0 : 1;
  }
  EXPECT_EQ(files, 0);
  EXPECT_TRUE(OpenOrPack(experts).ok());
}

TEST_F(PackedFileTest, NameTellsModelFormatAndShapeApart) {
  const FakeExperts experts(shape_, 7);
  const StoreSpec spec = SpecOf(experts, experts.all());
  const std::string path = PackedFile::PathFor(state_dir_, spec);
  EXPECT_EQ(PackedFile::PathFor(state_dir_, SpecOf(experts, {1, 2})), path);
  StoreSpec other = spec;
  other.model_hash = 78;
  EXPECT_NE(PackedFile::PathFor(state_dir_, other), path);
  other = spec;
  other.formats[0].down.format = WeightFormat::kBf16;
  EXPECT_NE(PackedFile::PathFor(state_dir_, other), path);
}

}  // namespace
}  // namespace tandem::expert
