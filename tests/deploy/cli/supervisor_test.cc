#include "deploy/cli/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

namespace tandem {
namespace {

// Children are small shell scripts that write their pid (one a start) to a file.
class SupervisorTest : public ::testing::Test {
 protected:
  SupervisorTest() {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGCHLD, SIGTERM, SIGINT}) sigaddset(&set, signal);
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    std::string path = ::testing::TempDir() + "tandem-sv-XXXXXX";
    dir_ = mkdtemp(path.data());
    options_.first_backoff_ms = 10;
    options_.stopped_grace_ms = 50;
    options_.hung_grace_ms = 100;
    options_.drain_ms = 5'000;
  }
  ~SupervisorTest() override { std::filesystem::remove_all(dir_); }

  Supervisor::Child Shell(const std::string& name, const std::string& script) {
    const std::string text = "echo $$ >> " + dir_ + "/" + name + "; " + script;
    return {{name, {"/bin/sh", "-c", text}, {}, ""}, nullptr};
  }
  std::vector<pid_t> Pids(const std::string& name) const {
    std::ifstream in(dir_ + "/" + name);
    std::vector<pid_t> pids;
    for (pid_t pid = 0; in >> pid;) pids.push_back(pid);
    return pids;
  }
  // Waits until `name` was started `count` times; false after ten seconds.
  bool WaitForStarts(const std::string& name, size_t count) const {
    for (int i = 0; i < 1000 && Pids(name).size() < count; ++i) usleep(10'000);
    return Pids(name).size() >= count;
  }

  SupervisorOptions options_;
  std::string dir_;
};

TEST_F(SupervisorTest, RestartsAProcessThatIsKilled) {
  Supervisor supervisor(options_, {Shell("a", "exec sleep 60")});
  ASSERT_TRUE(supervisor.Start().ok());
  std::thread other([&] {
    EXPECT_TRUE(WaitForStarts("a", 1));
    kill(Pids("a")[0], SIGKILL);
    EXPECT_TRUE(WaitForStarts("a", 2));
    supervisor.Stop();
  });
  EXPECT_EQ(supervisor.Run(), kExitOk);
  other.join();
  EXPECT_EQ(supervisor.restarts(), 1);
  for (const pid_t pid : Pids("a")) EXPECT_NE(kill(pid, 0), 0);
}

TEST_F(SupervisorTest, RestartsWithWhatTheExitCallsFor) {
  Supervisor::Child child = Shell("a", "exec sleep 60");
  std::vector<int> codes;  // of the thread that runs the supervisor
  child.respec = [&](int exit_code) {
    codes.push_back(exit_code);
    return Shell("a", codes.size() == 1 ? "exit 3" : "exec sleep 60").spec;
  };
  Supervisor supervisor(options_, {child});
  ASSERT_TRUE(supervisor.Start().ok());
  std::thread other([&] {
    EXPECT_TRUE(WaitForStarts("a", 1));
    kill(Pids("a")[0], SIGKILL);
    EXPECT_TRUE(WaitForStarts("a", 3));
    supervisor.Stop();
  });
  EXPECT_EQ(supervisor.Run(), kExitOk);
  other.join();
  EXPECT_EQ(codes, (std::vector<int>{-1, kExitAddressInUse}));
}

TEST_F(SupervisorTest, KillsAndRestartsAProcessThatIsStopped) {
  Supervisor supervisor(options_, {Shell("a", "exec sleep 60")});
  ASSERT_TRUE(supervisor.Start().ok());
  std::thread other([&] {
    EXPECT_TRUE(WaitForStarts("a", 1));
    kill(Pids("a")[0], SIGSTOP);
    EXPECT_TRUE(WaitForStarts("a", 2));
    supervisor.Stop();
  });
  EXPECT_EQ(supervisor.Run(), kExitOk);
  other.join();
}

// The other one's death shows that the grace is over.
TEST_F(SupervisorTest, ProcessThatGoesOnInTimeLives) {
  Supervisor supervisor(options_, {Shell("a", "exec sleep 60"), Shell("b", "exec sleep 60")});
  ASSERT_TRUE(supervisor.Start().ok());
  std::thread other([&] {
    EXPECT_TRUE(WaitForStarts("a", 1));
    EXPECT_TRUE(WaitForStarts("b", 1));
    kill(Pids("a")[0], SIGSTOP);
    kill(Pids("a")[0], SIGCONT);
    kill(Pids("b")[0], SIGSTOP);
    EXPECT_TRUE(WaitForStarts("b", 2));
    supervisor.Stop();
  });
  EXPECT_EQ(supervisor.Run(), kExitOk);
  other.join();
  EXPECT_EQ(Pids("a").size(), 1u);
  EXPECT_EQ(supervisor.restarts(), 1);
}

TEST_F(SupervisorTest, KillsAProcessThatStopsAnswering) {
  std::atomic<bool> answers{true};
  Supervisor::Child child = Shell("a", "exec sleep 60");
  child.probe = [&] { return answers.load(); };
  Supervisor supervisor(options_, {child});
  ASSERT_TRUE(supervisor.Start().ok());
  std::thread other([&] {
    usleep(1'500'000);  // one probe a second: let it answer once
    answers.store(false);
    EXPECT_TRUE(WaitForStarts("a", 2));
    supervisor.Stop();
  });
  EXPECT_EQ(supervisor.Run(), kExitOk);
  other.join();
}

TEST_F(SupervisorTest, GivesUpOnAnExitThatRestartingCannotMend) {
  // The good one is to be seen running first.
  const std::string wait = "until [ -s " + dir_ + "/good ]; do sleep 0.01; done; exit 4";
  Supervisor supervisor(options_, {Shell("good", "exec sleep 60"), Shell("bad", wait)});
  ASSERT_TRUE(supervisor.Start().ok());
  EXPECT_EQ(supervisor.Run(), kExitBadModel);
  EXPECT_THAT(supervisor.failure(), ::testing::HasSubstr("bad ended with exit code 4"));
  ASSERT_EQ(Pids("good").size(), 1u);
  EXPECT_NE(kill(Pids("good")[0], 0), 0);
}

TEST_F(SupervisorTest, EndsTheLastChildFirst) {
  const std::string order = dir_ + "/order";
  const auto trap = [&](const std::string& name) {
    return Shell(name, "trap 'echo " + name + " >> " + order +
                           "; exit 0' TERM; while true; do sleep 0.05; done");
  };
  Supervisor supervisor(options_, {trap("worker"), trap("gateway")});
  ASSERT_TRUE(supervisor.Start().ok());
  std::thread other([&] {
    EXPECT_TRUE(WaitForStarts("worker", 1) && WaitForStarts("gateway", 1));
    usleep(200'000);  // the traps are set after the pid is written
    supervisor.Stop();
  });
  EXPECT_EQ(supervisor.Run(), kExitOk);
  other.join();
  std::ifstream in(order);
  std::string first;
  std::string second;
  in >> first >> second;
  EXPECT_EQ(first, "gateway");
  EXPECT_EQ(second, "worker");
}

TEST_F(SupervisorTest, NamesAProgramThatIsNotThere) {
  Supervisor supervisor(options_, {{{"ghost", {"/no/such/program"}, {}, ""}, nullptr}});
  const absl::Status status = supervisor.Start();
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("/no/such/program"));
}

}  // namespace
}  // namespace tandem
