#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How long a translation unit that only includes a header takes to compile: the medians of five runs, by the clock and
# by the processor (which a busy machine changes less), beside an empty one. --json prints the same for programs. CXX
# chooses the compiler. Exits with 1 where the processor needs longer than the limit.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec python3 - "${CXX:-g++}" "$root/include" "${1:-}" <<'PYTHON'
import json, pathlib, resource, statistics, subprocess, sys, time

compiler, include, mode = sys.argv[1:4]
LIMITS = {"kvcache/kvcache.hpp": 1.0, "kvcache/attention/cpu/cpu.hpp": 1.8}
RUNS = 5


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(header, limit):
    text = f"#include <{header}>\n" if header else ""
    command = [compiler, "-std=c++20", "-I", include, "-x", "c++", "-c", "-o", "/dev/null", "-"]
    clock, processor = [], []
    for _ in range(RUNS):
        start, used = time.monotonic(), processor_seconds()
        run = subprocess.run(command, input=text, text=True, capture_output=True)
        clock.append(time.monotonic() - start)
        processor.append(processor_seconds() - used)
        if run.returncode:
            sys.exit(run.stderr)
    return {"header": header or "(empty)", "seconds": statistics.median(clock),
            "processor_seconds": statistics.median(processor), "limit": limit}


rows = [measure(None, None)]
for header, limit in LIMITS.items():
    if (pathlib.Path(include) / header).is_file():
        rows.append(measure(header, limit))
if mode == "--json":
    print(json.dumps({"compiler": compiler, "runs": RUNS, "rows": rows}, indent=2))
else:
    print(f"{'header':<32}{'clock s':>9}{'cpu s':>9}{'limit s':>9}   ({compiler}, medians of {RUNS} runs)")
    for row in rows:
        print(f"{row['header']:<32}{row['seconds']:>9.2f}{row['processor_seconds']:>9.2f}{row['limit'] or '':>9}")
slow = [row["header"] for row in rows if row["limit"] and row["processor_seconds"] > row["limit"]]
if slow:
    sys.exit("compile_time.sh: above its limit: " + ", ".join(slow))
PYTHON
