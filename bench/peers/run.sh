#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures kvcache beside PyTorch and llama.cpp: see README.md beside this file. Arguments go to compare.py; --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"

compare=(bench/peers/compare.py)
for argument in "$@"; do
  case $argument in -h | --help | --show | --show=*) exec python3 -B "${compare[@]}" "$@" ;; esac
done

need_packages "${build_packages[@]}" catch2 libbenchmark-dev python3-venv util-linux

heading "Peers: PyTorch and llama.cpp, which is compiled; 6 GB of disk and many minutes the first time"
venv=build/peers/venv
if ! cmp -s bench/peers/requirements.txt "$venv/installed.txt"; then
  python3 -m venv "$venv"
  CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON -DLLAVA_BUILD=OFF}" CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
    "$venv/bin/python" -m pip install --disable-pip-version-check --requirement bench/peers/requirements.txt
  cp bench/peers/requirements.txt "$venv/installed.txt"
fi

heading "Model and text"
model=${KVCACHE_MODEL:-$(scripts/get_model.sh)}
text=$(scripts/get_text.sh)
printf '%s\n%s\n' "$model" "$text"

heading "Build"
cmake --preset release -D KVCACHE_BUILD_BENCH=ON -D KVCACHE_BUILD_EXAMPLES=ON
cmake --build --preset release --target bench_attention_cpu engine

heading "Measuring"
exec python3 -B "${compare[@]}" --model "$model" --text "$text" "$@"
