#!/bin/bash
# Clients that other people wrote, against a cluster of `tandem up`: openai-python, gRPC with own stubs, gRPC reflection.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=${TANDEM_VENV:-target/venv}
work=$(mktemp -d)
up=""
finish() {
  code=$?
  trap - EXIT
  if [ -n "$up" ] && kill -TERM "$up" 2> /dev/null; then wait "$up" || code=$?; fi
  if [ "$code" != 0 ]; then tail -n 20 "$work"/up.txt "$work"/logs/*.log >&2 || true; fi
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT

if [ ! -x "$venv/bin/python" ]; then
  echo "test-clients: making a Python environment in $venv"
  python3 -m venv "$venv"
fi
echo "test-clients: installing openai, grpcio-tools, grpc-requests into $venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check openai grpcio-tools grpcio-reflection grpc-requests

target/release/tandem --state "$work/cluster.json" up --log-dir "$work/logs" "$@" > "$work/up.txt" 2>&1 &
up=$!
for _ in $(seq 1200); do
  if grep -q '^ready ' "$work/up.txt"; then break; fi
  kill -0 "$up"
  sleep 0.1
done
ready=$(grep '^ready ' "$work/up.txt")
http=$(sed -E 's/.*http=([^ ]+).*/\1/' <<< "$ready")
grpc=$(sed -E 's/.*grpc=([^ ]+).*/\1/' <<< "$ready")
"$venv/bin/python" cluster-tests/clients/openai_client.py "$http"
"$venv/bin/python" cluster-tests/clients/grpc_client.py "$grpc"
echo "test-clients: all passed"
