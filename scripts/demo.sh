#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the example engine, fetches the model and serves a batch of chat requests with it; prints the answers and a
# table. The last request waits for a place and then finds most of its prompt in the cache. Where the model cannot be
# had, a small one with random weights stands in. Arguments go to the engine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_packages "${build_packages[@]}"

heading "Model"
targets=(engine)
if model=$(scripts/get_model.sh); then
  printf '%s\n' "$model"
else
  model=${KVCACHE_MODEL_DIR:-build/model}/random.gguf
  targets+=(make_model)
  printf 'A small model with random weights takes its place: all that follows is real but the answers, which mean nothing.\n'
fi

heading "Build"
cmake --preset release -D KVCACHE_BUILD_TESTS=OFF -D KVCACHE_BUILD_BENCH=OFF
cmake --build --preset release --target "${targets[@]}"
if [ "$(basename "$model")" = random.gguf ]; then
  mkdir -p "$(dirname "$model")"
  build/release/examples/engine/make_model "$model"
fi

heading "Serving examples/engine/requests.jsonl"
build/release/examples/engine/engine --model "$model" --requests examples/engine/requests.jsonl \
  --max-sequences 8 "$@"
