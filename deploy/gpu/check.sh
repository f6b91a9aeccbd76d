#!/bin/bash
# Checks Tandem on a card, in one call of ten minutes at most: what the machine has, the tests of kernels and executor on
# the real driver, the card's own bounds, rows of speed beside them, and two nodes on the one card. Writes check.json and
# check.md into OUT. Runs from the folder that pack.sh made.
#
#   check.sh OUT [--seconds N] [--layers N]    N: time for all of it (570); layers of the 8B shape (32; less is quicker)
#
# Needs NVIDIA's driver, Python 3, tar, NVRTC 13, and leave to write where the pack was built (a link to its folder is put
# there). Bounds are measured by PyTorch where it is there, and left out where not. The golden prompts of SmolLM2 run where
# `make setup` has put the model into $TANDEM_CACHE.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ -d "$here/programs" ] || [ -f "$here/packed.tar.gz" ] || { echo "check: error: $here is no folder of pack.sh" >&2; exit 1; }
[ -d "$here/programs" ] || tar -xzf "$here/packed.tar.gz" -C "$here"

# NVRTC, as Python's packages bring it.
nvrtc=$(python3 - <<'PYTHON'
import glob, site, sys
folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
found = [path for folder in folders for path in glob.glob(f"{folder}/nvidia/**/libnvrtc.so.1[23]", recursive=True)]
print(max(found, key=lambda path: path.rsplit(".", 1)[1]).rsplit("/", 1)[0] if found else "")
PYTHON
)
export LD_LIBRARY_PATH=${nvrtc:+$nvrtc:}${LD_LIBRARY_PATH:-}
# Tests take the machine's driver, and no other.
export TANDEM_GPU=real
exec python3 -B "$here/check.py" "$here" "$@"
