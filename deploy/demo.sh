#!/bin/bash
# One prefill and one decode node, three prompts, the timeline of the last one. Exits 0 only when all of it worked.
set -euo pipefail
cd "$(dirname "$0")/.."

tandem=$(deploy/target_dir.sh)/release/tandem
work=$(mktemp -d "${TMPDIR:-/tmp}/tandem-demo.XXXXXX")
up=""

# Whatever happens: no process stays behind, and a failure shows what the processes said.
finish() {
  code=$?
  trap - EXIT INT TERM
  if [ -n "$up" ] && kill -TERM "$up" 2> /dev/null; then
    wait "$up" || code=$?
  fi
  if [ "$code" != 0 ]; then
    echo "demo: failed ($code); the last lines of the logs:" >&2
    tail -n 15 "$work"/up.txt "$work"/logs/*.log >&2 || true
    echo "demo: logs are in $work" >&2
  else
    rm -rf "$work"
    echo "demo: done"
  fi
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

ask() { echo; echo "--- $1"; shift; "$tandem" --state "$work/cluster.json" "$@"; }

# Every prompt is handed off, also one that decode could as well compute itself.
"$tandem" --state "$work/cluster.json" up --prefill 1 --decode 1 --router-arg=--local-prefill=never --log-dir "$work/logs" "$@" > "$work/up.txt" 2>&1 &
up=$!
for _ in $(seq 1200); do
  if grep -q '^ready ' "$work/up.txt"; then break; fi
  kill -0 "$up" 2> /dev/null || { wait "$up" || true; up=""; echo "demo: the cluster did not start" >&2; exit 1; }
  sleep 0.1
done
grep -q '^ready ' "$work/up.txt" || { echo "demo: the cluster was not ready within 2 minutes" >&2; exit 1; }
cat "$work/up.txt"
grep -q 'transport=ucx/' "$work/up.txt" || { echo "demo: UCX was not chosen" >&2; exit 1; }

story="Once upon a time there was a small town by the sea, where the fishermen left before dawn and came home at noon. "
long="Read this report and say in one sentence what it is about. $(for _ in $(seq 23); do printf '%s' "$story"; done)In one sentence:"

ask "short completion" generate --max-tokens 24 --stop $'\n' "The capital of France is"
ask "chat" chat --max-tokens 96 "Explain in two sentences why the sky is blue."
ask "a prompt of about 600 tokens" generate --max-tokens 48 "$long"
ask "its timeline" trace last
