#!/bin/bash
# Builds all tests and runs them (some start real clusters), with clippy beside them. Tests of clusters wait more than they
# compute: on two cores clippy takes what they leave, where it took three minutes before them. `make test` calls this.
set -euo pipefail
cd "$(dirname "$0")/.."

# With the tests: their features of shared libraries (tokio's paused clock) make it one build, not two. The examples are
# benchmarks: clippy sees that they compile, and optimizing them takes minutes.
cargo build --profile tests --locked --workspace --bins --tests

said=$(mktemp)
nice -n 19 cargo clippy --profile lint --locked --workspace --all-targets --color never -- -D warnings > "$said" 2>&1 &
clippy=$!
# Nothing stays where the tests are interrupted.
trap 'kill "$clippy" 2> /dev/null || true; rm -f "$said"' EXIT

# Two hosts are network namespaces: where they can be had (as root), tests that cannot make them fail.
namespaces=0
if unshare --net --ipc --mount sh -c 'ip link add name br0 type bridge && ip link add name v0 type veth peer name v1' > /dev/null 2>&1; then
  namespaces=1
fi
echo "TANDEM_REQUIRE_NAMESPACES=$namespaces"
export TANDEM_REQUIRE_NAMESPACES=$namespaces TANDEM_REQUIRE_EMU=1 TANDEM_REQUIRE_UCX=1 TANDEM_REQUIRE_ETCD=1
# They wait more than they compute: three at a time at least.
cores=$(nproc)
export RUST_TEST_THREADS=$((cores > 3 ? cores : 3))
code=0
cargo test --profile tests --locked --workspace --lib --bins --tests || code=$?

if wait "$clippy"; then
  echo "clippy: no warnings"
else
  cat "$said"
  code=1
fi
exit "$code"
