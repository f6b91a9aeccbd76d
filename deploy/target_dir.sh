#!/bin/bash
# Prints where cargo puts what it builds, as an absolute path: $CARGO_TARGET_DIR, from the repository's root where it is relative,
# or else target/ there. deploy/bench/target_dir.py is the same for Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dir=${CARGO_TARGET_DIR:-target}
case "$dir" in
  /*) echo "$dir" ;;
  *) echo "$PWD/$dir" ;;
esac
