#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes unicode_tables.inc: ranges of the code points that are letters (general category L*) and numbers (N*), as
Python's own Unicode database has them.

    python3 make_unicode.py > ../unicode_tables.inc
"""

import sys
import unicodedata


def ranges(major):
    start, rows = None, []
    for code in range(sys.maxunicode + 2):
        inside = code <= sys.maxunicode and unicodedata.category(chr(code))[0] == major
        if inside and start is None:
            start = code
        if not inside and start is not None:
            rows.append((start, code - 1))
            start = None
    return rows


def table(name, major):
    print(f"constexpr range {name}[] = {{")
    line = "   "
    for first, last in ranges(major):
        entry = f" {{{first:#x}, {last:#x}}},"
        if len(line) + len(entry) > 118:
            print(line)
            line = "   "
        line += entry
    print(line)
    print("};")


print("// SPDX-License-Identifier: Apache-2.0")
print(f"// Made by reference/make_unicode.py from Unicode {unicodedata.unidata_version}.")
table("letter_ranges", "L")
table("number_ranges", "N")
