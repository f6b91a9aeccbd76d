#!/bin/bash
# Other engines to measure beside ours, built for this CPU into $TANDEM_CACHE/peers (default ~/.cache/tandem/peers).
# Says what it installs; does nothing where everything is there.
#
#   peers.sh                llama.cpp as PyPI's llama-cpp-python ships its source, with llama_rows.cpp on top
#   peers.sh source         llama.cpp's source alone, nothing is built
#   peers.sh llama-server   and llama.cpp's server from the same source
#   peers.sh 1b             and a model of Llama-3.2-1B's shape with random weights, in BF16, Q8_0 and Q4_K_M (5 GB)
#   peers.sh mistralrs      and PyPI's mistralrs in a virtual environment
#
# Jobs of the build: $BUILD_JOBS, default 2.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${TANDEM_CACHE:-$HOME/.cache/tandem}
peers=$cache/peers
model=$cache/SmolLM2-135M-Instruct.Q4_1.gguf
llama=llama_cpp_python-0.3.36
llama_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
mistralrs=mistralrs==0.9.5
mistralrs_sha256=60cd70976a2ec50175f3d68cd269ccfa75b488c521a34e1d631c1f3da384bd01
gguf=gguf==0.19.0

me=peers
# shellcheck source=deploy/packages.sh
. "$here/../packages.sh"

llama_packages() {
  have cmake || echo cmake
  have ninja || echo ninja-build
  have g++ || echo g++
  python3 -m venv --help > /dev/null 2>&1 || echo python3-venv
}

venv() {
  [ -x "$peers/venv/bin/pip" ] || { say "making a Python environment in $peers/venv"; python3 -m venv "$peers/venv"; }
}

fetch_llama() {
  [ ! -f "$peers/$llama/vendor/llama.cpp/CMakeLists.txt" ] || return 0
  say "downloading the source of $llama (77 MB) from PyPI into $peers"
  venv
  work=$(mktemp -d "$peers/.fetch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  "$peers/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --dest "$work" "llama-cpp-python==0.3.36" || die "the download of $llama failed"
  echo "$llama_sha256  $work/$llama.tar.gz" | sha256sum --check --status || die "the SHA-256 of $llama.tar.gz is wrong"
  tar -C "$work" -xzf "$work/$llama.tar.gz"
  mv "$work/$llama" "$peers/$llama"
}

# Its AMX kernels, which gcc 12 breaks: it drops the stores that fill the tile configuration, and llama.cpp dies at its
# first tile. A statement that reads the configuration keeps them. clang 14 is no way out: it calls the macro that
# llama.cpp asks for by another name, so that these kernels are left out, silently, and llama.cpp is three times slower.
keep_tile_configuration() {
  local source=$peers/$llama/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
  local keep='asm volatile("" :: "r"(&tc) : "memory");'
  grep -qF "$keep" "$source" || sed -i "s/_tile_loadconfig(&tc);/${keep//&/\\&} &/" "$source"
  grep -qF "$keep" "$source" || die "$source is not as expected: no tile configuration in it"
}

build_llama() {
  keep_tile_configuration
  # Configured with another compiler, by an earlier version of this script; or from another checkout.
  local cache=$peers/llama-build/CMakeCache.txt
  if grep -qs "CMAKE_CXX_COMPILER:[A-Z]*=.*clang" "$cache"; then rm -rf "$peers/llama-build"; fi
  if ! grep -qs "CMAKE_HOME_DIRECTORY:INTERNAL=$here$" "$cache"; then rm -f "$cache"; fi
  [ -x "$peers/llama-build/llama_rows" ] || say "building llama.cpp in $peers/llama-build (some minutes)"
  cmake -G Ninja -S "$here" -B "$peers/llama-build" \
    -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_COMPILER=g++ -DLLAMA_SRC="$peers/$llama/vendor/llama.cpp" > "$peers/llama-build.log" 2>&1 &&
    cmake --build "$peers/llama-build" --target llama_rows --parallel "${BUILD_JOBS:-2}" >> "$peers/llama-build.log" 2>&1 ||
    die "the build of llama.cpp failed, see $peers/llama-build.log"
  if grep -qw amx_int8 /proc/cpuinfo && ! objdump -d "$peers/llama-build/llama_rows" | grep tdpb > /dev/null; then
    die "llama.cpp was built without its AMX kernels, which this machine has: a comparison would not be fair"
  fi
  say "llama.cpp: $peers/llama-build/llama_rows"
}

# One of llama.cpp's own programs.
build_llama_tool() {
  local build=$peers/llama-server-build
  [ -x "$build/bin/$1" ] || say "building $1 in $build (ten minutes)"
  cmake -G Ninja -S "$peers/$llama/vendor/llama.cpp" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_COMPILER=g++ -DGGML_NATIVE=ON -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON \
    -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF > "$build.log" 2>&1 &&
    cmake --build "$build" --target "$1" --parallel "${BUILD_JOBS:-2}" >> "$build.log" 2>&1 ||
    die "the build of $1 failed, see $build.log"
  say "llama.cpp's $1: $build/bin/$1"
}

# Quantized by llama.cpp's own tool, so that its blocks are those that people serve.
make_1b() {
  local base=$peers/llama-3.2-1b type
  build_llama_tool llama-quantize
  [ -f "$base-BF16.gguf" ] || { say "writing $base-BF16.gguf (2.5 GB), random weights"
    python3 "$here/big_checkpoints.py" llama-3.2-1b gguf "$base.new"
    mv "$base.new" "$base-BF16.gguf"; }
  for type in Q8_0 Q4_K_M; do
    [ -f "$base-$type.gguf" ] || { say "writing $base-$type.gguf"
      "$peers/llama-server-build/bin/llama-quantize" "$base-BF16.gguf" "$base.new" "$type" > "$base-$type.log" 2>&1 ||
        die "llama-quantize failed, see $base-$type.log"
      mv "$base.new" "$base-$type.gguf"; }
  done
}

install_mistralrs() {
  venv
  if ! "$peers/venv/bin/python" -c 'import gguf, mistralrs' 2> /dev/null; then
    say "installing $mistralrs (26 MB), $gguf and numpy into $peers/venv"
    echo "$mistralrs --hash=sha256:$mistralrs_sha256" > "$peers/mistralrs.txt"
    "$peers/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
      --requirement "$peers/mistralrs.txt" || die "mistralrs cannot be installed here (the wheel is for x86-64 Linux)"
    "$peers/venv/bin/pip" install --quiet --disable-pip-version-check "$gguf" numpy || die "$gguf cannot be installed"
  fi
  if [ ! -f "$peers/safetensors/model.safetensors" ]; then
    say "writing the model's weights as bf16 safetensors to $peers/safetensors (269 MB)"
    "$peers/venv/bin/python" "$here/export_safetensors.py" "$model" "$peers/safetensors.new"
    mv "$peers/safetensors.new" "$peers/safetensors"
  fi
  say "mistral.rs: $peers/venv, with $peers/safetensors"
}

mkdir -p "$peers"
# shellcheck disable=SC2046  # a list of words
install_packages $(llama_packages)
fetch_llama
[ "$*" != source ] || exit 0
build_llama
for peer in "$@"; do
  case $peer in
    llama-server) build_llama_tool llama-server ;;
    1b) make_1b ;;
    mistralrs) install_mistralrs ;;
    *) die "no peer $peer" ;;
  esac
done
