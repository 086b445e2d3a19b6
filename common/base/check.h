#pragma once

// Programmer errors: CHECK stays in every build (cold paths), DCHECK vanishes under NDEBUG (hot
// paths). A failed check prints the place and aborts; operating errors are absl::Status instead.

namespace tandem {

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace tandem

#define TANDEM_CHECK(condition)                      \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? static_cast<void>(0)                        \
       : ::tandem::CheckFailed(__FILE__, __LINE__, #condition))

#ifdef NDEBUG
#define TANDEM_DCHECK(condition) static_cast<void>(sizeof(static_cast<bool>(condition)))
#else
#define TANDEM_DCHECK(condition) TANDEM_CHECK(condition)
#endif
