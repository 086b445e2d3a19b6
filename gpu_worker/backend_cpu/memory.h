#pragma once

// Page-backed buffers of the CPU backend: zeroed, 64-byte aligned (page-aligned in fact), with
// transparent huge pages asked for. Start-up only. Errors: RESOURCE_EXHAUSTED.

#include <cstddef>

#include "absl/status/statusor.h"

namespace tandem::gpu {

class PageBuffer {
 public:
  PageBuffer() = default;
  ~PageBuffer();
  PageBuffer(PageBuffer&& other) noexcept;
  PageBuffer& operator=(PageBuffer&& other) noexcept;

  // bytes == 0 gives one page.
  static absl::StatusOr<PageBuffer> Create(size_t bytes);

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tandem::gpu
