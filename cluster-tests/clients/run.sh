#!/bin/bash
# Clients that other people wrote, against a cluster of `tandem up`: openai-python, gRPC with own stubs, gRPC reflection,
# grpc-js. Then every program of examples/. Ends with 2 where the packages cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."

unavailable() { echo "test-clients: $1" >&2; exit 2; }

venv=${TANDEM_VENV:-target/venv}
if [ ! -x "$venv/bin/python" ]; then
  echo "test-clients: making a Python environment in $venv"
  python3 -m venv "$venv" || unavailable "python3 makes no environment here: apt-get install python3-venv"
fi
echo "test-clients: installing openai, grpcio-tools, grpc-requests into $venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check openai grpcio-tools grpcio-reflection grpc-requests ||
  unavailable "PyPI does not give these packages"
# Packages go below target/: what others wrote is none of our sources.
javascript=target/grpc-js
if command -v npm > /dev/null; then
  mkdir -p "$javascript"
  cp cluster-tests/clients/grpc-js/package*.json "$javascript"
  npm ci --prefix "$javascript" --no-audit --no-fund --silent || unavailable "the npm registry does not give grpc-js"
else
  echo "test-clients: no npm here: grpc-js is skipped"
fi

source cluster-tests/clients/up.sh
"$venv/bin/python" cluster-tests/clients/openai_client.py "$http"
"$venv/bin/python" cluster-tests/clients/openai_features.py "$http"
"$venv/bin/python" cluster-tests/clients/grpc_client.py "$grpc"
if [ -d "$javascript/node_modules" ]; then
  NODE_PATH=$PWD/$javascript/node_modules node cluster-tests/clients/grpc-js/client.js "$grpc"
fi

example() { # program…: its answer must be the right one, and have a trace
  echo "--- $*"
  "$@" > "$work/example.txt" || { cat "$work/example.txt"; echo "test-clients: $2 failed" >&2; exit 1; }
  cat "$work/example.txt"
  grep -q Paris "$work/example.txt" || { echo "test-clients: $2 has another answer" >&2; exit 1; }
}
prompt="The capital of France is"
question="What is the capital of France?"
example "$venv/bin/python" examples/python/chat.py "$http" "$question"
example "$venv/bin/python" examples/python/generate.py "${grpc#http://}" "$prompt"
example "$venv/bin/python" examples/python/trace.py "$http" "$prompt"
if [ -d "$javascript/node_modules" ]; then
  example node examples/js/chat.mjs "$http" "$question"
  NODE_PATH=$PWD/$javascript/node_modules example node examples/js/generate.js "${grpc#http://}" "$prompt"
fi
echo "test-clients: all passed"
