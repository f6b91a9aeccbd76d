#!/bin/bash
# Packs the CPU benchmarks for a machine without Rust or a network (one with AMX, say): Tandem's programs stripped,
# the model, UCX, llama.cpp's source, and the scripts. That machine needs Python 3, tar, cmake, ninja and g++.
#
#   pack.sh OUT             OUT: the folder to make; prints its size
#
# There, in that folder, each command as it would be in the project, after `run.sh`:
#
#   ./run.sh deploy/bench/peers.sh llama-server 1b         builds llama.cpp for that CPU; nothing else works before
#   ./run.sh taskset -c 0,1 python3 -B deploy/bench/bench_cpu.py --rounds 3 --commit "$(cat commit)"
#   ./run.sh taskset -c 0,1 python3 -B deploy/bench/bench_serving.py
#   ./run.sh taskset -c 0,1 built/release/examples/bench_handoff --links ucx --node-args "--ucx-lib-dir $PWD/ucx"
set -euo pipefail
cd "$(dirname "$0")/../.."

me=pack
# shellcheck source=deploy/packages.sh
. deploy/packages.sh
# shellcheck source=deploy/packing.sh
. deploy/packing.sh

[ $# = 1 ] || die "pack.sh OUT"
out=$(empty_folder "$1")
cache=${TANDEM_CACHE:-$HOME/.cache/tandem}
release=$(deploy/target_dir.sh)/release
deploy/setup.sh
deploy/gpu/ucx.sh
deploy/bench/peers.sh source

say "building programs"
cargo build --release --locked --bins
cargo build --release --locked -p tandem-engine --example bench_cpu
cargo build --release --locked -p tandem-cluster-tests --example bench_handoff
mkdir -p "$out/built/release/examples" "$out/cache/peers"
for program in $programs examples/bench_cpu examples/bench_handoff; do
  strip -o "$out/built/release/$program" "$release/$program"
done
cp -r deploy "$out/"
cp -r "$(deploy/gpu/ucx.sh --path)" "$out/ucx"
cp "$cache"/SmolLM2-135M-Instruct.*.gguf "$out/cache/"
# Of llama.cpp what its build reads: half of its source is vocabularies, documents, and other devices.
without=(models docs benches tests media)
for device in cann cuda et hexagon hip metal musa opencl openvino sycl virtgpu vulkan webgpu; do
  without+=("ggml/src/ggml-$device")
done
without=("${without[@]/#/--exclude=llama.cpp/}")
(cd "$cache/peers" && tar -c "${without[@]}" llama_cpp_python-*/vendor/llama.cpp) | tar -x -C "$out/cache/peers"
git rev-parse --short HEAD > "$out/commit"
cat > "$out/run.sh" <<'RUN'
#!/bin/bash
# Runs a command of the project in this folder, with what pack.sh put here. `commit` says of which commit it is.
set -euo pipefail
cd "$(dirname "$0")"
export TANDEM_CACHE=$PWD/cache CARGO_TARGET_DIR=$PWD/built
exec "$@"
RUN
chmod +x "$out/run.sh"
say "$out: $(du -sm "$out" | cut -f 1) MiB"
