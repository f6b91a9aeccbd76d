# Sourced by the set-up scripts, which set `me`: what they say, and packages from apt-get.
say() { echo "$me: $*"; }
die() { echo "$me: error: $*" >&2; exit 1; }
have() { command -v "$1" > /dev/null 2>&1; }

# Whichever Python can download: one with pip, or with venv (which brings pip along).
pip_python() {
  for python in python3 /usr/bin/python3; do
    if have "$python" && "$python" -m pip --version > /dev/null 2>&1; then echo "$python"; return 0; fi
  done
  return 1
}

# The wheels that standard input names by version and hash, from PyPI, unpacked into $work/wheels. `work` is in FOLDER, so
# that what is made there can be moved to its place, and goes with the script.
fetch_wheels() { # FOLDER, what they are for people
  local python wheel
  python=$(pip_python) || die "no Python with pip: install python3-pip and run this again"
  mkdir -p "$1"
  work=$(mktemp -d "$1/.setup.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  trap 'exit 1' INT TERM HUP
  cat > "$work/requirements.txt"
  TMPDIR=$work "$python" -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
    --only-binary :all: --dest "$work" --requirement "$work/requirements.txt" ||
    die "the download of $2 failed (the wheels are for x86-64 Linux)"
  for wheel in "$work"/*.whl; do
    "$python" -m zipfile --extract "$wheel" "$work/wheels" || die "$(basename "$wheel") cannot be unpacked"
  done
}

as_root() {
  if [ "$(id -u)" = 0 ]; then env DEBIAN_FRONTEND=noninteractive "$@"; else sudo env DEBIAN_FRONTEND=noninteractive "$@"; fi
}

install_packages() {
  [ $# -gt 0 ] || return 0
  command="apt-get update && apt-get install --yes --no-install-recommends $*"
  have apt-get || die "missing here: $* (Debian's names); install them with your package manager and run this again"
  [ "$(id -u)" = 0 ] || have sudo || die "not root and no sudo; run this as root, then try again: $command"
  say "installing with apt-get: $*"
  as_root apt-get update -qq || die "apt-get update failed; needed: $command"
  as_root apt-get install --yes --no-install-recommends -qq "$@" || die "apt-get install failed; needed: $command"
}
