#!/bin/sh
# What the build script of the crate `etcd-client` takes for protoc (.cargo/config.toml), so that a build needs none: it
# copies the descriptors of that crate's .proto files, which lie beside this script, one file for each version. Every
# other call goes to a real protoc.
#
# With a new version of the crate, `TANDEM_WRITE_DESCRIPTORS=1 cargo test -p tandem-proto --test etcd_descriptors` writes
# its file; without that variable the test compares.
set -eu

descriptors="$(dirname "$0")/${CARGO_PKG_NAME:-}-${CARGO_PKG_VERSION:-}.bin"
out=""
previous=""
for argument; do
  [ "$previous" != -o ] || out=$argument
  previous=$argument
done
if [ -n "$out" ] && [ -f "$descriptors" ]; then
  exec cp "$descriptors" "$out"
fi
exec protoc "$@"
