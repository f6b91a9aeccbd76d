#!/bin/bash
# `make test-amx`: the engine's tests of products and attention on an emulated processor with AMX (Intel's Sapphire
# Rapids), for machines that have none. Bochs boots Debian's kernel with the test program and nothing else. It says
# whether the bits are right, and nothing about time: it is hundreds of times slower than a machine.
#
#   AMX_TESTS="tiles rounded"   the tests whose names have one of these; by default those below
#
# Bochs 3.0 is built once, from the source that Debian ships, with the changes of bochs.patch: Linux gives a process
# tiles only where the processor has XFD, which Bochs lacks, and three of its faults made right programs wrong.
set -euo pipefail
cd "$(dirname "$0")/../../.."

me=test-amx
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

here=engine/tests/amx
tests=${AMX_TESTS:-tiles rounded_}
source=http://deb.debian.org/debian/pool/main/b/bochs/bochs_3.0+dfsg.orig.tar.xz
source_sha256=78f6c73d4a6472d5130a87ab9dc306d02c7c71ed8e25b3a8ef642e2a7acd282b
into=${TANDEM_CACHE:-$HOME/.cache/tandem}/tools
bochs=$into/bochs-3.0-$(sha256sum < "$here/bochs.patch" | cut -c 1-12)
work=$(mktemp -d /tmp/tandem-amx.XXXXXX)
emulator=
trap 'kill $emulator 2> /dev/null || true; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

packages() {
  local package missing=()
  have apt-get || die "this wants Debian, for its kernel"
  for package in g++ make patch curl xz-utils cpio xorriso isolinux syslinux-common busybox-static bochsbios vgabios; do
    dpkg-query --show --showformat '${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  install_packages "${missing[@]}"
}

build_bochs() {
  [ ! -x "$bochs/bochs" ] || return 0
  say "building Bochs 3.0, once (two minutes)"
  mkdir -p "$work/source" "$into"
  curl --silent --show-error --fail --retry 3 --output "$work/bochs.tar.xz" "$source" || die "no download from $source"
  echo "$source_sha256  $work/bochs.tar.xz" | sha256sum --check --quiet || die "$source has another SHA-256 than $source_sha256"
  tar --extract --file "$work/bochs.tar.xz" --directory "$work/source" --strip-components 1
  patch --directory "$work/source" --strip 1 --quiet < "$here/bochs.patch"
  (
    cd "$work/source" || exit 1
    # The faster options (-O3, chained handlers, more than one processor) do not get as far as the first program.
    ./configure CFLAGS=-O2 CXXFLAGS=-O2 --enable-x86-64 --enable-avx --enable-evex --enable-amx --enable-pci \
      --enable-long-phy-address --enable-repeat-speedups --enable-fast-function-calls --with-nogui --disable-docbook --disable-xpm &&
      make -j "$(nproc)" bochs
  ) > "$work/build.log" 2>&1 || { tail -20 "$work/build.log"; die "Bochs cannot be built"; }
  rm -rf "$bochs.new"
  mkdir "$bochs.new"
  cp "$work/source/bochs" "$bochs.new/"
  rm -rf "$bochs" # Whole, or not there.
  mv "$bochs.new" "$bochs"
}

kernel() {
  local package
  package=$(LC_ALL=C apt-cache depends linux-image-cloud-amd64 2> /dev/null | sed -n 's/.*Depends: //p' | head -1) || true
  [ -n "$package" ] || die "no package linux-image-cloud-amd64: this wants Debian on x86-64, after apt-get update"
  say "kernel: $package"
  (cd "$work" && apt-get download -qq "$package" 2> /dev/null) || die "no download of $package: without a network, or after another apt-get update"
  dpkg-deb --extract "$work"/linux-image-*.deb "$work/kernel"
}

test_program() {
  cargo test --profile tests --locked -p tandem-engine --lib --no-run --message-format json-render-diagnostics 2> "$work/cargo.log" |
    python3 -c '
import json, sys
print(*(m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable")))' || { cat "$work/cargo.log" >&2; exit 1; }
}

disc() { # program
  local root=$work/root library
  mkdir -p "$root"/{bin,dev,proc,tmp} "$work"/disc/isolinux
  cp /bin/busybox "$root/bin/"
  strip -o "$root/tests" "$1"
  for library in $(ldd "$1" | grep -o '/[^ ]*'); do install -D "$(realpath "$library")" "$root$library"; done
  cat > "$root/init" << END
#!/bin/busybox sh
busybox mount -t proc proc /proc
busybox mount -t devtmpfs dev /dev
TANDEM_REQUIRE_AMX=1 /tests --test-threads 1 $tests 2>&1
echo "guest: status \$?"
busybox sleep 1
busybox poweroff -f
END
  chmod +x "$root/init"
  (cd "$root" && find . | cpio --create --format newc --quiet) > "$work/disc/initrd"
  cp "$work"/kernel/boot/vmlinuz-* "$work/disc/vmlinuz"
  cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$work/disc/isolinux/"
  # Without fast short copies (FSRM, 580): Bochs has them but not ERMS, and the kernel's memmove believes in both.
  cat > "$work/disc/isolinux/isolinux.cfg" << 'END'
DEFAULT tests
LABEL tests
 KERNEL /vmlinuz
 APPEND initrd=/initrd console=ttyS0,115200 quiet panic=-1 nokaslr nopti mitigations=off lsm=capability clearcpuid=580 no5lvl
END
  xorriso -as mkisofs -quiet -output "$work/disc.iso" -eltorito-boot isolinux/isolinux.bin -eltorito-catalog isolinux/boot.cat \
    -no-emul-boot -boot-load-size 4 -boot-info-table "$work/disc" 2> "$work/xorriso.log" || { cat "$work/xorriso.log"; die "no disc to boot from"; }
}

boot() {
  cat > "$work/bochsrc" << END
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
memory: guest=1024, host=1024
cpu: model=sapphire_rapids, ips=100000000
boot: cdrom
ata0-master: type=cdrom, path=$work/disc.iso, status=inserted
com1: enabled=1, mode=file, dev=$work/serial
display_library: nogui
clock: sync=none, time0=utc
log: $work/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
speaker: enabled=0
END
  : > "$work/serial"
  # A kernel that panics boots again.
  timeout "${AMX_SECONDS:-3600}" "$bochs/bochs" -q -f "$work/bochsrc" > "$work/bochs.out" 2>&1 < /dev/null &
  emulator=$!
  tail --pid "$emulator" --follow --lines +1 "$work/serial" 2> /dev/null | sed --unbuffered 's/\r$//; /proptest:/d' || true
}

packages
build_bochs
kernel
say "building the engine's tests"
program=$(test_program)
disc "$program"
say "booting; the tests whose names have one of: $tests"
boot
if ! grep --text --quiet 'guest: status' "$work/serial"; then
  tail -20 "$work/bochs.out" "$work/bochs.log" || true
  die "the guest did not get to the end of the tests"
fi
grep --text --quiet 'guest: status 0' "$work/serial" || die "tests failed in the guest"
grep --text --quiet 'test result: ok. [1-9]' "$work/serial" || die "no test has a name with one of: $tests"
say "all of them passed"
