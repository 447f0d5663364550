#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that tests: layout, AddressSanitizer, ThreadSanitizer, some seconds of fuzzing, aarch64 in an emulator,
# release build, every benchmark once, all tests. Installs what is missing and fetches the model first; where it cannot
# be had, its tests are skipped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_packages "${build_packages[@]}" "${test_packages[@]}" "${fuzz_packages[@]}" "${aarch64_packages[@]}"

heading "Model"
if model=$(scripts/get_model.sh); then
  printf '%s\n' "$model"
  export KVCACHE_MODEL=$model
else
  printf 'Without it the tests that need it are skipped.\n'
fi

heading "Layout of the sources"
scripts/format.sh

heading "AddressSanitizer and UndefinedBehaviorSanitizer: build"
cmake --preset asan
cmake --build --preset asan
heading "AddressSanitizer and UndefinedBehaviorSanitizer: tests"
ctest --preset asan

# ThreadSanitizer needs addresses where it expects them; newer kernels randomise further than it knows.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
  fixed_addresses=(setarch "$(uname -m)" -R)
fi
heading "ThreadSanitizer: build of the threaded tests"
cmake --preset tsan
"${fixed_addresses[@]}" cmake --build --preset tsan
heading "ThreadSanitizer: tests"
"${fixed_addresses[@]}" ctest --preset tsan

heading "Fuzzing: build, and a short run"
cmake --preset fuzz
cmake --build --preset fuzz
ctest --preset fuzz

heading "aarch64: build of the tests for every processor"
cmake --preset aarch64
cmake --build --preset aarch64
heading "aarch64: tests"
ctest --preset aarch64

heading "Release: build"
cmake --preset release
cmake --build --preset release

heading "Every benchmark once"
for bench in build/release/bench/bench_*; do
  if [ -f "$bench" ] && [ -x "$bench" ]; then
    "$bench" --benchmark_min_time=0
  fi
done

heading "Release: tests"
ctest --preset release
