#include "common/base/options.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace tandem {
namespace {

class Options : public ::testing::Test {
 protected:
  Options() {
    parser_.Add("http-port", "port", &port_, {.min = 0, .max = 65535});
    parser_.AddChoice("max-isa", "cap", &isa_, {"ref", "avx2"});
    parser_.AddList("workers", "addresses", &workers_);
    parser_.AddFlag("parity", "exact mode", &parity_);
  }
  std::optional<int> Parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "program");
    return parser_.Parse(static_cast<int>(arguments.size()), arguments.data());
  }

  int port_ = 8080;
  std::string isa_ = "avx2";
  std::vector<std::string> workers_;
  bool parity_ = false;
  OptionParser parser_{"program", "test"};
};

TEST_F(Options, ReadsFlagsListsAndDefaults) {
  EXPECT_EQ(Parse({"--workers", "a,b", "--parity"}), std::nullopt);
  EXPECT_EQ(port_, 8080);
  EXPECT_EQ(workers_, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(parity_);
  EXPECT_NE(parser_.Summary().find("--http-port=8080"), std::string::npos);
}

TEST_F(Options, RefusesValuesOutsideTheirRange) {
  EXPECT_EQ(Parse({"--http-port", "70000"}), 2);
  EXPECT_EQ(Parse({"--max-isa", "mmx"}), 2);
  EXPECT_EQ(Parse({"--no-such-option"}), 2);
}

TEST_F(Options, TheLastOfARepeatedFlagWins) {
  EXPECT_EQ(Parse({"--http-port=1", "--http-port=2", "--max-isa=avx2", "--max-isa=ref"}),
            std::nullopt);
  EXPECT_EQ(port_, 2);
  EXPECT_EQ(isa_, "ref");
}

TEST_F(Options, HelpIsNoError) { EXPECT_EQ(Parse({"--help"}), 0); }

class WithEnvironment : public ::testing::Test {
 protected:
  ~WithEnvironment() override { unsetenv("TANDEM_PORT_UNDER_TEST"); }
  std::optional<int> Parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "program");
    OptionParser parser("program", "test");
    parser.Add("port-under-test", "port", &port_, {.min = 0, .max = 65535});
    return parser.Parse(static_cast<int>(arguments.size()), arguments.data());
  }
  int port_ = 1;
};

TEST_F(WithEnvironment, EnvironmentGivesTheValueAndTheFlagWins) {
  setenv("TANDEM_PORT_UNDER_TEST", "7000", 1);
  EXPECT_EQ(Parse({}), std::nullopt);
  EXPECT_EQ(port_, 7000);
  EXPECT_EQ(Parse({"--port-under-test", "7001"}), std::nullopt);
  EXPECT_EQ(port_, 7001);
}

// A Kubernetes Service called "tandem-port-under-test" injects such a value.
TEST(DP_3, ServiceLinkInTheEnvironmentIsIgnored) {
  setenv("TANDEM_PORT", "tcp://10.0.0.7:8080", 1);
  int port = 5;
  OptionParser parser("program", "test");
  parser.Add("port", "port", &port);
  const char* arguments[] = {"program"};
  EXPECT_EQ(parser.Parse(1, arguments), std::nullopt);
  EXPECT_EQ(port, 5);
  unsetenv("TANDEM_PORT");
}

}  // namespace
}  // namespace tandem
