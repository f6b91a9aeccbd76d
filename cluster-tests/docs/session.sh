# Sourced by the shell of a page: how `commands.py` runs one command, which comes on standard input. Each ends with a line
# `__exit__ CODE` on standard output.
set -m
__serving=()
__wait_seconds=120

# With the programs that are there: what builds them is left out.
[ -z "$KEEP_PROGRAMS" ] || make() { command make -o build "$@"; }
curl() { command curl --fail-with-body --max-time 300 "$@"; }

ask() {
  local __text __code
  __text=$(cat)
  __code=0
  eval "$__text" < /dev/null || __code=$?
  echo
  echo "__exit__ $__code"
}

# On a terminal, until someone presses q.
watch() {
  local __text __code
  __text=$(cat)
  __code=0
  { sleep 3; printf q; } |
    timeout 30 script --quiet --return --command "stty rows 40 cols 120; $__text" /dev/null | tail -c 200 | tr -d '\033'
  __code=${PIPESTATUS[1]}
  echo
  echo "__exit__ $__code"
}

# In the background, until it is ready.
serve() {
  local __text __log __code=1
  __text=$(cat)
  __log=$(mktemp)
  eval "$__text" > "$__log" 2>&1 < /dev/null &
  __serving+=("$!:${__text%%[ #]*}:$__log")
  for _ in $(seq $((__wait_seconds * 10))); do
    if grep -qE '^ready |Server is ready|ready to serve client requests' "$__log"; then __code=0; break; fi
    kill -0 $! 2> /dev/null || break
    sleep 0.1
  done
  tail -n 20 "$__log"
  echo "__exit__ $__code"
}

# Ctrl-C for all that serves, the last first. Wrong where one does not end, or not with 0; make and etcd have codes of
# their own.
stop() {
  local __at __one __pid __name __code __bad=0
  for ((__at = ${#__serving[@]} - 1; __at >= 0; __at--)); do
    IFS=: read -r __pid __name __log <<< "${__serving[__at]}"
    kill -INT -- "-$__pid" 2> /dev/null
    timeout 60 tail --pid="$__pid" -f /dev/null
    kill -0 "$__pid" 2> /dev/null && { echo "$__name does not end"; kill -KILL -- "-$__pid"; __bad=1; }
    __code=0
    wait "$__pid" 2> /dev/null || __code=$?
    case $__name:$__code in
      *:0 | make:* | etcd:*) ;;
      *) echo "$__name ended with $__code:"; tail -n 5 "$__log"; __bad=1 ;;
    esac
  done
  __serving=()
  return "$__bad"
}

# The N-th block of a language on this page: `block toml 1`.
block() { awk -v "wanted=$1" -v "left=$2" '/^ *```/ { if (on) { on = 0 } else if ($0 ~ "```" wanted "$" && --left == 0) { on = 1; next } } on' "$PAGE"; }

# What the programs that serve have printed, by a pattern of `grep -P`.
said() { cat "${__serving[@]##*:}" | grep -oP -m 1 -- "$1"; }
