#!/bin/bash
# The programs as they are shipped, into target/dist: optimized across crates, and the router by what it does under load as well.
# Its code is met once a request and has left the caches by the next one, so that what counts is how densely the part lies that
# every request takes. Three builds, two loads (load.py), half an hour on two cores:
#
#   counting   a router that counts what it executes, under the load
#   guided     a router that the compiler optimizes by these counts
#   laid out   the same, its functions and blocks put in another order by the counts of a second load (BOLT)
#
#   build.sh [--plain]   --plain: across crates only
set -euo pipefail
cd "$(dirname "$0")/../.."

me=dist
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

target=$(deploy/target_dir.sh)
dist=$target/dist
work=$target/guided

router() { # target directory, compiler flags: builds the router there
  RUSTFLAGS=$2 CARGO_TARGET_DIR=$work/$1 cargo build --profile dist --locked -p tandem-router --bin tandem-router --target "$host"
  built=$work/$1/$host/dist/tandem-router
}

load() { # program: runs it as the router of a loaded cluster
  rm -rf "$work/programs"
  mkdir -p "$work/programs"
  cp "$1" "$work/programs/tandem-router"
  cp "$dist/tandem" "$dist/tandem-prefill-node" "$dist/tandem-decode-node" "$work/programs/"
  # That the generator is late is of no matter here.
  python3 deploy/dist/load.py "$work/programs/tandem" 2> "$work/load.log" || failed load.log
}

failed() { # file below $work
  tail -n 5 "$work/$1" >&2
  die "what was said is in $work/$1"
}

case "${1:-}" in
  "" | --plain) ;;
  *) die "build.sh [--plain], not $1" ;;
esac
cargo build --profile dist --locked
[ "${1:-}" != --plain ] || exit 0
[ "$(uname -m)" = x86_64 ] || { say "the router is guided by counts on x86-64 only; this is the plain build"; exit 0; }

host=$(rustc -vV | sed -n 's/^host: //p')
llvm=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
tools=/usr/lib/llvm-$llvm
# The compiler's own version, which alone reads and writes its counts.
if [ ! -x "$tools/bin/llvm-profdata" ] || [ ! -x "$tools/bin/llvm-bolt" ] || [ ! -e "$tools/lib/libbolt_rt_instr.a" ]; then
  say "needed to optimize the router by its load (without: deploy/dist/build.sh --plain): the tools of LLVM $llvm"
  install_packages "llvm-$llvm" "bolt-$llvm" "libbolt-$llvm-dev"
fi

say "a router that counts"
router counting "-Cprofile-generate=$work/counts"
if [ ! "$work/router.profdata" -nt "$built" ]; then
  rm -rf "$work/counts"
  load "$built"
  "$tools/bin/llvm-profdata" merge --output="$work/merged" "$work/counts"
  mv "$work/merged" "$work/router.profdata"
fi

say "a router that is guided by the counts"
# What makes up 99.9 % of the counts is hot, where the compiler says 99. A token is counted a hundred times as often as a request,
# whose way then lies at the border: what one API alone takes is beyond it.
router final "-Cprofile-use=$work/router.profdata -Cllvm-args=-profile-summary-cutoff-hot=999000 -Clink-arg=-Wl,--emit-relocs"

if [ ! "$work/tandem-router" -nt "$built" ]; then
  say "another order of its code"
  rm -f "$work/router.fdata"
  # Assembly written by hand (ring's) stays as it is.
  "$tools/bin/llvm-bolt" "$built" -instrument -o "$work/router-counting" --instrumentation-file="$work/router.fdata" \
    -skip-funcs='ring_core_.*' > "$work/bolt.log" 2>&1 || failed bolt.log
  load "$work/router-counting"
  "$tools/bin/llvm-bolt" "$built" -o "$work/router-laid-out" -data="$work/router.fdata" -skip-funcs='ring_core_.*' \
    -reorder-blocks=ext-tsp -reorder-functions=cdsort -split-functions -split-all-cold -split-eh -icf=all >> "$work/bolt.log" 2>&1 ||
    failed bolt.log
  # Whole, or not there: the next run takes what is there.
  mv "$work/router-laid-out" "$work/tandem-router"
fi
# What lies there is a second name of a file that cargo keeps: not to be written into.
cp --remove-destination "$work/tandem-router" "$dist/tandem-router"
say "done: $dist"
