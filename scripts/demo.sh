#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the example engine, fetches the model and serves a batch of chat requests with it; prints the answers and a
# table. Arguments go to the engine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_packages "${build_packages[@]}"

heading "Model"
model=$(scripts/get_model.sh)
printf '%s\n' "$model"

heading "Build"
cmake --preset release -D KVCACHE_BUILD_TESTS=OFF -D KVCACHE_BUILD_BENCH=OFF
cmake --build --preset release --target engine

heading "Serving examples/engine/requests.jsonl"
build/release/examples/engine/engine --model "$model" --requests examples/engine/requests.jsonl "$@"
