#pragma once

// Version of tandem.worker.v1 and of the shared-memory link. The processes of a deployment are of
// one release; a peer that sends another version is refused with both numbers.

#include <cstdint>

namespace tandem {

inline constexpr uint32_t kWorkerProtocolVersion = 1;

}  // namespace tandem
