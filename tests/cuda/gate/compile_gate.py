#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds kernels for several architectures and holds what ptxas says of them to a budget: so many registers, and no
stack and no spills but those that are written there.
usage: compile_gate.py NVCC INCLUDE_DIR BUDGET.json WORK_DIR [--kernel NAME] [--update]

The budget names each kernel by its body; --update writes what was found into it. Exit status 77 where there is no
compiler."""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ARCHITECTURES = ("80", "90", "100")
SOURCE = """// Written by compile_gate.py.
#include <kvcache/cuda/cuda.cuh>
using namespace kvcache;
using body = {body};
template __global__ void device::kernel<body>(const __grid_constant__ body::params);
"""
ENTRY = re.compile(r"Compiling entry function '.*' for 'sm_(\d+)a?'")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def read_report(text):
    """Architecture -> (registers, stack and spilled bytes)."""
    found, architecture, bytes_used = {}, None, 0
    for line in text.splitlines():
        if match := ENTRY.search(line):
            architecture, bytes_used = match[1], 0
        elif match := SPILL.search(line):
            bytes_used = sum(int(n) for n in match.groups())
        elif (match := REGISTERS.search(line)) and architecture:
            found[architecture] = (int(match[1]), bytes_used)
            architecture = None
    return found


def build(nvcc, include, work, name, body):
    source = work / f"{name}.cu"
    source.write_text(SOURCE.format(body=body))
    command = [nvcc, "-std=c++20", "-O3", "-Xptxas", "-v", "--Werror", "all-warnings", f"-I{include}", "-c", str(source),
               "-o", str(work / f"{name}.o")]
    for a in ARCHITECTURES:
        command += ["-gencode", f"arch=compute_{a},code=sm_{a}"]
    began = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr, time.monotonic() - began


def hold(name, entry, report):
    """What is wrong, in words."""
    for a in ARCHITECTURES:
        if a not in report:
            yield f"{name}: nothing was built for sm_{a}"
            continue
        registers, spilled = report[a]
        if spilled > entry.get("spilled", 0):
            yield f"{name}: {spilled} bytes of stack and spills on sm_{a}, {entry.get('spilled', 0)} allowed"
        if registers > entry["registers"]:
            yield f"{name}: {registers} registers on sm_{a}, {entry['registers']} allowed"


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("nvcc")
    options.add_argument("include")
    options.add_argument("budget")
    options.add_argument("work")
    options.add_argument("--kernel")
    options.add_argument("--update", action="store_true")
    chosen = options.parse_args()
    if not os.access(chosen.nvcc, os.X_OK):
        print("SKIPPED: no nvcc, so no kernel was built; install the CUDA Toolkit")
        return 77
    work = pathlib.Path(chosen.work)
    work.mkdir(parents=True, exist_ok=True)
    budget = json.loads(pathlib.Path(chosen.budget).read_text())
    faults = []
    print(f"{'kernel':34} {'registers on sm_' + ', '.join(ARCHITECTURES):30} {'allowed':>7} {'seconds':>7}")
    for name, entry in budget.items():
        if chosen.kernel and name != chosen.kernel:
            continue
        status, text, seconds = build(chosen.nvcc, chosen.include, work, name, entry["body"])
        if status != 0:
            faults.append(f"{name} does not compile:\n{text}")
            continue
        report = read_report(text)
        registers = [report.get(a, ("-", 0))[0] for a in ARCHITECTURES]
        if chosen.update:
            entry["registers"] = max(r for r, _ in report.values())
            entry.pop("spilled", None)
            if spilled := max(s for _, s in report.values()):
                entry["spilled"] = spilled
        print(f"{name:34} {' '.join(f'{r:>4}' for r in registers):30} {entry['registers']:>7} {seconds:7.1f}", flush=True)
        faults += hold(name, entry, report)
    if chosen.update:
        pathlib.Path(chosen.budget).write_text(json.dumps(budget, indent=2) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
