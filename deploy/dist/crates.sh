#!/bin/bash
# What the programs are made of, one crate a line: name, version and licence with tabs between. Those for tests and for
# building alone are not among them.
set -euo pipefail
cd "$(dirname "$0")/../.."

programs=(tandem tandem-router tandem-prefill-node tandem-decode-node)
cargo tree --quiet --locked --edges normal --prefix none --format '{p}|{l}' "${programs[@]/#/--package=}" |
  sed -E '/^$/d; s/ \(\*\)$//; s/^([^ ]+) v([^ |]+)[^|]*\|(.*)$/\1\t\2\t\3/' | LC_ALL=C sort --unique
