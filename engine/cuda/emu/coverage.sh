#!/bin/bash
# Lines of the CUDA kernels that no test reaches, by gcov: kernels are compiled for the host without optimization and
# counted (EMU_COVERAGE=1), the tests of tandem-cuda run, and what was never executed is printed.
#
#   engine/cuda/emu/coverage.sh [arguments of cargo test, such as --test kernels]
#
# A template that nothing instantiates has no lines, and does not appear. Exit status 1: some line was not reached.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

target=$(deploy/target_dir.sh)
export EMU_COVERAGE=1 TANDEM_GPU=emulate TANDEM_REQUIRE_EMU=1
cargo build --release --locked -p tandem-cuda-emu
# The newest build's folder; counts of earlier runs would hide what these tests do not reach.
emulator=$(find "$target/release/build" -path '*tandem-cuda-emu-*/out/emulator' -printf '%T@ %p\n' |
  sort -n | tail -1 | cut -d' ' -f2-)
find "$emulator" -name '*.gcda' -delete
cargo test --release --locked -p tandem-cuda "$@"

counted=("$emulator"/libkernels.so-*.gcda)
[ -e "${counted[0]}" ] || { echo "no counts in $emulator: did a test run a kernel?" >&2; exit 2; }
# Sources are named from the crate's folder. Behind a template's lines gcov prints them once more for each instance,
# between lines of dashes: the sums are enough.
cd engine/cuda/emu
gcov --stdout "${counted[@]}" 2> /dev/null | awk '
  /^----/ { after_dashes = 1; next }
  after_dashes { after_dashes = 0; in_instance = /^[^ ].*:$/ }
  / 0:Source:/ { sub(/.*Source:/, ""); sub(/.*\//, ""); file = $0; is_kernel = file ~ /\.cuh?$/; in_instance = 0; next }
  !is_kernel || in_instance { next }
  $1 ~ /^[0-9]+\*?:/ { reached[file]++ }
  $1 ~ /^#####/ { missed[file]++; print file ":" $0 }
  END {
    for (file in reached) printf "%s: %d lines reached, %d not\n", file, reached[file], missed[file]
    for (file in missed) if (missed[file]) exit 1
  }'
