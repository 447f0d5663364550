# SPDX-License-Identifier: Apache-2.0
"""What the house scripts share: the tree's headers and sources, and how a finding is printed."""
import pathlib
import re
import sys

SOURCE_SUFFIXES = {".hpp", ".cpp", ".inl", ".cuh", ".cu"}
INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def headers(root):
    """The library's headers as (name below include/, text)."""
    base = pathlib.Path(root) / "include"
    for path in sorted((base / "kvcache").rglob("*")):
        if path.suffix in SOURCE_SUFFIXES:
            yield path.relative_to(base).as_posix(), path.read_text()


def sources(root, folders):
    """Source files below the named folders as (name below root, text)."""
    root = pathlib.Path(root)
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES:
                yield path.relative_to(root).as_posix(), path.read_text()


def includes(text):
    return INCLUDE.findall(text)


def without_comments(text):
    return COMMENT.sub("", text)


def finish(findings):
    """Prints the findings and ends the script: 0 when there is none, else 1."""
    for finding in findings:
        print(finding)
    sys.exit(1 if findings else 0)
