#!/bin/bash
# Fetches Prometheus and promtool once, Debian's package of a pinned version and checksum, without installing them, and
# prints their folder.
#
#   prometheus.sh [--have]   --have: prints the folder if they are there, and fetches nothing
set -euo pipefail

package=prometheus
version=2.42.0+ds-5+deb12u1
sha256=81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55
dir=${TANDEM_CACHE:-$HOME/.cache/tandem}/prometheus-$version

me=prometheus
# shellcheck source=deploy/packages.sh
. "$(dirname "$0")/../packages.sh"

programs() { [ -x "$dir/usr/bin/prometheus" ] && [ -x "$dir/usr/bin/promtool" ]; }

if ! programs; then
  [ "${1:-}" != --have ] || exit 1
  if ! have apt-get || ! have dpkg-deb || [ "$(dpkg --print-architecture)" != amd64 ]; then
    echo "$me: needs apt-get and dpkg-deb of Debian 12 on amd64" >&2
    exit 2
  fi
  mkdir -p "$(dirname "$dir")"
  work=$(mktemp -d "$(dirname "$dir")/.prometheus.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  trap 'exit 1' INT TERM HUP
  say "fetching $package $version (19 MB)" >&2
  fetched() { (cd "$work" && apt-get download -qq "$package=$version") >&2; }
  # The lists of packages may be old, or missing as in images of containers.
  fetched || { as_root apt-get update -qq >&2; fetched; } || die "apt-get download $package=$version failed"
  echo "$sha256  $(echo "$work"/*.deb)" | sha256sum --check --status || die "the SHA-256 of $package $version is wrong"
  dpkg-deb -x "$work"/*.deb "$work/files"
  rm -rf "$dir"
  mv "$work/files" "$dir"
fi
echo "$dir/usr/bin"
