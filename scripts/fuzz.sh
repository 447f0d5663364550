#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzzers and runs each for some seconds, on from what earlier runs have found worth keeping in
# build/fuzz/corpus. An input that breaks a check is left in build/fuzz/findings; the fuzzer runs it alone when it is
# given the file. usage: fuzz.sh [SECONDS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "'$seconds' is no number of seconds, at least 1"

need_packages "${build_packages[@]}" "${fuzz_packages[@]}"

heading "Fuzzers: build"
cmake --preset fuzz
cmake --build --preset fuzz

# Stacks with names, from what every compiler comes with.
export ASAN_OPTIONS=external_symbolizer_path=$(command -v addr2line) UBSAN_OPTIONS=print_stacktrace=1
mkdir -p build/fuzz/findings
status=0
for fuzzer in fuzz_blocks fuzz_trace; do
  heading "$fuzzer: $seconds s"
  mkdir -p "build/fuzz/corpus/$fuzzer"
  mapfile -t flags <"build/fuzz/tests/fuzz/$fuzzer.flags"
  "build/fuzz/tests/fuzz/$fuzzer" "${flags[@]}" -max_total_time="$seconds" -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/findings/$fuzzer-" "build/fuzz/corpus/$fuzzer" || status=1
done
[ $status -eq 0 ] || fail "a fuzzer found something, see above and build/fuzz/findings"
