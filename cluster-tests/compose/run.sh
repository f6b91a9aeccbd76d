#!/bin/bash
# `make test-compose`: the compose file as shipped, in a docker engine that this script starts and ends.
#
# The images are built from deploy/Dockerfile, with the programs of `make build` (TANDEM_TEST_BUILD=release|plain|dist:
# built in the image, from source). What no registry gives here is made from the same programs under the official tag;
# Grafana has no such program, so where it cannot be pulled the cluster starts without it, and its dashboards' queries
# are asked of Prometheus alone. The checks are in check.py. TANDEM_TEST_GPUS=1 starts compose.gpu.yaml after them, on
# emulated GPUs; =only, without them.
set -euo pipefail
cd "$(dirname "$0")/../.."

me=test-compose
# shellcheck source=cluster-tests/compose/docker.sh
. cluster-tests/compose/docker.sh

# Ports that no other cluster of this machine has.
export TANDEM_HTTP_PORT=18000 TANDEM_GRPC_PORT=18001 TANDEM_PAGE_PORT=18464 JAEGER_PORT=18686 PROMETHEUS_PORT=18090 GRAFANA_PORT=18030
export COMPOSE_PROJECT_NAME=tandem-test DEBIAN_IMAGE=debian:bookworm-slim
files=compose.yaml
if [ -n "${PIP_CERT:-${SSL_CERT_FILE:-}}" ]; then
  export TANDEM_CA_CERTIFICATES=${PIP_CERT:-$SSL_CERT_FILE}
  files=$files:compose.ca.yaml
fi
export COMPOSE_FILE=$files
compose() { (cd deploy/compose && docker compose "$@"); }

before_end() { # exit status
  # shellcheck disable=SC2015
  [ "$1" = 0 ] || { compose ps --all; compose logs --no-color --tail 20; } > "$engine/logs" 2>&1 || true
}

images() {
  debian_image debian:bookworm-slim
  if [ -n "${TANDEM_TEST_BUILD:-}" ]; then
    export TANDEM_BUILD=$TANDEM_TEST_BUILD RUST_IMAGE=rust:1.95.0-slim-bookworm
    rust_image "$RUST_IMAGE"
  else
    # A context of its own: the Dockerfile's folder, the programs and what they are made of.
    mkdir -p "$engine/context/programs"
    cp -r deploy "$engine/context/"
    for program in tandem tandem-router tandem-prefill-node tandem-decode-node; do
      cp "$(deploy/target_dir.sh)/release/$program" "$engine/context/programs/"
    done
    deploy/dist/crates.sh > "$engine/context/programs/crates"
    cp Cargo.lock "$engine/context/"
    export TANDEM_CONTEXT=$engine/context TANDEM_PROGRAMS=prebuilt
  fi
  export JAEGER_IMAGE=jaegertracing/jaeger:2.20.0 PROMETHEUS_IMAGE=prom/prometheus:v3.13.0
  export GRAFANA_IMAGE=grafana/grafana:13.1.0
  program_image "$JAEGER_IMAGE" "$cache/tools/jaeger" /cmd/jaeger/jaeger-linux \
    'USER 10001' 'ENTRYPOINT ["/cmd/jaeger/jaeger-linux"]'
  program_image "$PROMETHEUS_IMAGE" prometheus /bin/prometheus \
    'RUN mkdir /prometheus && chown nobody /prometheus' 'USER nobody' 'WORKDIR /prometheus' 'ENTRYPOINT ["/bin/prometheus"]'
  services=()
  has_image "$GRAFANA_IMAGE" || docker pull --quiet "$GRAFANA_IMAGE" > /dev/null 2>&1 || {
    say "$GRAFANA_IMAGE cannot be pulled: the cluster starts without it"
    # Named, since a service that is scaled to none is pulled all the same.
    mapfile -t services < <(compose config --services | grep --invert-match --line-regexp grafana)
  }
}

# compose.gpu.yaml with two nodes on emulated GPUs, in two containers: KV goes from one to the other by CUDA IPC.
gpus() {
  EMULATOR=$(find "$(deploy/target_dir.sh)/tests/build" -path '*/tandem-cuda-emu-*/out/emulator' -printf '%T@ %p\n' 2> /dev/null |
    sort -n | tail -n 1 | cut -d ' ' -f 2)
  [ -n "$EMULATOR" ] || die "no emulated driver was built, which \`make test\` does"
  deploy/gpu/ucx.sh || die "no UCX with CUDA"
  UCX_WITH_CUDA=$(deploy/gpu/ucx.sh --path)
  FAMILIES=$PWD/engine/tests/families/data
  export EMULATOR UCX_WITH_CUDA FAMILIES
  export TANDEM_MODEL=llama TANDEM_GPU_IMAGE=tandem:cpu
  export COMPOSE_FILE=$files:compose.gpu.yaml:$PWD/cluster-tests/compose/compose.emulated.yaml
  compose up --detach --wait router prefill-0 decode-0
  compose ps
  local request='{"model": "llama", "prompt": [5, 12, 19, 26, 33, 40, 47, 54], "max_tokens": 8, "ignore_eos": true}'
  curl --silent --show-error --fail --max-time 120 --header 'content-type: application/json' --data "$request" \
    "http://127.0.0.1:$TANDEM_HTTP_PORT/v1/completions" > "$engine/answer" || die "no answer over emulated GPUs"
  grep --quiet '"completion_tokens":8' "$engine/answer" || die "another answer: $(cat "$engine/answer")"
  compose logs --no-color decode-0 > "$engine/decode-0.log" 2>&1
  grep --quiet 'ready .*transport=ucx/shm(.*cuda_ipc.*device=cuda:1' "$engine/decode-0.log" ||
    die "decode-0 has no cuda_ipc: $engine/decode-0.log"
  grep --quiet 'zero-copy read from remote.*cuda_ipc/cuda' "$engine/decode-0.log" || die "KV went another way: $engine/decode-0.log"
  compose down --volumes --remove-orphans
  say "compose.gpu.yaml on emulated GPUs: KV by cuda_ipc, zero-copy"
}

# compose.yaml as it is.
processors() {
  compose up --detach --wait "${services[@]}"
  compose ps
  python3 cluster-tests/compose/check.py "$@"
  compose down --volumes --remove-orphans
}

start_engine
images
deploy/compose/join_token.sh > /dev/null
say "building tandem:cpu and tandem:model"
compose build
docker image ls
[ "${TANDEM_TEST_GPUS:-}" = only ] || processors "$@"
[ -z "${TANDEM_TEST_GPUS:-}" ] || gpus
left=$(docker ps --all --quiet; docker volume ls --quiet; docker network ls --quiet --filter type=custom)
[ -z "$left" ] || die "docker compose down left something behind: $left"
say "all passed, and nothing is left"
