#!/bin/bash
# The live page in Chromium, driven by playwright-core: against a cluster with the model of `make setup`, then against 100 simulated
# nodes and 1,000 traces. Packages go below the target directory, pictures into docs/page/ where SCREENSHOTS=1.
set -euo pipefail
cd "$(dirname "$0")/../.."

missing() { echo "test-page: $1" >&2; exit 2; }
for program in node npm; do
  command -v "$program" > /dev/null || missing "$program is missing: on Debian, apt-get install nodejs npm"
done
export CHROMIUM=${CHROMIUM:-/usr/bin/chromium}
[ -x "$CHROMIUM" ] || missing "$CHROMIUM is missing: on Debian, apt-get install chromium; elsewhere CHROMIUM=PATH"

packages=$(deploy/target_dir.sh)/page-test
mkdir -p "$packages"
cp cluster-tests/page/package*.json "$packages"
npm ci --prefix "$packages" --no-audit --no-fund --silent
export PLAYWRIGHT=$packages/node_modules/playwright-core/index.mjs

pictures=""
[ -z "${SCREENSHOTS:-}" ] || pictures=$PWD/docs/page
only=${PAGE_TEST:-}
if [ -z "$only" ] || [ "$only" = page ]; then
  (
    source cluster-tests/clients/up.sh --prefill 1 --decode 2 --router-arg --local-prefill=never
    node cluster-tests/page/page.mjs "$http" "$tandem" "$work/cluster.json" "$pictures"
  )
fi
if [ -z "$only" ] || [ "$only" = load ]; then
  (
    source cluster-tests/clients/up.sh --simulated --prefill 50 --decode 50 --no-pin --no-lend --transport tcp --kv-blocks 512 --threads 1
    node cluster-tests/page/load.mjs "$http" "$pictures"
  )
fi
