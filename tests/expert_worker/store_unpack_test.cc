// Unpacking gives back, bit by bit, what was packed: codes, parameters and elements of every
// format, however the matrix was cut; and experts out of the stores of any number of workers.

#include "expert_worker/engine/store_unpack.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/shm/unique_fd.h"
#include "expert_worker/kernels/packed_matrix.h"
#include "expert_worker/kernels/panel_layout.h"
#include "tests/expert_worker/quantized_fakes.h"

namespace tandem::expert {
namespace {

using kernels::PackSource;
using kernels::RandomWeights;
using shm::UniqueFd;

class EveryFormat : public ::testing::TestWithParam<uint32_t> {
 protected:
  WeightFormat format() const { return static_cast<WeightFormat>(GetParam()); }
  uint32_t group() const { return kernels::UsualGroup(format()); }
};

bool MayCut(WeightFormat format, uint32_t group, uint32_t chunk) {
  return QuantumFits({format, group}, chunk);
}

// Packed in chunks, as down projections are.
struct Chunked {
  Chunked(WeightFormat format, uint32_t group, const RandomWeights& weights, uint32_t n, uint32_t k,
          uint32_t chunk) {
    const size_t panel = kernels::PanelBytes(format, chunk, group);
    const size_t stride = panel * kernels::PanelCount(n);
    const uint32_t chunks = (k + chunk - 1) / chunk;
    memory.resize(stride * chunks + kernels::kPackAlignment);
    void* base = memory.data();
    size_t space = memory.size();
    std::align(kernels::kPackAlignment, stride * chunks, base, space);
    for (uint32_t c = 0; c < chunks; ++c) {
      kernels::PackPanels(format, group, weights.Source(0, c * chunk), n,
                          std::min(chunk, k - c * chunk), chunk,
                          static_cast<char*>(base) + c * stride);
    }
    view = {base, n, k, chunk, group, panel, stride};
  }
  std::vector<char> memory;
  kernels::PackedMatrix view;
};

void ExpectSameRows(const CanonicalMatrix& got, const PackSource& want, uint32_t first_row) {
  const WeightFormat format = got.format.format;
  const size_t bytes = ElementBytes(format);
  const bool has_min = kernels::TraitsOf(format).min != kernels::MinType::kNone;
  for (uint32_t r = 0; r < got.rows; ++r) {
    const uint8_t* row = got.elements.data() + size_t{r} * got.columns * bytes;
    if (IsPlain(format)) {
      const char* from =
          static_cast<const char*>(want.data) + size_t{first_row + r} * want.row_stride * bytes;
      ASSERT_EQ(std::memcmp(row, from, got.columns * bytes), 0) << "row " << r;
      continue;
    }
    const QuantizedView& view = want.quantized;
    ASSERT_EQ(std::memcmp(row, view.codes + (first_row + r) * view.code_stride, got.columns), 0)
        << "row " << r;
    const GroupParameters* groups = view.groups + (first_row + r) * view.group_stride;
    for (uint32_t g = 0; g < got.groups_per_row(); ++g) {
      const GroupParameters& p = got.groups[size_t{r} * got.groups_per_row() + g];
      ASSERT_EQ(p.scale, groups[g].scale) << "row " << r << " group " << g;
      // Formats without minima drop what was given as one.
      const uint32_t min = has_min ? groups[g].min : 0;
      ASSERT_EQ(p.min, min) << "row " << r << " group " << g;
      ASSERT_EQ(p.super, groups[g].super) << "row " << r << " group " << g;
    }
  }
}

TEST_P(EveryFormat, RowsComeBackFromAnyCut) {
  const uint32_t n = 70, k = 288;
  const RandomWeights weights(format(), group(), n, k, 5);
  for (const uint32_t chunk : {k, 4u, 16u, 64u, 96u}) {
    if (chunk != k && !MayCut(format(), group(), chunk)) continue;
    const Chunked packed(format(), group(), weights, n, k, chunk);
    for (const auto& [begin, end] : {std::array{0u, n}, {7u, 41u}, {32u, 33u}}) {
      CanonicalMatrix out;
      out.Reshape({format(), group()}, end - begin, k);
      kernels::UnpackRows(format(), packed.view, begin, end,
                          {out.elements.data(), k, out.groups.data(), out.groups_per_row(), 0});
      SCOPED_TRACE("chunk " + std::to_string(chunk) + " rows from " + std::to_string(begin));
      ExpectSameRows(out, weights.Source(), begin);
    }
  }
}

class Stores {
 public:
  Stores(const KnownExperts& experts, const std::vector<uint32_t>& shares) {
    const uint32_t quantum = experts.quantum();
    const uint32_t segments = SegmentCount(experts.shape().intermediate, quantum);
    for (uint32_t i = 0; i < shares.size(); ++i) {
      const auto range = AssignSegments(segments, shares, i);
      const UniqueFd fd(memfd_create("store", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      LoadProgress progress;
      auto store = WeightStore::Build(fd.get(), experts.Spec(quantum, *range), experts,
                                      {.threads = 1}, &progress);
      EXPECT_TRUE(store.ok()) << store.status();
      owned_.push_back(*std::move(store));
      stores_.push_back(owned_.back().get());
    }
  }
  const std::vector<const WeightStore*>& get() const { return stores_; }

 private:
  std::vector<std::unique_ptr<WeightStore>> owned_;
  std::vector<const WeightStore*> stores_;
};

// The exact values of a canonical matrix, by packing it again.
std::vector<float> ValuesOf(const CanonicalMatrix& m) {
  PackSource source{};
  source.format = m.format.format;
  source.data = m.elements.data();
  source.row_stride = m.columns;
  source.quantized = m.quantized();
  const auto packed = kernels::OwnedMatrix::Pack(m.format.format, m.format.group_columns, source,
                                                 m.rows, m.columns);
  std::vector<float> values(size_t{m.rows} * m.columns);
  kernels::UnpackPanels(m.format.format, packed.view(), values.data());
  return values;
}

void ExpectSameExperts(const KnownExperts& experts, const std::vector<uint32_t>& shares) {
  const Stores stores(experts, shares);
  ASSERT_TRUE(CheckComplete(stores.get()).ok());
  const FakeShape& shape = experts.shape();
  const size_t part = size_t{shape.intermediate} * shape.hidden;
  CanonicalExpert out;
  for (const uint32_t layer : shape.moe_layers) {
    for (uint32_t e = 0; e < shape.experts; ++e) {
      UnpackExpert(stores.get(), layer, e, &out);
      const int l = static_cast<int>(layer), x = static_cast<int>(e);
      const std::vector<float> gate_up = ValuesOf(out.gate_up);
      const std::vector<float> down = ValuesOf(out.down);
      const float* gate = experts.part(l, x, ExpertPart::kGate);
      const float* up = experts.part(l, x, ExpertPart::kUp);
      EXPECT_TRUE(std::equal(gate, gate + part, gate_up.begin())) << "gate of " << e;
      EXPECT_TRUE(std::equal(up, up + part, gate_up.begin() + static_cast<ptrdiff_t>(part)))
          << "up of " << e;
      EXPECT_TRUE(std::equal(down.begin(), down.end(), experts.part(l, x, ExpertPart::kDown)))
          << "down of " << e;
    }
  }
}

TEST_P(EveryFormat, ExpertsComeBackFromTheStoresOfAllWorkers) {
  const MatrixFormat m{format(), group()};
  const FakeShape shape{
      .layers = 3, .moe_layers = {0, 2}, .experts = 3, .hidden = 96, .intermediate = 288};
  const QuantizedExperts experts(shape, m, m, 11);
  ExpectSameExperts(experts, {1});
  ExpectSameExperts(experts, {2, 0, 5});
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat, ::testing::Range(0u, kernels::kFormatCount),
                         [](const auto& info) {
                           return std::string(kernels::kFormatNames[info.param]);
                         });

TEST(UnpackExpert, LongGroupsAreCutIntoSegments) {
  const FakeShape shape{
      .layers = 1, .moe_layers = {0}, .experts = 2, .hidden = 64, .intermediate = 320};
  for (const uint32_t group : {0u, 128u}) {
    const MatrixFormat gate_up{WeightFormat::kInt4F16, 32};
    ExpectSameExperts(QuantizedExperts(shape, gate_up, {WeightFormat::kFp8, group}, 3), {1, 2});
  }
}

TEST(UnpackExpert, BiasesComeAlong) {
  const FakeShape shape{.layers = 1,
                        .moe_layers = {0},
                        .experts = 2,
                        .hidden = 40,
                        .intermediate = 24,
                        .biases = true};
  const FakeExperts experts(shape, 9);
  const Stores stores(experts, {1, 1});
  CanonicalExpert out;
  UnpackExpert(stores.get(), 0, 1, &out);
  const auto same = [&](ExpertPart part, const std::vector<float>& got, size_t first, size_t n) {
    const float* want = experts.bias(0, 1, part);
    return std::equal(want, want + n, got.begin() + static_cast<ptrdiff_t>(first));
  };
  EXPECT_TRUE(same(ExpertPart::kGate, out.gate_up_bias, 0, 24));
  EXPECT_TRUE(same(ExpertPart::kUp, out.gate_up_bias, 24, 24));
  EXPECT_TRUE(same(ExpertPart::kDown, out.down_bias, 0, 40));
}

TEST(CheckComplete, RefusesMissingAndDoubleSegmentsAndOtherModels) {
  const FakeExperts experts({.layers = 1, .moe_layers = {0}}, 1);
  const Stores halves(experts, {1, 1});
  const auto& get = halves.get();
  EXPECT_TRUE(CheckComplete(get).ok());
  EXPECT_FALSE(CheckComplete({}).ok());
  for (const auto& some : {std::vector{get[0]}, {get[1]}, {get[1], get[0]}, {get[0], get[0]}}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(CheckComplete(some)));
  }
  const FakeExperts others({.layers = 1, .moe_layers = {0}, .experts = 5}, 1);
  const Stores other_halves(others, {1, 1});
  EXPECT_FALSE(CheckComplete(std::vector{get[0], other_halves.get()[1]}).ok());
}

TEST(AttachSealed, TakesSealedStoresOnlyAndOnlyTheWantedOne) {
  const FakeExperts experts({.layers = 1, .moe_layers = {0}}, 1);
  const StoreSpec spec = experts.Spec(experts.quantum(), experts.all());
  LoadProgress progress;
  const UniqueFd sealed(memfd_create("store", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(WeightStore::Pack(sealed.get(), spec, experts, {}, &progress).ok());
  // A descriptor that cannot write, as it is handed over.
  const std::string path = "/proc/self/fd/" + std::to_string(sealed.get());
  const UniqueFd read_only(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto store = WeightStore::AttachSealed(read_only.get(), spec);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ((*store)->segments(), spec.segments.size());
  StoreSpec other = spec;
  other.model_hash = 78;
  EXPECT_TRUE(
      absl::IsFailedPrecondition(WeightStore::AttachSealed(read_only.get(), other).status()));
  const UniqueFd open_to_all(memfd_create("store", MFD_CLOEXEC));
  ASSERT_TRUE(WeightStore::Pack(open_to_all.get(), spec, experts, {}, &progress).ok());
  EXPECT_TRUE(
      absl::IsFailedPrecondition(WeightStore::AttachSealed(open_to_all.get(), spec).status()));
}

}  // namespace
}  // namespace tandem::expert
