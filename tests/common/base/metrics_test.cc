#include "common/base/metrics.h"

#include <gtest/gtest.h>
#include <prometheus/counter.h>

#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

namespace tandem {
namespace {

namespace http = boost::beast::http;

http::response<http::string_body> Get(int port, const std::string& target) {
  boost::asio::io_context context;
  boost::asio::ip::tcp::socket socket(context);
  socket.connect({boost::asio::ip::make_address("127.0.0.1"), static_cast<uint16_t>(port)});
  http::request<http::empty_body> request(http::verb::get, target, 11);
  http::write(socket, request);
  boost::beast::flat_buffer buffer;
  http::response<http::string_body> response;
  http::read(socket, buffer, response);
  return response;
}

TEST(MetricsServer, ServesTheRegistryAndTheProcess) {
  auto registry = std::make_shared<prometheus::Registry>();
  prometheus::BuildCounter()
      .Name("tandem_test_events_total")
      .Help("Events")
      .Register(*registry)
      .Add({})
      .Increment(3);
  auto server = MetricsServer::Start("127.0.0.1", 0, registry);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto response = Get((*server)->port(), "/metrics");
  EXPECT_EQ(response.result(), http::status::ok);
  EXPECT_NE(response.body().find("tandem_test_events_total 3"), std::string::npos);
  EXPECT_NE(response.body().find("process_resident_memory_bytes"), std::string::npos);
  EXPECT_EQ(Get((*server)->port(), "/other").result(), http::status::not_found);
}

TEST(MetricsServer, NamesAPortThatIsTaken) {
  auto registry = std::make_shared<prometheus::Registry>();
  auto first = MetricsServer::Start("127.0.0.1", 0, registry);
  ASSERT_TRUE(first.ok());
  const auto second = MetricsServer::Start("127.0.0.1", (*first)->port(), registry);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find(std::to_string((*first)->port())), std::string::npos);
}

TEST(FamilyList, AppendsFamiliesOfOneMetric) {
  std::vector<prometheus::MetricFamily> families(1);
  FamilyList list(&families);
  list.Gauge("tandem_test_kept_bytes", "Kept", 2.5, {{"pages", "plain"}});
  list.Counter("tandem_test_events_total", "Events", 7);
  ASSERT_EQ(families.size(), 3u);
  EXPECT_EQ(families[1].name, "tandem_test_kept_bytes");
  EXPECT_EQ(families[1].type, prometheus::MetricType::Gauge);
  EXPECT_EQ(families[1].metric.at(0).gauge.value, 2.5);
  EXPECT_EQ(families[1].metric.at(0).label.at(0).value, "plain");
  EXPECT_EQ(families[2].help, "Events");
  EXPECT_EQ(families[2].type, prometheus::MetricType::Counter);
  EXPECT_EQ(families[2].metric.at(0).counter.value, 7);
}

}  // namespace
}  // namespace tandem
