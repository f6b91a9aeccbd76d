#!/usr/bin/env bash
# Fuzzes every parser that strangers reach, one after the other, each for so many seconds: `fuzz/run.sh SECONDS [TARGET…]`.
# With AddressSanitizer, LeakSanitizer, checks of arithmetic and coverage, by the product's own compiler (RUSTC_BOOTSTRAP
# allows the flags). A finding is written to target/fuzz/findings and ends its target; all targets run, then this fails.
# Inputs that reach new code are kept in target/fuzz/corpus: the next run begins with them.
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

targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <("$program" 2> /dev/null)
mkdir -p "$target_dir/findings" "$target_dir/logs"
failed=()
printf '| parser | seconds | executions | a second | coverage | corpus | findings |\n|---|---|---|---|---|---|---|\n'
for name in "${targets[@]}"; do
  corpus=$target_dir/corpus/$name log=$target_dir/logs/$name.txt
  mkdir -p "$corpus"
  dictionary=()
  [ ! -f "dictionaries/$name.dict" ] || dictionary=("-dict=dictionaries/$name.dict")
  status=0
  TANDEM_FUZZ_TARGET=$name TANDEM_FUZZ_SEEDS=$corpus ASAN_OPTIONS=${ASAN_OPTIONS:-detect_odr_violation=0} "$program" "$corpus" \
    -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=16384 -print_final_stats=1 \
    -artifact_prefix="$target_dir/findings/$name-" "${dictionary[@]}" > "$log" 2>&1 || status=$?
  [ $status -eq 0 ] || failed+=("$name")
  stat() { sed -n "s/^stat::$1: *//p" "$log" | tail -1; }
  coverage=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
  ran=$(sed -n 's/^Done [0-9]* runs in \([0-9]*\) second.*/\1/p' "$log" | tail -1)
  count=$(find "$target_dir/findings" -name "$name-*" | wc -l)
  printf '| %s | %s | %s | %s | %s | %s | %s |\n' "$name" "${ran:-ended early}" "$(stat number_of_executed_units)" \
    "$(stat average_exec_per_sec)" "$coverage" "$(find "$corpus" -type f | wc -l)" "$count"
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "fuzz: findings in ${failed[*]}: see $target_dir/logs and $target_dir/findings" >&2
  exit 1
fi
