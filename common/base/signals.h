#pragma once

// Stop signals of a process: blocked in all of its threads and taken by one that waits for them.

#include <csignal>

namespace tandem {

// Blocks SIGTERM and SIGINT and ignores SIGPIPE; returns the set to wait for. REQUIRES: called at
// the start of main, so that every thread made later inherits the mask.
sigset_t BlockStopSignals();

}  // namespace tandem
