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
python=$(pip_python) || die "no Python with pip: install python3-pip and run this again"
mkdir -p "$(dirname "$into")"
work=$(mktemp -d "$(dirname "$into")/.setup.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM HUP
echo "$pin" > "$work/requirements.txt"
TMPDIR=$work "$python" -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
  --only-binary :all: --dest "$work" --requirement "$work/requirements.txt" ||
  die "the download failed (the wheel is for x86-64 Linux)"
"$python" -m zipfile --extract "$work"/libucx_cu13-*.whl "$work/wheel" || die "the wheel cannot be unpacked"
# Shared libraries and modules alone: static ones are most of the wheel. A wheel has no links, but each library three
# times, under each of its names.
tree=$work/wheel/libucx/lib
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
