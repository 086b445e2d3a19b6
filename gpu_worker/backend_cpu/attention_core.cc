#include "gpu_worker/backend_cpu/attention_core.h"

#include <algorithm>
#include <limits>

namespace tandem::gpu::cpu {
namespace {

// Running softmax of one query.
struct Running {
  float max;
  double sum;
};

const void* RowAt(const void* plane, DType dtype, int64_t element) {
  if (dtype == DType::kBF16) return static_cast<const uint16_t*>(plane) + element;
  return static_cast<const float*>(plane) + element;
}

class TileRun {
 public:
  TileRun(const OpContext& context, const KeyLayout& layout, const Tile& tile, float* scores)
      : context_(context), layout_(layout), tile_(tile), scores_(scores) {
    const bool bf16 = layout.dtype == DType::kBF16;
    dot_ = bf16 ? context.vectors.dot_bf16 : context.vectors.dot_f32;
    mix_ = bf16 ? context.vectors.mix_bf16 : context.vectors.mix_f32;
  }

  void Run() {
    first_ = std::numeric_limits<int>::max();
    end_ = 0;
    for (int i = 0; i < tile_.count; ++i) {
      const TileQuery& query = tile_.queries[i];
      first_ = std::min(first_, query.first_key);
      end_ = std::max(end_, query.end_key);
      // A sink is a key whose value is zero: it starts the denominator.
      running_[i] = query.has_sink ? Running{query.sink, 1.0}
                                   : Running{-std::numeric_limits<float>::infinity(), 0.0};
      q_[i] = query.q;
      q_tail_[i] = query.q_tail;
      out_[i] = query.out;
      std::fill_n(query.out, layout_.value_dim, 0.0f);
    }
    int block = first_ / kSoftmaxBlock * kSoftmaxBlock;
    for (; block < end_; block += kSoftmaxBlock) RunBlock(block);
    for (int i = 0; i < tile_.count; ++i) {
      const auto inverse = static_cast<float>(1.0 / running_[i].sum);
      for (int d = 0; d < layout_.value_dim; ++d) out_[i][d] *= inverse;
    }
  }

 private:
  // Calls fn(element offset of the first row's token, position, count) for the runs of keys in
  // [begin, end) that lie together in the cache.
  template <typename Fn>
  void ForEachRun(int begin, int end, Fn fn) const {
    while (begin < end) {
      const int in_block = begin % tile_.block_tokens;
      const int count = std::min(end - begin, tile_.block_tokens - in_block);
      const int64_t token =
          int64_t{tile_.blocks[begin / tile_.block_tokens]} * tile_.block_tokens + in_block;
      fn(token, begin, count);
      begin += count;
    }
  }

  void RunBlock(int block) {
    const int begin = std::max(block, first_);
    const int end = std::min(block + kSoftmaxBlock, end_);
    Score(block, begin, end);
    // Keys that all queries see are mixed together, those before and after query by query.
    int common_begin = begin;
    int common_end = end;
    for (int i = 0; i < tile_.count; ++i) {
      const int own_begin = std::max(begin, tile_.queries[i].first_key);
      const int own_end = std::min(end, tile_.queries[i].end_key);
      common_begin = std::max(common_begin, own_begin);
      common_end = std::min(common_end, own_end);
      if (own_begin < own_end) Exponentiate(i, own_begin - block, own_end - block);
    }
    if (common_begin >= common_end) common_begin = common_end = end;
    for (int i = 0; i < tile_.count; ++i) {
      const int own_begin = std::max(begin, tile_.queries[i].first_key);
      Mix(block, i, 1, own_begin, std::min(common_begin, tile_.queries[i].end_key));
    }
    Mix(block, 0, tile_.count, common_begin, common_end);
    for (int i = 0; i < tile_.count; ++i) {
      Mix(block, i, 1, common_end, std::min(end, tile_.queries[i].end_key));
    }
  }

  // Asks for `count` rows of `dim` elements. The hardware does not see them coming: rows of one
  // head are a few hundred bytes in pages of their own.
  void Prefetch(const void* plane, int64_t element, int64_t width, int dim, int count) const {
    constexpr size_t kLineBytes = 64;
    const size_t element_bytes = DTypeBytes(layout_.dtype);
    const auto* row = static_cast<const char*>(RowAt(plane, layout_.dtype, element));
    for (int j = 0; j < count; ++j, row += static_cast<size_t>(width) * element_bytes) {
      for (size_t byte = 0; byte < static_cast<size_t>(dim) * element_bytes; byte += kLineBytes) {
        __builtin_prefetch(row + byte, 0, 2);
      }
    }
  }

