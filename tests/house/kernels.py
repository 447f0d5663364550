#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds the source files that compile the kernels of attention again: they are most of what a program over them takes to
compile, and cpu_kernels.cpp has them for all.   usage: kernels.py BUILD_FOLDER NM"""
import json
import pathlib
import re
import subprocess
import sys

import tree

HOME = "cpu_kernels.cpp"
# kvcache::detail::isa_scalar::run_tile, which every pair of types comes to.
KERNEL = "N7kvcache6detail10isa_scalar8run_tile"


def check(build, nm="nm"):
    """Looks into the objects that are built."""
    findings = []
    for entry in json.loads((pathlib.Path(build) / "compile_commands.json").read_text()):
        if pathlib.Path(entry["file"]).name == HOME:
            continue
        output = pathlib.Path(entry["directory"]) / re.search(r" -o (\S+)", entry["command"]).group(1)
        if not output.exists():
            continue
        symbols = subprocess.run([nm, "--defined-only", output], capture_output=True, text=True, check=True).stdout
        if KERNEL in symbols:
            findings.append(f"{entry['file']}: compiles attention's kernels; name the pair of types in cpu_kernels.hpp,"
                            " and include that or take kvcache_share_kernels")
    return findings


if __name__ == "__main__":
    tree.finish(check(*sys.argv[1:]))
