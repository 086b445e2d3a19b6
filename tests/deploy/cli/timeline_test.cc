#include "deploy/cli/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

namespace tandem {
namespace {

namespace v1 = trace::v1;
using Json = nlohmann::json;

constexpr int64_t kSecond = 1'000'000'000;

// A process with one track and some kinds; events are added by kind.
class Process {
 public:
  Process(std::string name, const std::string& track) {
    trace_.name = std::move(name);
    trace_.pid = 7;
    trace_.tables.set_begin_ns(kSecond);
    trace_.tables.set_end_ns(kSecond + 10'000);
    trace_.tables.add_tracks()->set_name(track);
    trace_.events.resize(1);
  }

  uint32_t Kind(const std::string& name, v1::EventRole role,
                const std::vector<std::string>& arguments = {}) {
    v1::EventKind& kind = *trace_.tables.add_kinds();
    kind.set_name(name);
    kind.set_role(role);
    for (const std::string& argument : arguments) kind.add_argument_names(argument);
    return static_cast<uint32_t>(trace_.tables.kinds_size()) - 1;
  }

  void Add(uint32_t kind, int64_t begin_ns, uint64_t duration_ns,
           const std::vector<int64_t>& arguments = {}) {
    v1::TraceEvent& event = trace_.events[0].emplace_back();
    event.set_kind(kind);
    event.set_begin_ns(kSecond + begin_ns);
    event.set_duration_ns(duration_ns);
    for (const int64_t argument : arguments) event.add_arguments(argument);
  }

  ProcessTrace& trace() { return trace_; }

 private:
  ProcessTrace trace_;
};

std::vector<Json> EventsOf(const std::vector<ProcessTrace>& processes, const std::string& phase) {
  std::ostringstream out;
  WriteChromeTrace(processes, out);
  const Json json = Json::parse(out.str());
  std::vector<Json> events;
  for (const Json& event : json.at("traceEvents")) {
    if (event.at("ph") == phase) events.push_back(event);
  }
  return events;
}

TEST(Timeline, EventsHaveTimesInMicrosecondsNamesAndArguments) {
  Process gpu("gpu_worker", "executor");
  const uint32_t step = gpu.Kind("step", v1::EVENT_ROLE_STEP, {"step", "rows"});
  gpu.Add(step, 1'500, 2'007, {42, 16});
  const std::vector<Json> events = EventsOf({gpu.trace()}, "X");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_DOUBLE_EQ(events[0].at("ts"), 1.5);
  EXPECT_DOUBLE_EQ(events[0].at("dur"), 2.007);
  EXPECT_EQ(events[0].at("name"), "step");
  EXPECT_EQ(events[0].at("cat"), "frame");
  EXPECT_EQ(events[0].at("args"), Json({{"step", 42}, {"rows", 16}}));
  std::map<std::string, Json> metadata;
  for (const Json& event : EventsOf({gpu.trace()}, "M")) metadata[event.at("name")] = event;
  EXPECT_EQ(metadata.at("process_name").at("args").at("name"), "gpu_worker (pid 7)");
  EXPECT_EQ(metadata.at("thread_name").at("args").at("name"), "executor");
  EXPECT_EQ(metadata.at("thread_name").at("tid"), events[0].at("tid"));
  EXPECT_EQ(metadata.at("thread_name").at("pid"), events[0].at("pid"));
}

TEST(Timeline, NamesAreEscaped) {
  const std::string odd = "a \"quoted\"\\ \n\t name \xff \x01";
  Process process(odd, odd);
  const uint32_t kind = process.Kind(odd, v1::EVENT_ROLE_BUSY, {odd});
  process.Add(kind, 0, 1, {1});
  const std::vector<Json> events = EventsOf({process.trace()}, "X");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].at("name"), "a \"quoted\"\\ \n\t name \xef\xbf\xbd \x01");
}

TEST(Timeline, NothingRecordedIsStillATrace) {
  EXPECT_TRUE(EventsOf({}, "X").empty());
  Process process("gateway", "engine");
  EXPECT_TRUE(EventsOf({process.trace()}, "X").empty());
}

TEST(Timeline, ProcessesOfAnotherMachineAreShifted) {
  Process here("gpu_worker", "executor");
  here.Add(here.Kind("a", v1::EVENT_ROLE_BUSY), 2'000, 1);
  Process there("expert_worker", "experts 0");
  there.Add(there.Kind("b", v1::EVENT_ROLE_BUSY), 2'000, 1);
  there.trace().shift_ns = 3'000;
  there.trace().clock_error_ns = 250;
  const std::vector<Json> events = EventsOf({here.trace(), there.trace()}, "X");
  ASSERT_EQ(events.size(), 2u);
  EXPECT_DOUBLE_EQ(events[0].at("ts"), 2);
  EXPECT_DOUBLE_EQ(events[1].at("ts"), 5);
  EXPECT_NE(events[0].at("pid"), events[1].at("pid"));
  EXPECT_EQ(Summarize({here.trace(), there.trace()}).clock_error_ns, 250);
}

TEST(Timeline, ArrowsJoinRowsWithTheirExpertsAndTheSumsWithTheWait) {
  const std::vector<std::string> key = {"step", "layer", "lane", "rows"};
  Process gpu("gpu_worker", "executor");
  const uint32_t submit = gpu.Kind("submit", v1::EVENT_ROLE_SEND, key);
  const uint32_t wait = gpu.Kind("wait", v1::EVENT_ROLE_COLLECT, key);
  Process worker("expert_worker", "experts 0");
  const uint32_t experts = worker.Kind("experts", v1::EVENT_ROLE_COMPUTE, key);
  for (int64_t layer = 0; layer < 2; ++layer) {
    gpu.Add(submit, 1'000 * layer, 100, {5, layer, 0, 1});
    worker.Add(experts, 1'000 * layer + 200, 300, {5, layer, 0, 1});
    gpu.Add(wait, 1'000 * layer + 150, 400, {5, layer, 0, 1});
  }
  worker.Add(experts, 5'000, 300, {6, 0, 0, 1});  // of a step that the gpu worker did not record
  const std::vector<ProcessTrace> processes = {gpu.trace(), worker.trace()};
  const std::vector<Json> begins = EventsOf(processes, "s");
  const std::vector<Json> ends = EventsOf(processes, "f");
  ASSERT_EQ(begins.size(), 4u);
  ASSERT_EQ(ends.size(), 4u);
  for (size_t i = 0; i < begins.size(); ++i) {
    EXPECT_EQ(begins[i].at("id"), ends[i].at("id"));
    EXPECT_LE(begins[i].at("ts"), ends[i].at("ts"));
    EXPECT_NE(begins[i].at("pid"), ends[i].at("pid"));
  }
  EXPECT_EQ(begins[0].at("name"), "rows");
  EXPECT_DOUBLE_EQ(begins[0].at("ts"), 0.1);
  EXPECT_DOUBLE_EQ(ends[0].at("ts"), 0.2);
  EXPECT_EQ(begins[1].at("name"), "sums");
  EXPECT_DOUBLE_EQ(begins[1].at("ts"), 0.5);
  EXPECT_DOUBLE_EQ(ends[1].at("ts"), 0.55);
}

TEST(Timeline, SummaryHasStepsAndSharesOfTheThreadsThatSaidWhatTheyDid) {
  Process gpu("gpu_worker", "executor");
  const uint32_t step = gpu.Kind("step", v1::EVENT_ROLE_STEP);
  const uint32_t work = gpu.Kind("attention", v1::EVENT_ROLE_BUSY);
  const uint32_t wait = gpu.Kind("wait", v1::EVENT_ROLE_COLLECT);
  for (int64_t i = 0; i < 3; ++i) {
    gpu.Add(step, 2'000 * i, 1'000 + 100 * static_cast<uint64_t>(i));
    gpu.Add(work, 2'000 * i, 700);
    gpu.Add(wait, 2'000 * i + 700, 300);
  }
  gpu.trace().tables.add_tracks()->set_name("link");
  gpu.trace().tables.mutable_tracks(1)->set_dropped_events(9);
  gpu.trace().events.emplace_back();
  gpu.trace().events[1].push_back(gpu.trace().events[0][0]);
  gpu.trace().events[1][0].set_kind(gpu.Kind("to experts", v1::EVENT_ROLE_FRAME));
  const TimelineSummary summary = Summarize({gpu.trace()});
  EXPECT_EQ(summary.steps, 3u);
  EXPECT_DOUBLE_EQ(summary.median_step_us, 1.1);
  EXPECT_EQ(summary.events, 10u);
  EXPECT_EQ(summary.dropped_events, 9u);
  ASSERT_EQ(summary.processes.size(), 1u);
  EXPECT_EQ(summary.processes[0].threads, 1);
  EXPECT_DOUBLE_EQ(summary.processes[0].busy, 0.21);
  EXPECT_DOUBLE_EQ(summary.processes[0].stalled, 0.09);
  const std::string text = FormatSummary(summary);
  EXPECT_THAT(text, ::testing::HasSubstr("3 steps, median 1.1 us"));
  EXPECT_THAT(text, ::testing::HasSubstr("21.0 %"));
  EXPECT_THAT(text, ::testing::HasSubstr("9 events did not fit"));
}

}  // namespace
}  // namespace tandem
