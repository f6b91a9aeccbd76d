#!/bin/bash
# `make compose-up`: builds the images, starts the cluster of compose.yaml, waits until it can serve, says where it is.
#
#   COMPOSE_FILE    other files behind it, as compose.yaml:compose.gpu.yaml
#   TANDEM_BUILD    dist (the default, half an hour the first time), plain or release (minutes): see ../Dockerfile
set -euo pipefail
cd "$(dirname "$0")"

me=compose-up
# shellcheck source=deploy/packages.sh
. ../packages.sh

have docker || die "no docker here: https://docs.docker.com/engine/install/"
docker compose version > /dev/null 2>&1 || die "docker has no compose here: https://docs.docker.com/compose/install/"
docker info > /dev/null 2>&1 || die "no docker daemon answers, or you may not ask it: $(docker info 2>&1 | tail -n 1)"

./join_token.sh > /dev/null
TANDEM_REVISION=$(git rev-parse HEAD 2> /dev/null || echo unknown)
export TANDEM_REVISION
say "building the images; the first time this takes the time of BUILD=${TANDEM_BUILD:-dist} (TANDEM_BUILD=release: minutes)"
docker compose build
docker compose up --detach --wait

at() { docker compose port "$1" "$2"; } # service, port: HOST:PORT outside
say "a chat:      (cd $PWD && docker compose exec router tandem chat 'Why is the sky blue?')"
say "OpenAI API:  http://$(at router 8000)/v1"
say "live page:   http://$(at router 9464)/"
say "traces:      http://$(at jaeger 16686)/search?service=tandem-router"
say "dashboards:  http://$(at grafana 3000)/dashboards, over http://$(at prometheus 9090)"
say "stop:        make compose-down"
