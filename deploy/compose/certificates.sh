#!/bin/bash
# Certificates for compose.tls.yaml: secrets/tls/ROLE/{tls.crt,tls.key,ca.crt} for router, prefill and decode, good for
# 90 days (DAYS). Run it again to replace them: a running cluster takes the new ones within five seconds.
#
# The authority is made once. Its key, secrets/authority/ca.key, signs for the whole cluster: keep it elsewhere. As with
# the join token, containers read the files as another user than yours: they are readable for all, in a folder that only
# you can enter. Each container has the folder of its own role.
set -euo pipefail
cd "$(dirname "$0")"

days=${DAYS:-90}
ec=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc)
mkdir -p -m 700 secrets
# What openssl says is of interest where it fails.
certificate() {
  local said
  said=$(openssl req -x509 "${ec[@]}" "$@" 2>&1) || { echo "openssl (3 is needed): $said" >&2; exit 1; }
}
if [ ! -s secrets/authority/ca.pem ]; then
  (umask 077 && mkdir -p secrets/authority)
  certificate -days 3650 -subj "/CN=tandem nodes" -addext "keyUsage=critical,keyCertSign" \
    -keyout secrets/authority/ca.key -out secrets/authority/ca.pem
fi
if [ ! -s secrets/authority/ca.key ]; then
  echo "$PWD/secrets/authority/ca.key is not there: bring it back for as long as this runs" >&2
  exit 1
fi
new=$(mktemp -d secrets/.tls.XXXXXX)
trap 'rm -rf "$new"' EXIT
for role in router prefill decode; do
  certificate -days "$days" -subj "/CN=$role" -CA secrets/authority/ca.pem -CAkey secrets/authority/ca.key \
    -addext "basicConstraints=critical,CA:FALSE" -addext "extendedKeyUsage=serverAuth,clientAuth" \
    -addext "subjectAltName=URI:spiffe://tandem.compose/tandem/$role" -keyout "$new/tls.key" -out "$new/tls.crt"
  cp secrets/authority/ca.pem "$new/ca.crt"
  chmod 444 "$new"/*
  mkdir -p -m 755 "secrets/tls/$role"
  # Whole, or not there. Between the two a certificate has another one's key, and the old pair stays in use.
  for file in ca.crt tls.key tls.crt; do mv -f "$new/$file" "secrets/tls/$role/$file"; done
done
echo "$PWD/secrets/tls"
