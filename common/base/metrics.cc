#include "common/base/metrics.h"

#include <prometheus/text_serializer.h>
#include <sys/resource.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;

double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  double total_pages = 0;
  double resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE));
}

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double OpenFiles() {
  double count = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator it("/proc/self/fd", error), end; !error && it != end;
       it.increment(error)) {
    ++count;
  }
  return count;
}

void AppendProcessMetrics(std::vector<prometheus::MetricFamily>* families) {
  FamilyList list(families);
  list.Gauge("process_resident_memory_bytes", "Resident memory of this process", ResidentBytes());
  list.Counter("process_cpu_seconds_total", "User and system CPU time spent", CpuSeconds());
  list.Gauge("process_open_fds", "Open file descriptors", OpenFiles());
  list.Gauge("tandem_build_info", "Version of this build; always 1", 1,
             {{"version", TANDEM_VERSION}});
}

http::response<http::string_body> Respond(const http::request<http::empty_body>& request,
                                          prometheus::Registry& registry) {
  http::response<http::string_body> response(http::status::ok, request.version());
  response.set(http::field::content_type, "text/plain; version=0.0.4; charset=utf-8");
  if (request.method() != http::verb::get && request.method() != http::verb::head) {
    response.result(http::status::method_not_allowed);
  } else if (request.target() != "/metrics") {
    response.result(http::status::not_found);
    response.body() = "metrics are at /metrics\n";
  } else {
    response.body() = RenderMetrics(registry);
  }
  response.keep_alive(request.keep_alive());
  response.prepare_payload();
  return response;
}

asio::awaitable<void> Serve(tcp::socket socket, std::shared_ptr<prometheus::Registry> registry) {
  beast::tcp_stream stream(std::move(socket));
  beast::flat_buffer buffer(16 * 1024);
  try {
    for (;;) {
      stream.expires_after(std::chrono::seconds(30));
      http::request_parser<http::empty_body> parser;
      co_await http::async_read(stream, buffer, parser, asio::use_awaitable);
      auto response = Respond(parser.get(), *registry);
      co_await http::async_write(stream, response, asio::use_awaitable);
      if (!response.keep_alive()) break;
    }
  } catch (const std::exception&) {
    // The scraper left, timed out or spoke no HTTP: the connection ends, nothing else.
  }
}

asio::awaitable<void> Accept(tcp::acceptor& acceptor,
                             std::shared_ptr<prometheus::Registry> registry) {
  for (;;) {
    boost::system::error_code error;
    tcp::socket socket =
        co_await acceptor.async_accept(asio::redirect_error(asio::use_awaitable, error));
    if (error == asio::error::operation_aborted) co_return;
    if (error) {  // e.g. out of descriptors: try again, without spinning
      asio::steady_timer pause(acceptor.get_executor(), std::chrono::milliseconds(100));
      co_await pause.async_wait(asio::use_awaitable);
      continue;
    }
    asio::co_spawn(acceptor.get_executor(), Serve(std::move(socket), registry), asio::detached);
  }
}

}  // namespace

void FamilyList::Gauge(std::string_view name, std::string_view help, double value,
                       std::vector<prometheus::ClientMetric::Label> labels) {
  prometheus::ClientMetric& metric = Add(name, help, prometheus::MetricType::Gauge);
  metric.gauge.value = value;
  metric.label = std::move(labels);
}

void FamilyList::Counter(std::string_view name, std::string_view help, double value,
                         std::vector<prometheus::ClientMetric::Label> labels) {
  prometheus::ClientMetric& metric = Add(name, help, prometheus::MetricType::Counter);
  metric.counter.value = value;
  metric.label = std::move(labels);
}

prometheus::ClientMetric& FamilyList::Add(std::string_view name, std::string_view help,
                                          prometheus::MetricType type) {
  if (!families_->empty() && families_->back().name == name) {
    return families_->back().metric.emplace_back();
  }
  prometheus::MetricFamily& family = families_->emplace_back();
  family.name = std::string(name);
  family.help = std::string(help);
  family.type = type;
  return family.metric.emplace_back();
}

struct MetricsServer::Impl {
  asio::io_context context{1};
  tcp::acceptor acceptor{context};
  int port = 0;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& host, int port, std::shared_ptr<prometheus::Registry> registry) {
  auto impl = std::make_unique<Impl>();
  try {
    const tcp::endpoint endpoint(asio::ip::make_address(host), static_cast<uint16_t>(port));
    impl->acceptor.open(endpoint.protocol());
    impl->acceptor.set_option(tcp::acceptor::reuse_address(true));
    impl->acceptor.bind(endpoint);
    impl->acceptor.listen();
    impl->port = impl->acceptor.local_endpoint().port();
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", host, ":", port, ": ", error.what()));
  }
  asio::co_spawn(impl->context, Accept(impl->acceptor, std::move(registry)), asio::detached);
  impl->thread = std::thread([context = &impl->context] { context->run(); });
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

MetricsServer::~MetricsServer() {
  impl_->context.stop();
  impl_->thread.join();
}

int MetricsServer::port() const { return impl_->port; }

std::string RenderMetrics(prometheus::Registry& registry) {
  std::vector<prometheus::MetricFamily> families = registry.Collect();
  AppendProcessMetrics(&families);
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace tandem
