#include "common/shm/slot_check.h"

#include <cstring>

namespace tandem::shm {

const char* RefuseText(RefuseCode code) {
  switch (code) {
    case RefuseCode::kAccepted:
      return "accepted";
    case RefuseCode::kStale:
      return "stale or half-written slot";
    case RefuseCode::kShape:
      return "lane, layer, rows or row shape out of bounds";
    case RefuseCode::kLength:
      return "byte counts do not follow from the shape";
    case RefuseCode::kExpert:
      return "expert id out of range";
    case RefuseCode::kUnknown:
      break;
  }
  return "unknown reason";
}

SlotHeader MakeHeader(const BatchLimits& limits, uint64_t sequence, uint64_t epoch, uint64_t step,
                      uint32_t lane, uint32_t layer, uint32_t rows, uint32_t flags,
                      bool has_deferred) {
  const uint64_t elements = uint64_t{rows} * limits.hidden;
  const uint64_t picks = uint64_t{rows} * limits.top_k;
  SlotHeader header{};
  header.sequence = sequence;
  header.epoch = epoch;
  header.step = step;
  header.lane = lane;
  header.layer = layer;
  header.rows = rows;
  header.top_k = limits.top_k;
  header.hidden = limits.hidden;
  header.row_type = static_cast<uint32_t>(limits.row_type);
  header.flags = flags;
  header.has_deferred = has_deferred ? 1 : 0;
  header.x_bytes = elements * RowTypeBytes(limits.row_type);
  header.ids_bytes = picks * sizeof(uint16_t);
  header.weights_bytes = picks * sizeof(float);
  header.deferred_bytes = has_deferred ? picks : 0;
  header.result_bytes = elements * sizeof(float);
  header.sequence_again = sequence;
  return header;
}

RefuseCode CheckHeader(const SlotHeader& header, const BatchLimits& limits, uint64_t sequence,
                       uint64_t epoch) {
  if (header.sequence != sequence || header.sequence_again != sequence || header.epoch != epoch) {
    return RefuseCode::kStale;
  }
  if (header.lane >= limits.lanes || header.layer >= limits.num_layers ||
      header.rows > limits.max_rows || header.top_k != limits.top_k ||
      header.hidden != limits.hidden || header.row_type != static_cast<uint32_t>(limits.row_type) ||
      header.has_deferred > 1) {
    return RefuseCode::kShape;
  }
  const SlotHeader right =
      MakeHeader(limits, sequence, epoch, header.step, header.lane, header.layer, header.rows,
                 header.flags, header.has_deferred == 1);
  if (header.x_bytes != right.x_bytes || header.ids_bytes != right.ids_bytes ||
      header.weights_bytes != right.weights_bytes ||
      header.deferred_bytes != right.deferred_bytes || header.result_bytes != right.result_bytes) {
    return RefuseCode::kLength;
  }
  return RefuseCode::kAccepted;
}

bool CopyPicks(const uint16_t* ids, const float* weights, const uint8_t* deferred, uint64_t begin,
               uint64_t end, uint32_t num_experts, const PickBuffers& to) {
  bool fine = true;
  for (uint64_t i = begin; i < end; ++i) {
    // volatile: the compiler may not read the shared id a second time for the copy.
    const uint16_t id = *static_cast<const volatile uint16_t*>(ids + i);
    fine &= id < num_experts || id == kNoExpert;
    to.ids[i] = id;
  }
  if (end > begin) std::memcpy(to.weights + begin, weights + begin, (end - begin) * sizeof(float));
  if (deferred != nullptr) {
    for (uint64_t i = begin; i < end; ++i) {
      to.deferred[i] = *static_cast<const volatile uint8_t*>(deferred + i) != 0 ? 1 : 0;
    }
  }
  return fine;
}

}  // namespace tandem::shm
