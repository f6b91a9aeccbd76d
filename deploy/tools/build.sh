#!/bin/bash
# Builds programs that tests run Tandem beside, from pinned Go modules, into $TANDEM_CACHE/tools. Prints nothing but
# what it builds; does nothing when they are there.
#
#   build.sh compose      docker-compose
#   build.sh helm         helm
#   build.sh jaeger       jaeger, without the pages of its UI
#   build.sh kubernetes   kube-apiserver and kubectl
#
# Checksums stand in each go.sum: the build needs no checksum database, and takes nothing else than what stands there.
set -euo pipefail

me=tools
# shellcheck source=deploy/packages.sh
. "$(dirname "$0")/../packages.sh"

tools=$(cd "$(dirname "$0")" && pwd)
into=${TANDEM_CACHE:-$HOME/.cache/tandem}/tools

build() { # folder, program, package
  # The pins are part of what is there: another version is another build.
  local pins
  pins=$(cat "$tools/$1/go.mod" "$tools/$1/go.sum" | sha256sum | cut -c 1-12)
  [ ! -x "$into/$2" ] || [ "$(cat "$into/.$2.pins" 2> /dev/null)" != "$pins" ] || return 0
  have go || { say "no Go here, which builds $2: https://go.dev/dl (1.24 or newer)"; exit 2; }
  say "building $2 from Go modules, once"
  mkdir -p "$into"
  # Whole, or not there.
  (cd "$tools/$1" && go build -mod=mod -trimpath -ldflags "-s -w ${4:-}" -o "$into/.$2.new" "$3") || die "$2 cannot be built"
  mv "$into/.$2.new" "$into/$2"
  echo "$pins" > "$into/.$2.pins"
}

for name in "$@"; do
  case "$name" in
    compose) build compose docker-compose github.com/docker/compose/v2/cmd \
      "-X github.com/docker/compose/v2/internal.Version=v2.40.3" ;;
    helm) build helm helm helm.sh/helm/v3/cmd/helm ;;
    jaeger) build jaeger jaeger github.com/jaegertracing/jaeger/cmd/jaeger ;;
    kubernetes)
      build kubernetes kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver
      build kubernetes kubectl k8s.io/kubernetes/cmd/kubectl
      ;;
    *) die "build.sh compose|helm|jaeger|kubernetes, not $name" ;;
  esac
done
