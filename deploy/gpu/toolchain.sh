#!/bin/bash
# Puts nvcc and NVRTC of CUDA 13.0 into $TANDEM_CACHE/cuda (default ~/.cache/tandem/cuda), from the wheels of
# toolchain.txt. Says what it downloads; does nothing when it is there. Nobody needs it to build or run Tandem: it is for
# `make cuda-check`.
#
#   toolchain.sh          fetches it
#   toolchain.sh --path   prints its folder (bin/nvcc, lib/libnvrtc.so.13), whether it is there or not
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
pins=$here/toolchain.txt
# The pins are part of the name: another version is another folder.
into=${TANDEM_CACHE:-$HOME/.cache/tandem}/cuda/$(sha256sum "$pins" | cut -c 1-12)

me=cuda
# shellcheck source=deploy/packages.sh
. "$here/../packages.sh"

if [ "${1:-}" = --path ]; then
  echo "$into"
  exit
fi
have g++ || install_packages g++ # nvcc preprocesses with it
[ ! -x "$into/bin/nvcc" ] || exit 0

say "downloading nvcc and NVRTC 13.0 (192 MB) from PyPI into $into"
fetch_wheels "$(dirname "$into")" "nvcc and NVRTC" < "$pins"
tree=$work/wheels/nvidia/cu13
# A zip file forgets who may run. Nothing here links, nor needs NVRTC's second build.
chmod 755 "$tree"/bin/* "$tree"/nvvm/bin/*
find "$tree" \( -name '*.a' -o -name '*.alt.*' \) -delete
"$tree/bin/nvcc" --version > /dev/null || die "nvcc does not run here"
# Whole, or not there.
mv -T "$tree" "$into"
say "$("$into/bin/nvcc" --version | tail -n 1), in $into"
