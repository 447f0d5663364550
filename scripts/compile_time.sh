#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How long a translation unit that only includes a header takes to compile: the median of five runs, beside an empty
# one. --json prints the same for programs. CXX chooses the compiler.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec python3 - "${CXX:-g++}" "$root/include" "${1:-}" <<'PYTHON'
import json, pathlib, statistics, subprocess, sys, time

compiler, include, mode = sys.argv[1:4]
LIMITS = {"kvcache/kvcache.hpp": 1.0, "kvcache/attention/cpu/cpu.hpp": 1.8}
RUNS = 5


def seconds(header):
    text = f"#include <{header}>\n" if header else ""
    command = [compiler, "-std=c++20", "-I", include, "-x", "c++", "-c", "-o", "/dev/null", "-"]
    times = []
    for _ in range(RUNS):
        start = time.monotonic()
        run = subprocess.run(command, input=text, text=True, capture_output=True)
        times.append(time.monotonic() - start)
        if run.returncode:
            sys.exit(run.stderr)
    return statistics.median(times)


rows = [{"header": "(empty)", "seconds": seconds(None), "limit": None}]
for header, limit in LIMITS.items():
    if (pathlib.Path(include) / header).is_file():
        rows.append({"header": header, "seconds": seconds(header), "limit": limit})
if mode == "--json":
    print(json.dumps({"compiler": compiler, "runs": RUNS, "rows": rows}, indent=2))
else:
    print(f"{'header':<28}{'median s':>10}{'limit s':>9}   ({compiler}, {RUNS} runs)")
    for row in rows:
        print(f"{row['header']:<28}{row['seconds']:>10.2f}{row['limit'] or '':>9}")
PYTHON
