#!/bin/bash
# `make test-kube`: the chart in deploy/helm/tandem against helm and a real API server (kube-apiserver and etcd, without
# a machine that runs pods): linted, applied with --dry-run=server, and refused where a value is nonsense.
set -euo pipefail
cd "$(dirname "$0")/../.."

me=test-kube
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

chart=deploy/helm/tandem
tools=${TANDEM_CACHE:-$HOME/.cache/tandem}/tools
for program in etcd openssl; do have "$program" || { say "no $program here: apt-get install etcd-server openssl"; exit 2; }; done
deploy/tools/build.sh helm kubernetes
work=$(mktemp -d /tmp/tandem-kube.XXXXXX)
export HELM_CACHE_HOME=$work/helm HELM_CONFIG_HOME=$work/helm HELM_DATA_HOME=$work/helm KUBECONFIG=$work/kubeconfig
helm=$tools/helm
kubectl=$tools/kubectl

running=()
end() {
  local status=$?
  trap - EXIT
  # The API server first: it complains about an etcd that went.
  for ((i = ${#running[@]} - 1; i >= 0; i--)); do kill "${running[i]}" 2> /dev/null || true; wait "${running[i]}" 2> /dev/null || true; done
  if [ "$status" = 0 ]; then rm -rf "$work"; else say "what they wrote is in $work"; fi
  exit "$status"
}
trap end EXIT
trap 'exit 130' INT TERM HUP

free_ports() { python3 -c '
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(each.getsockname()[1] for each in held))'; }

start_api_server() {
  local client peer port token
  read -r client peer port <<< "$(free_ports)"
  etcd --data-dir "$work/etcd" --listen-client-urls "http://127.0.0.1:$client" --advertise-client-urls "http://127.0.0.1:$client" \
    --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
    --initial-cluster "default=http://127.0.0.1:$peer" --unsafe-no-fsync > "$work/etcd.log" 2>&1 &
  running+=($!)
  openssl genrsa -out "$work/service-accounts.key" 2048 2> /dev/null
  token=$(openssl rand -hex 16)
  echo "$token,admin,admin,system:masters" > "$work/tokens"
  "$tools/kube-apiserver" --etcd-servers="http://127.0.0.1:$client" --secure-port="$port" --bind-address=127.0.0.1 \
    --cert-dir="$work/certificates" --token-auth-file="$work/tokens" --authorization-mode=RBAC --service-cluster-ip-range=10.0.0.0/24 \
    --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$work/service-accounts.key" \
    --service-account-signing-key-file="$work/service-accounts.key" > "$work/kube-apiserver.log" 2>&1 &
  running+=($!)
  "$kubectl" config set-cluster test --server="https://127.0.0.1:$port" --insecure-skip-tls-verify > /dev/null
  "$kubectl" config set-credentials test --token="$token" > /dev/null
  "$kubectl" config set-context test --cluster=test --user=test > /dev/null
  "$kubectl" config use-context test > /dev/null
  for _ in $(seq 240); do
    ! "$kubectl" get --raw=/readyz > /dev/null 2>&1 || return 0
    kill -0 "${running[1]}" 2> /dev/null || break
    sleep 0.5
  done
  tail -n 5 "$work/kube-apiserver.log" >&2
  die "kube-apiserver does not start"
}

manifests=0
applies() { # what, values: helm template | kubectl apply --dry-run=server
  local what=$1
  shift
  "$helm" template test "$chart" --kube-version 1.34 --namespace tandem "$@" > "$work/manifests.yaml" || die "$what: helm template failed"
  "$kubectl" apply --namespace tandem --dry-run=server --validate=strict --filename "$work/manifests.yaml" > "$work/applied" 2>&1 ||
    { cat "$work/applied" >&2; die "$what: the API server refuses it"; }
  # Such as a pod that Kubernetes' restricted profile would not let in.
  ! grep --ignore-case warning "$work/applied" >&2 || die "$what: warnings"
  manifests=$((manifests + $(grep --count 'dry run' "$work/applied")))
  say "applied, $(grep --count 'dry run' "$work/applied") manifests: $what"
}

# By the schema, or by the chart in its own words.
refused() { # what, values
  local what=$1 own="s/^Error: execution error at (tandem.*): //p"
  shift
  ! "$helm" template test "$chart" --kube-version 1.34 "$@" > "$work/manifests.yaml" 2> "$work/refused" || die "not refused: $what"
  if grep --quiet "don't meet the specifications of the schema" "$work/refused"; then
    why=$(grep --max-count 1 '^- ' "$work/refused")
  else
    why=$(sed --quiet "$own" "$work/refused")
  fi
  [ -n "$why" ] || { cat "$work/refused" >&2; die "refused for another reason: $what"; }
  say "refused: $what ($why)"
}

"$helm" lint --strict "$chart" || die "helm lint"
start_api_server
"$kubectl" create namespace tandem > /dev/null
"$kubectl" label namespace tandem pod-security.kubernetes.io/warn=restricted > /dev/null
"$kubectl" create --filename cluster-tests/kube/crds.yaml > /dev/null
"$kubectl" wait --for=condition=Established --timeout=60s --all crd > /dev/null

applies "as shipped"
grep --quiet -- '--router-id=$(POD_NAME)' "$work/manifests.yaml" || die "routers share a name"
applies "a model from a claim, a secret of one's own, TLS-free clients of one namespace" \
  --set model.existingClaim=models,model.file=llama.gguf,model.sha256=$(printf 'ab%.0s' $(seq 32)),joinToken.existingSecret=mine \
  --set-json 'networkPolicy.clients=[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"apps"}}}]'
applies "monitoring, rules, KEDA, InferencePool, traces" \
  --set monitoring.enabled=true,monitoring.rules.enabled=true,monitoring.labels.release=prometheus,prefill.autoscaling.kind=keda,decode.autoscaling.kind=keda \
  --set inferencePool.enabled=true,otlp.endpoint=http://jaeger.observability:4317
applies "encrypted KV" --set kvEncrypt=true
applies "TLS between routers and nodes" --set nodeTls.router=router-tls,nodeTls.prefill=prefill-tls,nodeTls.decode=decode-tls
[ "$(grep --count -- --node-tls-cert= "$work/manifests.yaml")" = 3 ] || die "not every process has a certificate"
applies "keys of clients, TLS for them" --set router.apiKeys.secret=keys,router.tls.secret=router-tls,router.tls.clientCa=true
for flag in api-keys=/run/secrets/tandem-keys tls-cert= tls-key= tls-client-ca=; do
  [ "$(grep --count -- "--$flag" "$work/manifests.yaml")" = 1 ] || die "not one --$flag"
done
! grep --quiet h2c "$work/manifests.yaml" || die "a gateway would speak h2c to a port with TLS"
applies "all keys in one file" --set router.apiKeys.secret=keys,router.apiKeys.file=keys.json
grep --quiet -- --api-keys=/run/secrets/tandem-keys/keys.json "$work/manifests.yaml" || die "another file of keys"
applies "HPA" --set prefill.autoscaling.kind=hpa,decode.autoscaling.kind=hpa
applies "RDMA and GPUs" --set transport=rdma,prefill.gpus=1,decode.gpus=1,image.tag=gpu \
  --set-json 'decode.args=["--kv-memory=80%"]' --set-json 'decode.tolerations=[{"key":"nvidia.com/gpu","operator":"Exists"}]'
applies "placing" --set-json 'decode.topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"kubernetes.io/hostname","whenUnsatisfiable":"DoNotSchedule","labelSelector":{"matchLabels":{"app.kubernetes.io/component":"decode"}}}]' \
  --set router.nodeSelector.disk=ssd,networkPolicy.enabled=false

# What the API server understands of the chart's rules is what it understands of the files that Prometheus reads.
same_rules() { # what the objective's bound is in the files, what it is to be, values
  local from=$1 to=$2
  shift 2
  "$helm" template test "$chart" --kube-version 1.34 --namespace tandem --show-only templates/monitoring.yaml --set monitoring.enabled=true,monitoring.rules.enabled=true "$@" |
    "$kubectl" create --dry-run=server --namespace tandem --output json --filename - > "$work/rendered.json" || die "the rules are not taken"
  { printf '%s\n' 'apiVersion: monitoring.coreos.com/v1' 'kind: PrometheusRule' 'metadata: {name: files}' 'spec:' '  groups:'
    sed --quiet '/^groups:/,$ { /^groups:/d; s/^/  /p }' deploy/observability/prometheus/rules/{tandem,alerts}.yml; } |
    "$kubectl" create --dry-run=server --namespace tandem --output json --filename - > "$work/files.json" || die "the files are not taken"
  python3 - "$work/rendered.json" "$work/files.json" "$from" "$to" << 'END' || die "the chart's rules are not those of the files"
import json, sys
rendered, files, old, new = sys.argv[1:]
# A list of objects, or one behind the other.
text, found, decoder = open(rendered).read(), [], json.JSONDecoder()
while text.strip():
    value, end = decoder.raw_decode(text.lstrip())
    found += value["items"] if value["kind"] == "List" else [value]
    text = text.lstrip()[end:]
[rules] = [each for each in found if each["kind"] == "PrometheusRule"]
told = open(files).read()
assert told.count(json.dumps(old)[1:-1]) == 1, "the objective stands in one place"
wanted = json.loads(told.replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1]))
assert rules["spec"] == wanted["spec"], "they differ"
assert sum(len(group["rules"]) for group in rules["spec"]["groups"]) > 30
END
  say "rules: those of deploy/observability, with $to"
}
same_rules 'le=~"1|1.0"' 'le=~"1|1.0"'
same_rules 'le=~"1|1.0"' 'le=~"0.5|0.5.0"' --set router.ttftObjectiveMs=500
same_rules 'le=~"1|1.0"' 'le=~"30|30.0"' --set router.ttftObjectiveMs=30000

refused "an objective that is no bucket" --set router.ttftObjectiveMs=800
refused "two objectives" --set-json 'router.args=["--ttft-objective-ms=500"]'
refused "a transport that is none" --set transport=pigeon
refused "encryption of RDMA" --set transport=rdma,kvEncrypt=true
refused "a certificate for routers alone" --set nodeTls.router=router-tls
refused "a file of keys without a secret" --set router.apiKeys.file=keys.json
refused "an authority without a certificate" --set router.tls.clientCa=true
refused "a flag that a value sets" --set-json 'router.args=["--api-keys=/keys.json"]'
refused "TLS at an InferencePool's endpoint" --set router.tls.secret=router-tls,inferencePool.enabled=true
refused "a misspelt value" --set decode.replica=3
refused "seventeen routers" --set router.replicas=17
refused "no decode node" --set decode.replicas=0
refused "a port of 70000" --set router.service.http=70000
refused "a SHA-256 of three letters" --set model.sha256=abc
refused "a claim and a path" --set model.existingClaim=models,model.hostPath=/models
refused "a flag without dashes" --set-json 'prefill.args=["kv-memory"]'
refused "an autoscaler that is none" --set decode.autoscaling.kind=magic
refused "replicas in words" --set prefill.replicas=two

# The API server has these kinds' schemas: it must refuse what the chart would misspell.
"$helm" template test "$chart" --kube-version 1.34 --set monitoring.enabled=true | sed 's/podMetricsEndpoints/podMetricEndpoints/' |
  "$kubectl" apply --namespace tandem --dry-run=server --validate=strict --filename - > /dev/null 2>&1 &&
  die "the API server takes a misspelt field"
say "all passed: $manifests manifests"
