#!/bin/sh
# Garbage against the KV backends with two watchers of memory. AddressSanitizer sees every access of our own code, and
# no C that was not compiled with it; so what meets UCX runs under valgrind, too, which sees that. Both must stay silent.
set -eu
cd "$(dirname "$0")/../.."
target=x86_64-unknown-linux-gnu
# The compiler's own sanitizer, which it calls unstable: hence RUSTC_BOOTSTRAP. Only for this target, not for build
# scripts. UCX keeps what it allocates until the process ends.
RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" ASAN_OPTIONS="detect_leaks=0:abort_on_error=1" \
  cargo test --release --locked -p tandem-kvtransfer --test garbage --target "$target" \
  --target-dir "$(deploy/target_dir.sh)/asan" -- --nocapture
if ! command -v valgrind > /dev/null; then
  echo "valgrind is missing (Debian: apt install valgrind): what meets UCX was not watched there" >&2
  exit 1
fi
built=$(cargo test --release --locked -p tandem-kvtransfer --test garbage --no-run --message-format=json |
  sed -n 's/.*"executable":"\([^"]*garbage[^"]*\)".*/\1/p')
# As .cargo/config.toml has them for what cargo runs.
UCX_HANDLE_ERRORS=none UCX_DEBUG_SIGNO=0 UCX_MEM_EVENTS=n UCX_LOG_FILE=stderr valgrind --error-exitcode=9 --fair-sched=yes --undef-value-errors=no --show-leak-kinds=none \
  "$built" ucx --nocapture --test-threads 1
