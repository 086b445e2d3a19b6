// Segments and shares; filling, sealing, re-attaching and refusing weight stores.

#include "expert_worker/engine/weight_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "common/hw/cpu_features.h"
#include "common/shm/unique_fd.h"
#include "expert_worker/kernels/panel_layout.h"
#include "tests/expert_worker/expert_fakes.h"

namespace tandem::expert {
namespace {

using shm::UniqueFd;

UniqueFd NewMemfd() { return UniqueFd(memfd_create("store", MFD_CLOEXEC | MFD_ALLOW_SEALING)); }

absl::StatusOr<std::unique_ptr<WeightStore>> Build(int fd, const FakeExperts& experts,
                                                   const StoreSpec& spec) {
  LoadProgress progress;
  auto store = WeightStore::Build(fd, spec, experts, {.threads = 2}, &progress);
  EXPECT_TRUE(!store.ok() || progress.loaded_bytes == progress.total_bytes);
  return store;
}

// What the store holds is what the source holds, feature by feature.
void ExpectHolds(const WeightStore& store, const FakeExperts& experts, SegmentRange range,
                 uint32_t quantum) {
  const uint32_t hidden = experts.shape().hidden;
  const uint32_t intermediate = experts.shape().intermediate;
  for (uint32_t layer : experts.shape().moe_layers) {
    for (uint32_t e = 0; e < experts.shape().experts; ++e) {
      const int l = static_cast<int>(layer), x = static_cast<int>(e);
      const float* gate = experts.part(l, x, ExpertPart::kGate);
      const float* up = experts.part(l, x, ExpertPart::kUp);
      const float* down = experts.part(l, x, ExpertPart::kDown);
      for (uint32_t s = 0; s < range.size(); ++s) {
        const uint32_t first = (range.begin + s) * quantum;
        const uint32_t width = store.segment_width(s);
        std::vector<float> packed(size_t{2} * width * hidden);
        kernels::UnpackPanels(store.format(layer).gate_up.format, store.GateUp(layer, e, s),
                              packed.data());
        for (uint32_t i = 0; i < width * hidden; ++i) {
          ASSERT_EQ(packed[i], gate[first * hidden + i]);
          ASSERT_EQ(packed[width * hidden + i], up[first * hidden + i]);
        }
      }
      std::vector<float> packed(size_t{hidden} * store.width());
      kernels::UnpackPanels(store.format(layer).down.format, store.Down(layer, e), packed.data());
      for (uint32_t o = 0; o < hidden; ++o) {
        for (uint32_t f = 0; f < store.width(); ++f) {
          ASSERT_EQ(packed[o * store.width() + f],
                    down[o * intermediate + range.begin * quantum + f]);
        }
      }
    }
  }
}

TEST(Segments, QuantumLeavesAtLeastFourSegmentsWhereItCan) {
  const std::vector<LayerFormat> bf16(2);
  EXPECT_EQ(ChooseQuantum(768, bf16), 64u);
  EXPECT_EQ(ChooseQuantum(2048, bf16), 64u);
  EXPECT_EQ(ChooseQuantum(100, bf16), 32u);
  EXPECT_EQ(ChooseQuantum(64, bf16), 16u);
  EXPECT_EQ(ChooseQuantum(32, bf16), 8u);
  EXPECT_EQ(ChooseQuantum(16, bf16), 4u);
  EXPECT_EQ(ChooseQuantum(3, bf16), 4u);
  EXPECT_EQ(SegmentCount(50, 8), 7u);
}

TEST(Segments, QuantumKeepsScalesWhole) {
  const auto of = [](WeightFormat format, uint32_t group_columns, uint32_t intermediate) {
    const MatrixFormat m{format, group_columns};
    return ChooseQuantum(intermediate, std::vector<LayerFormat>{{m, m}});
  };
  EXPECT_EQ(of(WeightFormat::kInt4F16, 32, 768), 64u);
  EXPECT_EQ(of(WeightFormat::kInt4F16, 128, 768), 128u);
  EXPECT_EQ(of(WeightFormat::kFp8, 128, 256), 64u);
  EXPECT_EQ(of(WeightFormat::kInt8F32, 0, 768), 128u);
  EXPECT_EQ(of(WeightFormat::kQ4K, 32, 768), 128u);
  EXPECT_EQ(of(WeightFormat::kNvfp4, 16, 768), 128u);
  EXPECT_EQ(of(WeightFormat::kQ4_1, 32, 768), 64u);
  EXPECT_EQ(of(WeightFormat::kFp8, 96, 768), 32u);
  EXPECT_EQ(of(WeightFormat::kFp8, 100, 768), 4u);
  EXPECT_FALSE(QuantumFits({WeightFormat::kFp8, 100}, 8));
  EXPECT_FALSE(IsSupported({WeightFormat::kInt4F16, 48}));
}

// Bits of a weight as the format defines it, parameters included.
double BitsOf(const MatrixFormat& m) {
  const kernels::FormatTraits& t = kernels::TraitsOf(m.format);
  constexpr double kBits[] = {32, 16, 16, 8, 8, 4, 5, 6, 2, 3};  // by CodeStorage
  const double group = 8.0 * (kernels::ScaleBytes(t.scale) + kernels::MinBytes(t.min));
  const bool blocks =
      t.super == kernels::SuperType::kF16 || t.super == kernels::SuperType::kF16Pair;
  return kBits[static_cast<int>(t.codes)] + (m.group_columns == 0 ? 0 : group / m.group_columns) +
         (blocks ? 8.0 * kernels::SuperBytes(t.super) / kSuperBlockColumns : 0);
}

// Qwen3-30B's experts and DeepSeek-V3's: pages, panels and copies of scales add little.
TEST(StoreManifest, TakesLittleMoreThanTheFormatsBits) {
  for (const auto& [hidden, intermediate] : {std::pair(2048u, 768u), {7168u, 2048u}}) {
    for (const kernels::FormatTraits& t : kernels::kFormats) {
      const uint32_t group = t.dot_group != 0 || t.format == WeightFormat::kMxfp8 ? 32 : 0;
      const MatrixFormat m{t.format, t.dot_group == 16 ? 16 : group};
      StoreSpec spec;
      spec.layers = 1;
      spec.moe_layers = {0};
      spec.formats = {{m, m}};
      spec.experts = 8;
      spec.hidden = hidden;
      spec.intermediate = intermediate;
      spec.quantum = ChooseQuantum(intermediate, spec.formats);
      spec.segments = {0, SegmentCount(intermediate, spec.quantum)};
      const auto manifest = MakeManifest(spec);
      ASSERT_TRUE(manifest.ok()) << manifest.status();
      const double least = BitsOf(m) / 8 * 3 * hidden * intermediate * spec.experts;
      const auto bytes = static_cast<double>(manifest->file_bytes);
      const char* name = kernels::kFormatNames[static_cast<int>(t.format)];
      EXPECT_GE(bytes, least) << name;
      EXPECT_LE(bytes, 1.06 * least) << name << " " << hidden;
    }
  }
}

TEST(Segments, SharesAreDisjointAndCoverEverything) {
  const std::vector<std::vector<uint32_t>> cases = {
      {1}, {1, 1}, {3, 1}, {1, 1, 1}, {0, 1, 0}, {5, 0, 2}, {7, 7, 7, 7, 7, 7, 7}};
  for (const auto& shares : cases) {
    for (uint32_t segments : {1u, 2u, 4u, 24u, 64u}) {
      uint32_t next = 0;
      for (uint32_t i = 0; i < shares.size(); ++i) {
        const auto range = AssignSegments(segments, shares, i);
        ASSERT_TRUE(range.ok());
        EXPECT_EQ(range->begin, next);
        EXPECT_TRUE(shares[i] != 0 || range->size() == 0);
        next = range->end;
      }
      EXPECT_EQ(next, segments);
    }
  }
  EXPECT_EQ(*AssignSegments(4, std::vector<uint32_t>{3, 1}, 0), (SegmentRange{0, 3}));
  EXPECT_EQ(AssignSegments(4, std::vector<uint32_t>{0, 0}, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(AssignSegments(4, std::vector<uint32_t>{1}, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(WeightStore, HoldsTheOwnedRangeOfEveryExpert) {
  FakeShape shape;
  shape.layers = 4;
  shape.moe_layers = {1, 3};
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (uint32_t intermediate : {16u, 24u, 30u, 77u}) {
      shape.dtype = dtype;
      shape.intermediate = intermediate;
      const FakeExperts experts(shape, 1);
      const uint32_t quantum = experts.quantum();
      const uint32_t count = SegmentCount(intermediate, quantum);
      for (SegmentRange range : {SegmentRange{0, count}, SegmentRange{0, 1}, SegmentRange{1, count},
                                 SegmentRange{2, 2}}) {
        const UniqueFd fd = NewMemfd();
        const auto store = Build(fd.get(), experts, experts.Spec(quantum, range));
        ASSERT_TRUE(store.ok()) << store.status();
        EXPECT_TRUE((*store)->sealed());
        EXPECT_TRUE((*store)->has_layer(3));
        EXPECT_FALSE((*store)->has_layer(2));
        EXPECT_FALSE((*store)->has_layer(4));
        if (range.size() != 0) ExpectHolds(**store, experts, range, quantum);
      }
    }
  }
}

TEST(WeightStore, SegmentsDoNotDependOnTheCut) {
  const FakeExperts experts(FakeShape{}, 2);
  const UniqueFd whole_fd = NewMemfd(), part_fd = NewMemfd();
  const auto whole = Build(whole_fd.get(), experts, experts.Spec(4, {0, 6}));
  const auto part = Build(part_fd.get(), experts, experts.Spec(4, {2, 5}));
  ASSERT_TRUE(whole.ok() && part.ok());
  EXPECT_EQ(std::memcmp((*whole)->GateUp(1, 3, 4).data, (*part)->GateUp(1, 3, 2).data,
                        (*whole)->segment_bytes(1)),
            0);
}

TEST(WeightStore, AnotherProcessAttachesWithoutTheSource) {
  const FakeExperts experts(FakeShape{}, 3);
  const StoreSpec spec = experts.Spec(8, {0, 3});
  const UniqueFd fd = NewMemfd();
  const pid_t child = fork();
  if (child == 0) {
    const bool built = Build(fd.get(), experts, spec).ok();
    _exit(built ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  const auto store = WeightStore::Attach(fd.get(), spec);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(experts.reads.load(), 0);
  ExpectHolds(**store, experts, {0, 3}, 8);
}

// Weights are read through huge pages without anybody's having reserved some.
TEST(WeightStore, SharedMemoryGetsHugePagesUnlessRefused) {
  FakeShape shape;
  shape.experts = 8;
  shape.hidden = 512;
  shape.intermediate = 256;
  const FakeExperts experts(shape, 5);
  const StoreSpec spec = experts.Spec(64, {0, 4});
  const UniqueFd plain_fd = NewMemfd();
  LoadProgress progress;
  const auto plain = WeightStore::Build(plain_fd.get(), spec, experts,
                                        {.threads = 2, .pages = HugePages::kOff}, &progress);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ((*plain)->page_kind(), PageKind::kPlain);
  const UniqueFd fd = NewMemfd();
  const auto store = Build(fd.get(), experts, spec);
  ASSERT_TRUE(store.ok()) << store.status();
  ExpectHolds(**store, experts, {0, 4}, 64);
  if ((*store)->page_kind() == PageKind::kPlain) GTEST_SKIP() << "this kernel refuses them";
  const auto again = WeightStore::Attach(fd.get(), spec);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ((*again)->page_kind(), PageKind::kTransparent);
}

TEST(WeightStore, SealedStoreCannotBeWrittenOrResized) {
  const FakeExperts experts(FakeShape{}, 4);
  const UniqueFd fd = NewMemfd();
  ASSERT_TRUE(Build(fd.get(), experts, experts.Spec(8, {0, 3})).ok());
  EXPECT_NE(ftruncate(fd.get(), 0), 0);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
  EXPECT_LT(pwrite(fd.get(), "x", 1, 0), 0);
  // Another model needs another memfd.
  EXPECT_EQ(Build(fd.get(), experts, experts.Spec(8, {0, 3}, 78)).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(WeightStore, EmptyFileIsNotFound) {
  const FakeExperts experts(FakeShape{}, 5);
  const UniqueFd fd = NewMemfd();
  const StoreSpec spec = experts.Spec(8, {0, 3});
  EXPECT_EQ(WeightStore::Attach(fd.get(), spec).status().code(), absl::StatusCode::kNotFound);
  ASSERT_EQ(ftruncate(fd.get(), 1 << 20), 0);
  EXPECT_EQ(WeightStore::Attach(fd.get(), spec).status().code(), absl::StatusCode::kNotFound);
}

TEST(WeightStore, AnotherStoreIsRefusedByName) {
  const FakeExperts experts(FakeShape{}, 6);
  const UniqueFd fd = NewMemfd();
  ASSERT_TRUE(Build(fd.get(), experts, experts.Spec(8, {0, 2})).ok());
  const auto refusal = [&](const StoreSpec& spec) {
    const absl::Status status = WeightStore::Attach(fd.get(), spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  };
  EXPECT_NE(refusal(experts.Spec(8, {0, 2}, 78)).find("model_hash"), std::string::npos);
  EXPECT_NE(refusal(experts.Spec(8, {0, 3})).find("segment_end"), std::string::npos);
  EXPECT_NE(refusal(experts.Spec(8, {1, 2})).find("segment_begin"), std::string::npos);
  StoreSpec other = experts.Spec(8, {0, 2});
  other.formats[0].down.format = WeightFormat::kBf16;
  EXPECT_NE(refusal(other).find("format"), std::string::npos);
  other = experts.Spec(8, {0, 2});
  other.experts = 3;
  EXPECT_NE(refusal(other).find("shape"), std::string::npos);
}

// An unsealable copy of a finished store, to be damaged.
class DamagedStore : public ::testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/tandem-store-XXXXXX";
    fd_ = UniqueFd(mkstemp(path));
    ASSERT_TRUE(fd_.valid());
    unlink(path);
    const auto store = Build(fd_.get(), experts_, spec_);
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_FALSE((*store)->sealed());
    data_offset_ = (*store)->manifest().data_offset;
    file_bytes_ = (*store)->manifest().file_bytes;
  }
  void FlipByte(uint64_t offset) {
    char byte = 0;
    ASSERT_EQ(pread(fd_.get(), &byte, 1, static_cast<off_t>(offset)), 1);
    byte = static_cast<char>(byte ^ 0x10);
    ASSERT_EQ(pwrite(fd_.get(), &byte, 1, static_cast<off_t>(offset)), 1);
  }
  absl::Status AttachStatus() { return WeightStore::Attach(fd_.get(), spec_).status(); }
  // Whatever the damage: the store is written again from the source.
  void ExpectReloads() {
    EXPECT_FALSE(AttachStatus().ok());
    const auto store = Build(fd_.get(), experts_, spec_);
    ASSERT_TRUE(store.ok()) << store.status();
    ExpectHolds(**store, experts_, spec_.segments, spec_.quantum);
  }

  FakeExperts experts_{FakeShape{}, 7};
  StoreSpec spec_ = experts_.Spec(8, {0, 3});
  UniqueFd fd_;
  uint64_t data_offset_ = 0;
  uint64_t file_bytes_ = 0;
};

TEST_F(DamagedStore, IntactCopyAttaches) { EXPECT_TRUE(AttachStatus().ok()) << AttachStatus(); }

TEST_F(DamagedStore, FlippedWeightIsDataLoss) {
  FlipByte(data_offset_ + 1000);
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
  ExpectReloads();
}

TEST_F(DamagedStore, FlippedLastWeightIsDataLoss) {
  FlipByte(file_bytes_ - 1);
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
}

TEST_F(DamagedStore, FlippedTableIsDataLoss) {
  FlipByte(sizeof(StoreManifest) + 3);
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
}

TEST_F(DamagedStore, MissingCompletionIsDataLoss) {
  FlipByte(offsetof(StoreManifest, complete));
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
  ExpectReloads();
}

TEST_F(DamagedStore, ShortFileIsDataLoss) {
  ASSERT_EQ(ftruncate(fd_.get(), static_cast<off_t>(file_bytes_ - 4096)), 0);
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
  ASSERT_EQ(ftruncate(fd_.get(), 100), 0);
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
  ExpectReloads();
}

TEST_F(DamagedStore, EveryFlippedManifestByteIsRefused) {
  for (uint64_t offset = 0; offset + 4 < sizeof(StoreManifest); ++offset) {
    FlipByte(offset);
    EXPECT_FALSE(AttachStatus().ok()) << offset;
    FlipByte(offset);
  }
  EXPECT_TRUE(AttachStatus().ok());
}

TEST_F(DamagedStore, AbandonedLoadLeavesAStoreThatIsRefused) {
  experts_.fail_expert = 2;
  EXPECT_EQ(Build(fd_.get(), experts_, spec_).status().code(), absl::StatusCode::kDataLoss);
  experts_.fail_expert = -1;
  ExpectReloads();
}

TEST(WeightStore, CancelledLoadEndsEarly) {
  const FakeExperts experts(FakeShape{}, 8);
  const UniqueFd fd = NewMemfd();
  LoadProgress progress;
  progress.cancel = true;
  const StoreSpec spec = experts.Spec(8, {0, 3});
  EXPECT_EQ(WeightStore::Build(fd.get(), spec, experts, {.threads = 2}, &progress).status().code(),
            absl::StatusCode::kCancelled);
}

TEST(WeightStore, ImpossibleShapesAreRefused) {
  const FakeExperts experts(FakeShape{}, 9);
  StoreSpec spec = experts.Spec(8, {0, 4});  // only 3 segments
  EXPECT_EQ(MakeManifest(spec).status().code(), absl::StatusCode::kInvalidArgument);
  spec = experts.Spec(8, {0, 3});
  spec.moe_layers = {1, 1};
  EXPECT_FALSE(MakeManifest(spec).ok());
  spec.moe_layers = {2};
  EXPECT_FALSE(MakeManifest(spec).ok());
}

}  // namespace
}  // namespace tandem::expert
