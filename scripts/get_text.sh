#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts a plain English text, Ambrose Bierce's "The Devil's Dictionary" (1911, public domain), into $KVCACHE_TEXT_DIR, by
# default build/text, and prints its path. It comes out of the Debian package dict-devil, which is not installed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

package=dict-devil
sha256=2c9f5436773cd65973144d5e182ba369c425a979fb1fa416fb66e8eaf46080e8
folder=${KVCACHE_TEXT_DIR:-$root/build/text}
text=$folder/devils_dictionary.txt

is_whole() { # FILE
  printf '%s  %s\n' "$sha256" "$1" | sha256sum --check --status
}

if [ -f "$text" ] && is_whole "$text"; then
  printf '%s\n' "$text"
  exit 0
fi

command -v apt-get >/dev/null || fail "this is no Debian system, and the text comes from its package $package"
mkdir -p "$folder"
work=$(mktemp -d "$folder/download.XXXXXX")
trap 'rm -rf "$work"' EXIT
download() { (cd "$work" && apt-get download -q "$package" >messages 2>&1); }
if ! download; then
  [ "$(id -u)" -ne 0 ] || apt-get update -q >&2
  download ||
    fail "cannot download $package ($(tail -1 "$work/messages")); run apt-get update as root or check the network"
fi
dpkg-deb --extract "$work/$package"_*.deb "$work"
# What dictd adds before and behind the text goes.
python3 - "$work" <<'PYTHON' || fail "the package $package does not hold the text as it was known"
import gzip, pathlib, sys
work = pathlib.Path(sys.argv[1])
text = gzip.decompress((work / "usr/share/dictd/devil.dict.dz").read_bytes()).decode("ascii")
first, last = text.index("PREFACE"), text.index("\n abcdefghijklmnopqrstuvwxyz")
(work / "text").write_text(text[first:last])
PYTHON
is_whole "$work/text" || fail "the text in $package has another SHA-256 than $sha256; it was not kept"
mv "$work/text" "$text"
printf '%s\n' "$text"
