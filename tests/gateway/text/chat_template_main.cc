// The test binary is its own template helper, as the gateway's binary is.

#include <gtest/gtest.h>

#include "gateway/text/chat_template.h"

int main(int argc, char** argv) {
  if (tandem::gateway::IsTemplateHelper(argc, argv)) return tandem::gateway::TemplateHelperMain();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
