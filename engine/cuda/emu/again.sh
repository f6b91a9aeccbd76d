#!/bin/bash
# The tests of the device's kernels and models once more, twice at the same time: with the checker of accesses, and in an
# order of lanes, blocks and streams that a seed gives. The seed is printed, and taken from EMU_SEED where that is set.
# An emulated device computes on one core: on two cores the two take as long as the longer one.
set -euo pipefail
# A group of its own for what runs beside, which ends with this script.
set -m
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

seed=${EMU_SEED:-$((RANDOM + 1))}
unset EMU_SEED
log=$(mktemp)
random=
trap '[ -z "$random" ] || kill -- "-$random" 2> /dev/null || true; rm -f "$log"' EXIT

tests() {
  cargo test --profile tests --locked --workspace --test kernels --test model --test invariance
}

echo "EMU_CHECK=1, and beside it EMU_ORDER=random EMU_SEED=$seed"
EMU_ORDER=random EMU_SEED=$seed tests > "$log" 2>&1 &
random=$!
code=0
EMU_CHECK=1 tests || code=$?
wait "$random" || code=$?
random=
echo "EMU_ORDER=random EMU_SEED=$seed:"
cat "$log"
exit "$code"
