#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Standard headers that public headers do not bring to their users, macro names, and the licence line of every source
file.   usage: includes.py ROOT"""
import re
import sys

import tree

# Slow to compile, or static state in every user's object files.
FORBIDDEN = {"iostream", "istream", "ostream", "sstream", "fstream", "iomanip", "regex", "ranges", "format", "locale",
             "filesystem", "chrono", "random", "bits/stdc++.h"}
# The rooms whose job is the thing itself.
EXCEPT = {"filesystem": ("kvcache/tier/",), "chrono": ("kvcache/tier/", "kvcache/attention/cpu/")}

DEFINE = re.compile(r"^\s*#\s*define\s+(\w+)", re.MULTILINE)
LICENCE = "// SPDX-License-Identifier: Apache-2.0\n"


def check_includes(texts):
    for name, text in texts.items():
        for header in tree.includes(text):
            if header in FORBIDDEN and not name.startswith(EXCEPT.get(header, ("-",))):
                yield f"{name} includes <{header}>; public headers do without it"
            if not header.startswith("kvcache/") and f'"{header}"' in text and not header.endswith(".inl"):
                yield f'{name} includes "{header}"; write <kvcache/...>'


def check_macro_names(texts):
    for name, text in texts.items():
        for macro in DEFINE.findall(text):
            if not macro.startswith("KVCACHE_"):
                yield f"{name} defines {macro}; every macro begins with KVCACHE_"


def check_header_shape(texts):
    for name, text in texts.items():
        if name.endswith(".hpp") and "\n#pragma once\n" not in text:
            yield f"{name} has no #pragma once"


def check_licence(texts):
    for name, text in texts.items():
        if not text.startswith(LICENCE):
            yield f"{name} does not begin with '{LICENCE.strip()}'"


def check(root):
    library = dict(tree.headers(root))
    everything = dict(tree.sources(root, ["include", "tests", "examples", "bench"]))
    return [*check_includes(library), *check_macro_names(library), *check_header_shape(library),
            *check_licence(everything)]


if __name__ == "__main__":
    tree.finish(check(sys.argv[1]))
