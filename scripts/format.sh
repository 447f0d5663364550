#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the layout of every C++ file against .clang-format; --fix rewrites the files.
# clang-format 14 decides, since versions differ; another version is reported and not used.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in "" | --fix) ;; *) fail "'$1' is no option; none checks, --fix rewrites" ;; esac

wanted=14
tool=$(command -v "clang-format-$wanted" || command -v clang-format) || fail "clang-format $wanted is not installed"
version=$("$tool" --version | grep -o '[0-9]\+' | head -1)
[ "$version" = "$wanted" ] || fail "clang-format is version $version, the layout is that of $wanted; install clang-format-$wanted"

mapfile -d '' files < <(git ls-files -z -- '*.hpp' '*.cpp' '*.inl' '*.cuh' '*.cu')
if [ "${1:-}" = --fix ]; then
  "$tool" -i "${files[@]}"
else
  "$tool" --dry-run --Werror "${files[@]}" || fail "the files above are not laid out by .clang-format; run scripts/format.sh --fix"
fi
