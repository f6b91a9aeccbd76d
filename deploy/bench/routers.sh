#!/bin/bash
# Other routers to measure beside ours, from PyPI, into $TANDEM_CACHE/peers/routers (default ~/.cache/tandem/peers/routers).
# Says what it installs; does nothing where everything is there. `--path` prints the Python that has them.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
venv=${TANDEM_CACHE:-$HOME/.cache/tandem}/peers/routers
routers="sglang-router==0.3.2 --hash=sha256:ba5a24951e5e0357fe390782fcd1abd861448a87216832dbf2e501a1dd1548eb
vllm-router==0.1.17 --hash=sha256:85c96bea4d573a49b5a8ae4c72ee3dfe733aba26b6f1ff1256e6142f1f42694d"
# What their launchers import.
launchers="setproctitle==1.3.8 aiohttp==3.14.5 orjson==3.13.0 uvicorn==0.54.0 fastapi==0.165.0"

me=routers
# shellcheck source=deploy/packages.sh
. "$here/../packages.sh"

if [ "${1:-}" = --path ]; then
  echo "$venv/bin/python"
  exit
fi
if ! "$venv/bin/python" -c 'import sglang_router.launch_router, vllm_router.launch_router' 2> /dev/null; then
  python3 -m venv --help > /dev/null 2>&1 || install_packages python3-venv
  say "installing sglang-router and vllm-router (54 MB) into $venv"
  mkdir -p "$(dirname "$venv")"
  python3 -m venv "$venv"
  echo "$routers" > "$venv/routers.txt"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
    --requirement "$venv/routers.txt" || die "they cannot be installed here (the wheels are for x86-64 Linux)"
  # shellcheck disable=SC2086  # a list of words
  "$venv/bin/pip" install --quiet --disable-pip-version-check $launchers || die "their launchers' packages cannot be installed"
fi
