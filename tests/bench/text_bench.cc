// Loading a published tokenizer and encoding and decoding with it. TANDEM_BENCH_MODEL names the
// directory (default: the shared Qwen3 tokenizer).

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "gateway/text/detokenizer.h"
#include "gateway/text/tokenizer.h"
#include "tests/testing/shared_data.h"

namespace tandem::gateway {
namespace {

std::filesystem::path ModelDir() {
  if (const char* dir = std::getenv("TANDEM_BENCH_MODEL")) return dir;
  return tandem::testing::SharedPath("data/tokenizers/qwen3").value_or("");
}

const Tokenizer* BenchTokenizer(benchmark::State& state) {
  static auto* const loaded =
      new absl::StatusOr<std::unique_ptr<Tokenizer>>(Tokenizer::Load(ModelDir()));
  if (loaded->ok()) return loaded->value().get();
  state.SkipWithError(loaded->status().ToString().c_str());
  return nullptr;
}

std::string Prose(size_t bytes) {
  constexpr const char* kParts[] = {
      "The quick brown fox jumps over the lazy dog. ", "int main() {\n    return 17 + 25;\n}\n",
      "\xE4\xBD\xA0\xE5\xA5\xBD\xEF\xBC\x8C\xE4\xB8\x96\xE7\x95\x8C\xE3\x80\x82",
      "Gr\xC3\xB6\xC3\x9F"
      "e, \xD0\xBF\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82! "};
  std::string out;
  for (size_t i = 0; out.size() < bytes; ++i) out += kParts[i * 7 % 13 % 4];
  return out;
}

void BM_Load(benchmark::State& state) {
  for (auto _ : state) {
    auto tokenizer = Tokenizer::Load(ModelDir());
    if (!tokenizer.ok()) return state.SkipWithError(tokenizer.status().ToString().c_str());
    benchmark::DoNotOptimize(tokenizer);
  }
}
BENCHMARK(BM_Load)->Unit(benchmark::kMillisecond);

void BM_Encode(benchmark::State& state) {
  const Tokenizer* tokenizer = BenchTokenizer(state);
  if (tokenizer == nullptr) return;
  const std::string text = Prose(static_cast<size_t>(state.range(0)));
  size_t tokens = 0;
  for (auto _ : state) tokens += tokenizer->Encode(text, {})->size();
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * text.size()));
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_Encode)->Arg(200)->Arg(8 << 10)->Arg(1 << 20)->Unit(benchmark::kMicrosecond);

void BM_EncodeOneRun(benchmark::State& state) {
  const Tokenizer* tokenizer = BenchTokenizer(state);
  if (tokenizer == nullptr) return;
  const std::string text(static_cast<size_t>(state.range(0)), 'a');
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer->Encode(text, {}));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * text.size()));
}
BENCHMARK(BM_EncodeOneRun)->Arg(1 << 10)->Arg(1 << 20)->Unit(benchmark::kMicrosecond);

void BM_DetokenizeStream(benchmark::State& state) {
  const Tokenizer* tokenizer = BenchTokenizer(state);
  if (tokenizer == nullptr) return;
  const auto ids = *tokenizer->Encode(Prose(8 << 10), {});
  for (auto _ : state) {
    std::string text;
    Detokenizer detokenizer(tokenizer, {});
    for (const TokenId id : ids) detokenizer.Append(id, &text);
    detokenizer.Flush(&text);
    benchmark::DoNotOptimize(text);
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * ids.size()));
}
BENCHMARK(BM_DetokenizeStream)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tandem::gateway

BENCHMARK_MAIN();
