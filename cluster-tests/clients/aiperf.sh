#!/bin/bash
# aiperf, unmodified, against a cluster of `tandem up`: a chat and a completions profile, without an error. Beside each of them `tandem bench` with prompts as
# long, as many tokens to generate, the same rate and the same even arrivals, on the same cluster; what both measured is printed side by side. With
# AIPERF_TURNS=6 both measure six times, the other one first in each turn: a machine's speed moves by more than the tools differ.
# aiperf is installed once, into $TANDEM_AIPERF_VENV (~/.cache/tandem/aiperf-venv). Reports stay in target/aiperf.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=0.13.0
venv=${TANDEM_AIPERF_VENV:-$HOME/.cache/tandem/aiperf-venv}
requests=${AIPERF_REQUESTS:-40}
rate=${AIPERF_RATE:-4}
osl=${AIPERF_OSL:-16}
turns=${AIPERF_TURNS:-1}
out=$PWD/target/aiperf
if [ ! -x "$venv/bin/aiperf" ]; then
  echo "test-aiperf: installing aiperf $version into $venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "aiperf==$version" gguf
fi
source cluster-tests/clients/up.sh

tokenizer=$work/tokenizer
gguf=${TANDEM_CACHE:-$HOME/.cache/tandem}/SmolLM2-135M-Instruct.Q4_1.gguf
"$venv/bin/python" cluster-tests/clients/aiperf_tokenizer.py "$gguf" "$tokenizer"
model=$(python3 -c 'import json, sys, urllib.request as u; print(json.load(u.urlopen(sys.argv[1] + "/v1/models"))["data"][0]["id"])' "$http")
# So that neither of the two meets a cluster that has not answered yet.
"$tandem" bench --url "$http" --input 64 --output "$osl" --requests 4 --warmup 0 > "$work/warm.txt"
# aiperf KIND DIRECTORY
run_aiperf() {
  # HF_HUB_OFFLINE must be unset, and the tokenizer's path absolute.
  env -u HF_HUB_OFFLINE "$venv/bin/aiperf" profile -m "$model" --tokenizer "$tokenizer" -u "$http" \
    --endpoint-type "$1" --streaming --isl 64 --osl "$osl" --request-rate "$rate" --arrival-pattern constant \
    --request-count "$requests" \
    --extra-inputs ignore_eos:true --use-server-token-count --ui none --artifact-dir "$2"
  python3 cluster-tests/clients/aiperf_check.py "$2" "$requests"
}
# tandem bench KIND DIRECTORY, with prompts as long as aiperf's first ones were by the server's count
run_bench() {
  "$tandem" bench --url "$http" --api "$1" --output "$osl" --rate "$rate" --arrivals constant \
    --input "$(python3 cluster-tests/clients/aiperf_beside.py --prompt-tokens "$out/$1/1")" \
    --requests "$requests" --warmup 0 --json "$2/tandem.json" > "$2/tandem.txt"
}
for kind in chat completions; do
  rm -rf "${out:?}/$kind"
  for turn in $(seq "$turns"); do
    directory=$out/$kind/$turn
    mkdir -p "$directory"
    tools=(run_aiperf run_bench)
    [ $((turn % 2)) = 1 ] || tools=(run_bench run_aiperf)
    # The router's own word of both runs, beside which the tools' words stand: one of them takes more of the processors than the other.
    for tool in "${tools[@]}"; do
      curl -fsS "$http/metrics" > "$directory/$tool.before"
      "$tool" "$kind" "$directory"
      curl -fsS "$http/metrics" > "$directory/$tool.after"
    done
  done
  python3 cluster-tests/clients/aiperf_beside.py "$out/$kind"
done
echo "test-aiperf: all passed"
