#!/bin/bash
# Packs what deploy/gpu/check.sh runs on a machine with a card: programs and test programs of this build without symbols,
# a UCX that knows CUDA, the tiny models of the tests. That machine needs NVIDIA's driver, Python, tar, and NVRTC 13 (in a
# Python package or in LD_LIBRARY_PATH); no Rust, no network. Prints the folder's size, and fails above the limit.
#
#   pack.sh OUT    OUT: the folder to make; check.sh is in it, and unpacks the rest
#
# The kernels travel as sources within the programs, and NVRTC compiles them there, as on a user's machine.
set -euo pipefail
cd "$(dirname "$0")/../.."

me=pack
# shellcheck source=deploy/packages.sh
. deploy/packages.sh
# shellcheck source=deploy/packing.sh
. deploy/packing.sh
limit_mib=64

[ $# = 1 ] || die "pack.sh OUT"
out=$(empty_folder "$1")
mkdir -p "$out/programs/deps" "$out/programs/examples"

say "building programs and tests"
cargo build --release --locked --bins
cargo build --release --locked -p tandem-cuda --example bench_cuda
cargo build --release --locked -p tandem-cluster-tests --example bench_handoff
# Test programs have a hash in their names; cargo says which are of now.
cargo test --release --locked -p tandem-cuda --no-run --message-format=json > "$out/built.json"
cargo test --release --locked -p tandem-cluster-tests --test cuda_ucx --no-run --message-format=json >> "$out/built.json"
release=$(deploy/target_dir.sh)/release
for program in $programs; do strip -o "$out/programs/$program" "$release/$program"; done
strip -o "$out/programs/bench_cuda" "$release/examples/bench_cuda"
# These two look for the programs one folder above their own.
strip -o "$out/programs/examples/bench_handoff" "$release/examples/bench_handoff"
python3 - "$out/built.json" <<'PYTHON' | while read -r name path; do strip -o "$out/programs/deps/$name" "$path"; done
import json, sys
for line in open(sys.argv[1]):
    said = json.loads(line)
    if said.get("reason") == "compiler-artifact" and said.get("executable") and said["profile"]["test"]:
        if "test" in said["target"]["kind"]:
            print(said["target"]["name"], said["executable"])
PYTHON
rm "$out/built.json"

deploy/gpu/ucx.sh
cp -r "$(deploy/gpu/ucx.sh --path)" "$out/ucx"
find "$out/ucx" -type f -name '*.so.*' -exec strip --strip-unneeded {} \;

# Tests read these where they were built: check.py puts a link there.
mkdir -p "$out/source/engine/cuda" "$out/source/engine/tests/families" "$out/source/cluster-tests"
cp -r engine/tests/families/data "$out/source/engine/tests/families/"
pwd > "$out/source/built-in"
cp deploy/bench/big_checkpoints.py deploy/gpu/check.sh deploy/gpu/check.py "$out/"
tar -czf "$out/packed.tar.gz" -C "$out" programs ucx source
rm -r "$out/programs" "$out/ucx" "$out/source"

size_mib=$(du -sm "$out" | cut -f 1)
say "$out: $size_mib MiB"
[ "$size_mib" -lt "$limit_mib" ] || die "more than $limit_mib MiB"
