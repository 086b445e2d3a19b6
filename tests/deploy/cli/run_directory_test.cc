#include "deploy/cli/run_directory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace tandem {
namespace {

class RunDirectoryTest : public ::testing::Test {
 protected:
  RunDirectoryTest() {
    std::string path = ::testing::TempDir() + "tandem-rd-XXXXXX";
    parent_ = mkdtemp(path.data());
  }
  ~RunDirectoryTest() override { std::filesystem::remove_all(parent_); }
  std::string parent_;
};

TEST_F(RunDirectoryTest, IsPrivateAndRemovedAtTheEnd) {
  std::string path;
  {
    auto directory = RunDirectory::CreateUnder(parent_);
    ASSERT_TRUE(directory.ok()) << directory.status();
    path = directory->path();
    struct stat info = {};
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(RunDirectoryTest, RemovesWhatADeadServerLeftAndKeepsALivingOnes) {
  auto living = RunDirectory::CreateUnder(parent_);
  ASSERT_TRUE(living.ok());
  const std::string dead = parent_ + "/tandem-run-dead00";
  std::filesystem::create_directory(dead);
  std::ofstream(dead + "/lock") << "";
  std::ofstream(dead + "/gpu.sock") << "";
  auto next = RunDirectory::CreateUnder(parent_);
  ASSERT_TRUE(next.ok());
  EXPECT_FALSE(std::filesystem::exists(dead));
  EXPECT_TRUE(std::filesystem::exists(living->path()));
}

TEST_F(RunDirectoryTest, FindsTheServersThatRunAndTheirProcesses) {
  auto starting = RunDirectory::CreateUnder(parent_);  // has no sockets yet
  auto serving = RunDirectory::CreateUnder(parent_);
  ASSERT_TRUE(starting.ok() && serving.ok());
  const std::string dead = parent_ + "/tandem-run-dead00";
  std::filesystem::create_directory(dead);
  for (const char* name : {"/lock", "/gpu.sock"}) std::ofstream(dead + name) << "";
  for (const char* name : {"/gpu.sock", "/expert0.sock", "/expert1.sock", "/gateway.sock"}) {
    std::ofstream(serving->path() + name) << "";
  }
  const std::vector<std::string> parents = {parent_, parent_, parent_ + "/absent"};
  EXPECT_EQ(LiveRunDirectoriesUnder(parents), std::vector<std::string>{serving->path()});
  const std::string prefix = "unix:" + serving->path();
  EXPECT_EQ(ControlAddresses(serving->path()),
            (std::vector<std::string>{prefix + "/gateway.sock", prefix + "/gpu.sock",
                                      prefix + "/expert0.sock", prefix + "/expert1.sock"}));
  EXPECT_TRUE(ControlAddresses(starting->path()).empty());
}

TEST_F(RunDirectoryTest, NamesAParentThatCannotBeUsed) {
  const auto directory = RunDirectory::CreateUnder(parent_ + "/absent");
  ASSERT_FALSE(directory.ok());
  EXPECT_NE(directory.status().message().find("absent"), std::string::npos);
}

}  // namespace
}  // namespace tandem
