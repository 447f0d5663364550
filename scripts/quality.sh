#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures what stored types of K and V do to a real model, as docs/quantization.md has it: prints the table, and leaves
# report.json and picture.svg in build/quality. 20,480 tokens take about 40 minutes on two idle cores.
# usage: quality.sh [TOKENS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tokens=${1:-20480}
need_packages "${build_packages[@]}" gnuplot-nox

dtypes=(f16 bf16 bf16:f16 f16:bf16 f16:fp8_e4m3
  int8_per_channel rotated_int8_per_token int8_per_token int8_per_token+offset
  fp8_e4m3 fp8_e4m3+offset rotated_fp8_e4m3:fp8_e4m3+offset fp8_e5m2 fp8_e5m2+offset
  int8_per_token:int4_grouped_32
  int4_per_channel:int4_grouped_32 int4_per_channel_symmetric:int4_grouped_32
  int4_per_channel:int4_grouped_asymmetric_32 int4_per_channel
  rotated_int4_grouped_32 rotated_int4_grouped_32+offset int4_grouped_asymmetric_32 int4_grouped_32+offset
  int4_grouped_32 int2_per_channel:int4_grouped_32)

heading "Model and text"
model=${KVCACHE_MODEL:-$(scripts/get_model.sh)}
text=$(scripts/get_text.sh)
printf '%s\n%s\n' "$model" "$text"

heading "Build"
cmake --preset release -D KVCACHE_BUILD_TESTS=OFF -D KVCACHE_BUILD_BENCH=OFF
cmake --build --preset release --target engine

heading "Measuring"
mkdir -p build/quality
build/release/examples/engine/engine --model "$model" --perplexity "$text" --limit "$tokens" --block-size 64 \
  --kv-dtype "$(IFS=, && printf '%s' "${dtypes[*]}")" --json build/quality/report.json
examples/engine/plot_quality.sh build/quality/report.json build/quality/picture.svg
printf 'build/quality/report.json\nbuild/quality/picture.svg\n'
