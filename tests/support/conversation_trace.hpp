// SPDX-License-Identifier: Apache-2.0
// The hour of conversations that several tests replay. It is not ours to ship; it is looked for in
// $KVCACHE_SHARED/traces, by default in a folder `shared` beside the repository. Link trace_replay_parts and define
// KVCACHE_DEFAULT_SHARED.
#pragma once

#include "trace.hpp"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>

namespace kvcache_test {

/// Empty where there is none; the reason is printed, and ctest shows the test as skipped.
inline std::optional<replay::trace> conversation_trace() {
  const char* const given = std::getenv("KVCACHE_SHARED");
  const auto path =
      std::filesystem::path(given != nullptr ? given : KVCACHE_DEFAULT_SHARED) / "traces" / "conversation_trace.jsonl";
  if (!std::filesystem::exists(path)) {
    std::printf("SKIPPED: no trace at %s; set KVCACHE_SHARED to the folder that has traces/\n", path.c_str());
    return std::nullopt;
  }
  return replay::read_trace_file(path.string());
}

}  // namespace kvcache_test
