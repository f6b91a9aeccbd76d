# Sourced: a cluster of `tandem up` until the script ends. Gives $http, $grpc and a directory $work; flags: "$@".
# Programs: those in $TANDEM_PROGRAMS_DIR, or else those of `make build`.
work=$(mktemp -d)
up=""
finish() {
  code=$?
  trap - EXIT
  if [ -n "$up" ] && kill -TERM "$up" 2> /dev/null; then wait "$up" || code=$?; fi
  if [ "$code" != 0 ]; then tail -n 20 "$work"/up.txt "$work"/logs/*.log >&2 || true; fi
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT

tandem=${TANDEM_PROGRAMS_DIR:-$(deploy/target_dir.sh)/release}/tandem
"$tandem" --state "$work/cluster.json" up --log-dir "$work/logs" "$@" > "$work/up.txt" 2>&1 &
up=$!
for _ in $(seq 1200); do
  if grep -q '^ready ' "$work/up.txt"; then break; fi
  kill -0 "$up"
  sleep 0.1
done
ready=$(grep '^ready ' "$work/up.txt")
http=$(sed -E 's/.*http=([^ ]+).*/\1/' <<< "$ready")
grpc=$(sed -E 's/.*grpc=([^ ]+).*/\1/' <<< "$ready")
