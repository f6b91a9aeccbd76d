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
