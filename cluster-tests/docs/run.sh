#!/bin/bash
# `make test-docs`: every command of README and docs, in order, in a clean container: Debian, what the README asks for,
# a clone of this repository, and the programs of `make build`. `commands.py` beside it says what runs and what does
# not; flags are passed on to it (`--page docs/operate.md`).
#
# The container is of a docker engine that this script starts and ends; packages and the model come from the registries,
# as for a user. Needs root and docker; ends with 2 where these are missing.
set -euo pipefail
cd "$(dirname "$0")/../.."

me=test-docs
# shellcheck source=cluster-tests/compose/docker.sh
. cluster-tests/compose/docker.sh

programs=${TANDEM_PROGRAMS_DIR:-$(deploy/target_dir.sh)/release}
[ -x "$programs/tandem" ] || die "no programs in $programs: make build"
compiler=$(rustc --print sysroot) || missing "no rustc here"
start_engine
debian_image debian:bookworm-slim

certificates=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}
repository=$(git rev-parse --path-format=absolute --git-common-dir)
mounts=()
for name in tandem tandem-router tandem-prefill-node tandem-decode-node; do
  mounts+=(--volume "$(realpath "$programs/$name"):/programs/$name:ro")
done
# Addresses of the pages' hosts are the container's own; all of it is this machine.
docker run --rm --init --cap-add NET_ADMIN --cap-add SYS_PTRACE --ipc private --shm-size 2g \
  --add-host router.example:127.0.0.1 "${mounts[@]}" \
  --volume "$repository:$repository:ro" \
  --volume "$PWD:$PWD:ro" --volume "$compiler:/usr/local/rust:ro" \
  --volume "$certificates:/certificates.pem:ro" --env PIP_CERT=/certificates.pem --env NODE_EXTRA_CA_CERTS=/certificates.pem \
  --env DEBIAN_FRONTEND=noninteractive \
  --env PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  debian:bookworm-slim bash -c '
    set -euo pipefail
    # What the README asks for, and Python for commands.py.
    apt-get update -qq
    apt-get install -qq --yes --no-install-recommends git make sudo curl ca-certificates python3 iproute2 > /dev/null
    git config --global --add safe.directory "*"
    exec python3 -B "$1/cluster-tests/docs/commands.py" --programs /programs "${@:2}"
  ' run "$PWD" "$@"
