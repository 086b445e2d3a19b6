#include "tests/fakes/recording_backend.h"

#include <gtest/gtest.h>

#include "common/hw/cpu_features.h"
#include "expert_worker/kernels/select.h"
#include "gpu_worker/backend_cpu/cpu_backend.h"

namespace tandem::gpu {
namespace {

void AddInGraph(RecordingBackend& backend, float* x, const float* y, int bound,
                const int32_t* count) {
  backend.GraphBegin({.bucket = bound});
  AddArgs args;
  args.rows = {.bound = bound, .count = count};
  args.x = {x, 4};
  args.y = ConstMatrix(y, 4);
  args.width = 4;
  backend.Add(args);
  backend.GraphEnd();
}

TEST(RecordingBackend, TellsStaticArgumentsFromDeviceValues) {
  RecordingBackend backend;
  auto* x = static_cast<float*>(backend.Allocate(64).value());
  auto* count = static_cast<int32_t*>(backend.Allocate(4).value());
  *count = 1;
  AddInGraph(backend, x, x, 2, count);
  const auto first = backend.TakeOps();
  *count = 2;
  x[0] = 5;
  AddInGraph(backend, x, x, 2, count);
  EXPECT_EQ(backend.TakeOps(), first) << FormatOps(first);
  AddInGraph(backend, x, x, 3, count);
  EXPECT_NE(backend.TakeOps(), first);
  AddInGraph(backend, x, x + 1, 2, count);
  EXPECT_NE(backend.TakeOps(), first);
}

TEST(RecordingBackend, SeparatesTheGraphFromWhatIsAroundIt) {
  RecordingBackend backend;
  float x[4] = {}, y[4] = {};
  backend.CopyToDevice(x, y, sizeof(x));
  AddInGraph(backend, x, y, 1, nullptr);
  backend.CopyToHost(y, x, sizeof(x));
  const auto ops = backend.TakeOps();
  ASSERT_EQ(ops.size(), 5u);
  EXPECT_EQ(ops.front().name, "CopyToDevice");
  const auto inside = RecordingBackend::GraphOps(ops);
  ASSERT_EQ(inside.size(), 1u);
  EXPECT_EQ(inside[0].name, "Add");
  EXPECT_TRUE(backend.TakeOps().empty());
}

TEST(RecordingBackend, ForwardsToARealBackend) {
  CpuBackendOptions options;
  options.kernels = kernels::SelectKernelTable(Isa::kRef, DetectCpuFeatures());
  options.max_rows = 4;
  CpuBackend cpu(options);
  RecordingBackend backend(&cpu);
  float x[4] = {1, 2, 3, 4};
  const float y[4] = {10, 20, 30, 40};
  AddInGraph(backend, x, y, 1, nullptr);
  EXPECT_EQ(x[3], 44.0f);
  EXPECT_EQ(backend.TakeOps().size(), 3u);
  EXPECT_TRUE(backend.Synchronize().ok());
}

}  // namespace
}  // namespace tandem::gpu
