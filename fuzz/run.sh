#!/usr/bin/env bash
# Fuzzes every parser that strangers reach, as many at a time as there are cores (FUZZ_JOBS: so many), each for so many
# seconds: `fuzz/run.sh SECONDS [TARGET…]`. With AddressSanitizer, LeakSanitizer, checks of arithmetic and coverage, by the
# product's own compiler (RUSTC_BOOTSTRAP allows the flags). A finding is written to target/fuzz/findings and ends its
# target; all targets run, then this fails. A slow unit is no finding: the first input waits for the model. Inputs that
# reach new code are kept in target/fuzz/corpus: the next run begins with them.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-60}
shift || true
target_dir=$(../deploy/target_dir.sh)/fuzz
triple=$(rustc -vV | sed -n 's/^host: //p')

# What `cargo fuzz` says.
export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$target_dir
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address -Ccodegen-units=16"
cargo build --release --locked --target "$triple"
program=$target_dir/$triple/release/tandem-fuzz

fuzz_one() {
  local name=$1 corpus=$target_dir/corpus/$1 log=$target_dir/logs/$1.txt dictionary=() status=0
  mkdir -p "$corpus"
  [ ! -f "dictionaries/$name.dict" ] || dictionary=("-dict=dictionaries/$name.dict")
  TANDEM_FUZZ_TARGET=$name TANDEM_FUZZ_SEEDS=$corpus ASAN_OPTIONS=${ASAN_OPTIONS:-detect_odr_violation=0} "$program" "$corpus" \
    -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=16384 -print_final_stats=1 \
    -artifact_prefix="$target_dir/findings/$name-" "${dictionary[@]}" > "$log" 2>&1 || status=$?
  stat() { sed -n "s/^stat::$1: *//p" "$log" | tail -1; }
  coverage=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
  ran=$(sed -n 's/^Done [0-9]* runs in \([0-9]*\) second.*/\1/p' "$log" | tail -1)
  printf '| %s | %s | %s | %s | %s | %s | %s |\n' "$name" "${ran:-ended early}" "$(stat number_of_executed_units)" \
    "$(stat average_exec_per_sec)" "$coverage" "$(find "$corpus" -type f | wc -l)" \
    "$(find "$target_dir/findings" -name "$name-*" ! -name '*-slow-unit-*' | wc -l)"
  return $status
}
export -f fuzz_one
export program target_dir seconds

targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <("$program" 2> /dev/null)
mkdir -p "$target_dir/findings" "$target_dir/logs"
printf '| parser | seconds | executions | a second | coverage | corpus | findings |\n|---|---|---|---|---|---|---|\n'
if ! printf '%s\n' "${targets[@]}" | xargs -P "${FUZZ_JOBS:-$(nproc)}" -I{} bash -euo pipefail -c 'fuzz_one {}'; then
  echo "fuzz: findings: see $target_dir/logs and $target_dir/findings" >&2
  exit 1
fi
