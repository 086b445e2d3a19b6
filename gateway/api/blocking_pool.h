#pragma once

// Runs work that blocks (template rendering, tokenization of long prompts) away from I/O threads.

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <type_traits>
#include <utility>

namespace tandem::gateway {

using BlockingPool = boost::asio::thread_pool;

// Awaits `function()` run on `pool`. REQUIRES: its result is default-constructible.
template <typename Function>
boost::asio::awaitable<std::invoke_result_t<Function>> RunOn(BlockingPool& pool,
                                                             Function function) {
  using Result = std::invoke_result_t<Function>;
  auto task = [function = std::move(function)]() mutable -> boost::asio::awaitable<Result> {
    co_return function();
  };
  co_return co_await boost::asio::co_spawn(pool, std::move(task), boost::asio::use_awaitable);
}

}  // namespace tandem::gateway
