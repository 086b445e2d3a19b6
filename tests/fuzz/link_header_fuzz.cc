// Feeds everything that a link's other side may send as bytes: the slot header and its picks, the
// handover's messages, the layout that is computed from announced limits. The first byte chooses;
// the rest overlays a well-formed message, so that mutations start behind the magic numbers. What
// passes the checks is used the way the link uses it, inside buffers of exactly the announced
// sizes.
//
// Run: link_header_fuzz -runs=100000 -max_len=4096

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/base/check.h"
#include "common/shm/handover.h"
#include "common/shm/layout.h"
#include "common/shm/slot_check.h"

namespace {

using namespace tandem::shm;

constexpr uint64_t kSequence = 9;
constexpr uint64_t kEpoch = 77;

BatchLimits SmallLimits() {
  return {.max_rows = 8,
          .hidden = 16,
          .top_k = 4,
          .num_experts = 32,
          .num_layers = 3,
          .lanes = 2,
          .row_type = RowType::kBf16};
}

struct Bytes {
  const uint8_t* data;
  size_t size;
};

// Overwrites `value` from an offset that the input gives, with the rest of the input.
template <typename T>
void Overlay(Bytes input, T* value) {
  if (input.size < 2) return;
  const size_t at = (input.data[0] * 256u + input.data[1]) % sizeof(T);
  const size_t count = std::min(input.size - 2, sizeof(T) - at);
  std::memcpy(reinterpret_cast<uint8_t*>(value) + at, input.data + 2, count);
}

void FuzzSlot(Bytes input) {
  const BatchLimits limits = SmallLimits();
  SlotHeader shared = MakeHeader(limits, kSequence, kEpoch, 1, 0, 0, 8, 0, true);
  Overlay(input, &shared);
  const SlotHeader header = CopyOnce(shared);
  if (CheckHeader(header, limits, kSequence, kEpoch) != RefuseCode::kAccepted) return;
  TANDEM_CHECK(header.sequence == kSequence && header.epoch == kEpoch);
  TANDEM_CHECK(header.lane < 2 && header.layer < 3 && header.rows <= 8);
  const uint64_t picks = uint64_t{header.rows} * limits.top_k;
  std::vector<uint16_t> ids(picks), ids_copy(picks);
  std::vector<float> weights(picks), weights_copy(picks);
  std::vector<uint8_t> deferred(picks), deferred_copy(picks);
  for (size_t i = 0; i < picks; ++i) {
    ids[i] = static_cast<uint16_t>(input.data[i % input.size] * 3);
    deferred[i] = input.data[i % input.size];
  }
  const bool fine = CopyPicks(
      ids.data(), weights.data(), header.has_deferred == 1 ? deferred.data() : nullptr, 0, picks,
      limits.num_experts, {ids_copy.data(), weights_copy.data(), deferred_copy.data()});
  for (size_t i = 0; fine && i < picks; ++i) {
    TANDEM_CHECK(ids_copy[i] < limits.num_experts || ids_copy[i] == kNoExpert);
    TANDEM_CHECK(deferred_copy[i] <= 1);
  }
}

void FuzzLayout(Bytes input) {
  BatchLimits limits = SmallLimits();
  Overlay(input, &limits);
  const auto layout = ComputeLayout(limits, input.data[0] % (kMaxSlots + 2));
  if (!layout.ok()) {
    TANDEM_CHECK(!layout.status().message().empty());
    return;
  }
  const uint64_t elements = uint64_t{limits.max_rows} * limits.hidden;
  TANDEM_CHECK(layout->results_offset + elements * sizeof(float) <= layout->slot_bytes);
  TANDEM_CHECK(layout->x_offset + elements * RowTypeBytes(limits.row_type) <= layout->ids_offset);
  TANDEM_CHECK(layout->slots_offset + layout->slots * layout->slot_bytes <= layout->segment_bytes);
}

void FuzzHello(Bytes input) {
  std::array<uint8_t, 16> nonce{};
  Hello hello{};
  hello.magic = kHelloMagic;
  hello.version = kLinkVersion;
  hello.epoch = kEpoch;
  hello.threads = MakeThreadList({0, 1, -1});
  Overlay(input, &hello);
  if (CheckHello(hello, kEpoch, nonce) != HandoverRefusal::kAccepted) return;
  const auto wish = static_cast<Placement>(hello.placement);
  const std::vector<int> cpus = CpusOf(hello.threads);
  const Placement placement = ResolvePlacement(wish, cpus, {0, 1}, 2);
  const auto pairs = MakePairs(placement, cpus, {0, 1});
  TANDEM_CHECK(!pairs.empty() && pairs.size() <= kMaxPairs && pairs[0].gpu == 0);
}

void FuzzWelcome(Bytes input) {
  LinkTicket ticket;
  ticket.epoch = kEpoch;
  Welcome welcome{};
  welcome.magic = kWelcomeMagic;
  welcome.version = kLinkVersion;
  welcome.epoch = kEpoch;
  welcome.limits = SmallLimits();
  welcome.slots = 4;
  welcome.placement = static_cast<uint32_t>(Placement::kColocated);
  welcome.threads = MakeThreadList({0, 1});
  Overlay(input, &welcome);
  if (!CheckWelcome(welcome, ticket, 0, SmallLimits()).ok()) return;
  const auto placement = static_cast<Placement>(welcome.placement);
  const auto pairs = MakePairs(placement, {0, 1, 2}, CpusOf(welcome.threads));
  TANDEM_CHECK(!PairsOfGpu(pairs, 0).empty() && !PairsOfExpert(pairs, pairs[0].expert).empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const Bytes rest{data + 1, size - 1};
  switch (data[0] % 4) {
    case 0:
      FuzzSlot(rest);
      break;
    case 1:
      FuzzLayout(rest);
      break;
    case 2:
      FuzzHello(rest);
      break;
    default:
      FuzzWelcome(rest);
      break;
  }
  return 0;
}
