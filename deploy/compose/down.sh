#!/bin/bash
# `make compose-down`: ends the cluster of compose.yaml and removes its containers, networks and volumes. Images and the
# join token stay. COMPOSE_FILE as for up.sh.
set -euo pipefail
cd "$(dirname "$0")"

me=compose-down
# shellcheck source=deploy/packages.sh
. ../packages.sh

have docker || die "no docker here"
# Compose wants to see the secret's file, whatever it does.
./join_token.sh > /dev/null
docker compose down --volumes --remove-orphans