  // The values of this run, which Mix reads next, and the keys of the run after it.
  void PrefetchAround(int64_t token, int position, int count) const {
    if (layout_.v != layout_.k) {
      Prefetch(layout_.v, token * layout_.v_width + layout_.value_offset, layout_.v_width,
               layout_.value_dim, count);
    }
    ForEachRun(position + count, std::min(end_, position + 2 * count),
               [&](int64_t next, int, int next_count) {
                 Prefetch(layout_.k, next * layout_.k_width + layout_.key_offset, layout_.k_width,
                          layout_.key_dim, next_count);
               });
  }

  void Score(int block, int begin, int end) {
    ForEachRun(begin, end, [&](int64_t token, int position, int count) {
      PrefetchAround(token, position, count);
      DotCall call{};
      call.queries = q_;
      call.query_count = tile_.count;
      call.keys = RowAt(layout_.k, layout_.dtype, token * layout_.k_width + layout_.key_offset);
      call.key_stride = static_cast<size_t>(layout_.k_width);
      call.key_count = count;
      call.dim = layout_.key_dim;
      call.scores = scores_ + (position - block);
      call.score_stride = kSoftmaxBlock;
      dot_(call);
      if (layout_.tail_dim == 0) return;
      call.queries = q_tail_;
      call.keys = RowAt(layout_.k, layout_.dtype, token * layout_.k_width + layout_.tail_offset);
      call.dim = layout_.tail_dim;
      call.accumulate = true;
      dot_(call);
    });
  }

  // Turns the scores [begin, end) of query i into weights relative to its new maximum.
  void Exponentiate(int i, int begin, int end) {
    float* s = scores_ + i * kSoftmaxBlock + begin;
    const auto n = static_cast<size_t>(end - begin);
    Running& running = running_[i];
    const float block_max = context_.vectors.scale_max(s, n, layout_.scale);
    const float max = running.max > block_max ? running.max : block_max;
    context_.vectors.subtract(s, n, max);
    context_.kernels.exp(s, s, n);
    const double block_sum = context_.vectors.sum(s, n);
    if (max > running.max) {
      float shift = running.max - max;
      context_.kernels.exp(&shift, &shift, 1);
      running.sum *= double{shift};
      for (int d = 0; d < layout_.value_dim; ++d) out_[i][d] *= shift;
    }
    running.max = max;
    running.sum += block_sum;
  }

  void Mix(int block, int query, int query_count, int begin, int end) {
    if (begin >= end) return;
    ForEachRun(begin, end, [&](int64_t token, int position, int count) {
      MixCall call{};
      call.weights = scores_ + query * kSoftmaxBlock + (position - block);
      call.weight_stride = kSoftmaxBlock;
      call.query_count = query_count;
      call.values = RowAt(layout_.v, layout_.dtype, token * layout_.v_width + layout_.value_offset);
      call.value_stride = static_cast<size_t>(layout_.v_width);
      call.key_count = count;
      call.dim = layout_.value_dim;
      call.outputs = out_ + query;
      mix_(call);
    });
  }

  const OpContext& context_;
  const KeyLayout& layout_;
  const Tile& tile_;
  float* scores_;
  void (*dot_)(const DotCall&);
  void (*mix_)(const MixCall&);
  int first_ = 0;
  int end_ = 0;
  Running running_[kMaxTileQueries];
  const float* q_[kMaxTileQueries];
  const float* q_tail_[kMaxTileQueries];
  float* out_[kMaxTileQueries];
};

}  // namespace

void AttendTile(const OpContext& context, const KeyLayout& layout, const Tile& tile,
                float* scores) {
  TileRun(context, layout, tile, scores).Run();
}

int MakeRowTiles(OpContext& context, const RowPlace& place, int rows, int max_rows) {
  int tiles = 0;
  for (int row = 0; row < rows; ++row) {
    if (tiles > 0) {
      RowTile& last = context.row_tiles[static_cast<size_t>(tiles - 1)];
      if (last.count < max_rows && place.sequence[row] == place.sequence[row - 1] &&
          place.positions[row] == place.positions[row - 1] + 1) {
        ++last.count;
        continue;
      }
    }
    context.row_tiles[static_cast<size_t>(tiles++)] = {row, 1};
  }
  return tiles;
}

TileShape ChooseTileShape(int threads, int rows, int kv_heads, int group) {
  TileShape shape;
  shape.heads = std::min(group, kMaxTileQueries);
  shape.rows = std::max(1, kMaxTileQueries / shape.heads);
  const auto items = [&] {
    const int tiles = (rows + shape.rows - 1) / shape.rows;
    return tiles * kv_heads * ((group + shape.heads - 1) / shape.heads);
  };
  // Twice the threads, since costs differ. Keys are read again by every item, so a tile of 4 rows
  // or heads is not cut further: it still uses each key 4 times.
  while (threads > 1 && items() < 2 * threads && shape.rows > 4) shape.rows /= 2;
  while (threads > 1 && items() < threads && shape.heads > 1) shape.heads = (shape.heads + 1) / 2;
  return shape;
}

}  // namespace tandem::gpu::cpu
