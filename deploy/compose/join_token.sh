#!/bin/bash
# Makes the cluster's secret, secrets/join-token, unless it is there. Prints its path.
#
# A container reads it as another user than yours, and compose mounts a file with the rights that it has: so it is
# readable for all, in a folder that only you can enter.
set -euo pipefail
cd "$(dirname "$0")"

token=secrets/join-token
if [ ! -s "$token" ]; then
  mkdir -p -m 700 secrets
  new=$(mktemp secrets/.join-token.XXXXXX)
  od --address-radix=n --format=x1 --read-bytes=32 /dev/urandom | tr -d ' \n' > "$new"
  chmod 444 "$new"
  # Whole, or not there.
  mv "$new" "$token"
fi
echo "$PWD/$token"
