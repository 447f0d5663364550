# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: the repository's root, headings with elapsed time, installing what is missing.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

heading() { # TEXT
  printf '\n=== [%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$1"
}

fail() { # SENTENCE
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  exit 1
}

# Installs the Debian packages among the arguments that are not installed yet.
need_packages() {
  local missing=() package
  if ! command -v dpkg-query >/dev/null; then
    printf 'Not a Debian system: make sure that the like of these is installed: %s\n' "$*"
    return 0
  fi
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "missing ${missing[*]}; run once as root, or install sudo"
    as_root=(sudo)
  fi
  heading "Installing ${missing[*]}"
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
}

build_packages=(g++ cmake ninja-build ccache pkg-config python3 ca-certificates libopenblas-dev libcli11-dev libpcre2-dev
  nlohmann-json3-dev)
fuzz_packages=(clang-16 libclang-rt-16-dev)
aarch64_packages=(g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)
test_packages=(catch2 clang libbenchmark-dev libboost-context-dev clang-format git gnuplot-nox)
python3 -m pip --version >/dev/null 2>&1 || build_packages+=(python3-pip)
