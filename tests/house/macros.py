#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the macros a program sees after the library's headers with those after the standard headers they include:
the difference begins with KVCACHE_, and nothing the standard headers defined has changed.
usage: macros.py ROOT COMPILER"""
import subprocess
import sys

import tree


def macros(compiler, root, lines):
    command = [compiler, "-std=c++20", "-I", f"{root}/include", "-x", "c++", "-dM", "-E", "-"]
    run = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stderr)
    found = {}
    for line in run.stdout.splitlines():
        name, _, value = line.removeprefix("#define ").partition(" ")
        found[name.partition("(")[0]] = value
    return found


def check(root, compiler):
    texts = {name: text for name, text in tree.headers(root) if name.endswith(".hpp") and "/cuda/" not in name}
    standard = sorted({h for text in texts.values() for h in tree.includes(text) if not h.startswith("kvcache/")})
    # Those of another processor are not here.
    lines = [f"#if __has_include(<{h}>)\n#include <{h}>\n#endif" for h in standard]
    before = macros(compiler, root, lines)
    after = macros(compiler, root, lines + [f"#include <{h}>" for h in sorted(texts)])
    for name in sorted(after.keys() | before.keys()):
        if name.startswith("KVCACHE_"):
            continue
        if name not in before:
            yield f"the headers leave the macro {name} behind; every macro begins with KVCACHE_"
        elif name not in after:
            yield f"the headers undefine {name}"
        elif before[name] != after[name]:
            yield f"the headers change {name} from '{before[name]}' to '{after[name]}'"


if __name__ == "__main__":
    tree.finish(list(check(sys.argv[1], sys.argv[2])))
