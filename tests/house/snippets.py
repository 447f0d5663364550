#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps the C++ in the Markdown files identical to code that compiles. A snippet is
    <!-- snippet: examples/quickstart.cpp name -->
followed by a ```cpp fence; the source marks the region by a line `// [name]` before and after it. Without a name the
whole file is meant, its licence line apart.   usage: snippets.py ROOT [--fix]"""
import pathlib
import re
import sys
import textwrap

import tree

FENCE = re.compile(r"(?:<!-- snippet: (\S+)(?: (\S+))? -->\n)?```(?:cpp|c\+\+)\n(.*?)```\n", re.DOTALL)


def region(root, file, name):
    """The marked code, or a sentence that says what is missing, as (code, error)."""
    path = pathlib.Path(root) / file
    if not path.is_file():
        return None, f"{file} does not exist"
    lines = path.read_text().splitlines(keepends=True)
    if name is None:
        return "".join(line for line in lines if "SPDX-License-Identifier" not in line).lstrip("\n"), None
    marks = [at for at, line in enumerate(lines) if line.strip() == f"// [{name}]"]
    if len(marks) != 2:
        return None, f"{file} has {len(marks)} lines '// [{name}]', a region has one before it and one after it"
    inside = lines[marks[0] + 1:marks[1]]
    return textwrap.dedent("".join(inside)), None


def check(root, fix=False):
    findings = []
    for page in [pathlib.Path(root) / "README.md", *sorted((pathlib.Path(root) / "docs").rglob("*.md"))]:
        if not page.is_file():
            continue
        shown = page.relative_to(root).as_posix()

        def compare(match):
            file, name, code = match.groups()
            if file is None:
                findings.append(f"{shown}: a C++ block names no source; put <!-- snippet: FILE NAME --> above it")
                return match.group()
            wanted, error = region(root, file, name)
            if error:
                findings.append(f"{shown}: {error}")
                return match.group()
            if code == wanted:
                return match.group()
            if not fix:
                findings.append(f"{shown}: the snippet of {file} differs; run tests/house/snippets.py ROOT --fix")
            return match.group().replace("```cpp\n" + code, "```cpp\n" + wanted)

        text = page.read_text()
        fixed = FENCE.sub(compare, text)
        if fix and fixed != text:
            page.write_text(fixed)
    return findings


if __name__ == "__main__":
    tree.finish(check(sys.argv[1], fix="--fix" in sys.argv[2:]))
