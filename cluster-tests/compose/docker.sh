# Sourced: a docker engine of its own, with compose, and the images that the cluster builds upon. Sets `engine`, the
# folder of the engine, and DOCKER_HOST, DOCKER_CONFIG for `docker` and `docker compose`.
#
# The engine keeps its images in $TANDEM_CACHE/docker, which makes the second run short; its network and its processes
# end with the script. Images that no registry gives here are made from the same programs under the official tags.
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

cache=${TANDEM_CACHE:-$HOME/.cache/tandem}
# Short: a Unix socket's path has a hundred bytes at most.
engine=$(mktemp -d /tmp/tandem-docker.XXXXXX)
export DOCKER_HOST=unix://$engine/docker.sock DOCKER_CONFIG=$engine/config DOCKER_BUILDKIT=1

missing() { say "$1"; exit 2; }

start_engine() {
  [ "$(id -u)" = 0 ] || missing "starting a docker engine needs root"
  for program in docker dockerd; do have "$program" || missing "no $program here: apt-get install docker.io"; done
  deploy/tools/build.sh compose jaeger
  mkdir -p "$DOCKER_CONFIG/cli-plugins"
  ln -s "$cache/tools/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
  say "starting a docker engine of its own; it writes $engine/dockerd.log"
  dockerd --host "$DOCKER_HOST" --data-root "$cache/docker" --exec-root "$engine/exec" --pidfile "$engine/dockerd.pid" \
    > "$engine/dockerd.log" 2>&1 &
  dockerd=$!
  trap end_engine EXIT
  trap 'exit 130' INT TERM HUP
  for _ in $(seq 120); do
    ! docker info > /dev/null 2>&1 || return 0
    kill -0 "$dockerd" 2> /dev/null || break
    sleep 0.5
  done
  tail -n 5 "$engine/dockerd.log" >&2
  die "dockerd does not start"
}

end_engine() {
  local status=$?
  trap - EXIT
  # Before the engine goes, whoever sourced this may look at what failed.
  if declare -F before_end > /dev/null; then before_end "$status" || true; fi
  # shellcheck disable=SC2046  # a list of words
  docker rm --force --volumes $(docker ps --all --quiet) > /dev/null 2>&1 || true
  docker network prune --force > /dev/null 2>&1 || true
  kill "$dockerd" 2> /dev/null || true
  wait "$dockerd" 2> /dev/null || true
  ip link delete docker0 2> /dev/null || true
  if [ "$status" = 0 ]; then rm -rf "$engine"; else say "what the engine wrote is in $engine"; fi
  exit "$status"
}

has_image() { docker image inspect "$1" > /dev/null 2>&1; }

# From the registry where there is one, else what debootstrap makes of the same release.
debian_image() { # tag
  has_image "$1" || docker pull --quiet "$1" > /dev/null 2>&1 || {
    have debootstrap || missing "$1 cannot be pulled, and there is no debootstrap: apt-get install debootstrap"
    say "$1 cannot be pulled: making it with debootstrap"
    debootstrap --variant=minbase "${2:-bookworm}" "$engine/root" > "$engine/debootstrap.log" 2>&1 ||
      die "debootstrap failed: $engine/debootstrap.log"
    # As in the slim image: no documents, no translations, no downloaded packages.
    rm -rf "$engine"/root/usr/share/{doc,man,locale,info} "$engine"/root/var/cache/apt "$engine"/root/var/lib/apt/lists
    mkdir -p "$engine/root/var/cache/apt/archives/partial" "$engine/root/var/lib/apt/lists/partial"
    tar --create --directory "$engine/root" --numeric-owner . | docker import --change 'CMD ["bash"]' - "$1" > /dev/null
    rm -rf "$engine/root"
  }
}

# From the registry where there is one, else the program of this machine in Debian.
program_image() { # tag, program, path in the image, further lines of the Dockerfile
  has_image "$1" || docker pull --quiet "$1" > /dev/null 2>&1 || {
    have "$2" || [ -x "$2" ] || missing "$1 cannot be pulled, and there is no $2: apt-get install $(basename "$2")"
    say "$1 cannot be pulled: making it from $(command -v "$2")"
    mkdir -p "$engine/image"
    cp "$(command -v "$2")" "$engine/image/program"
    printf '%s\n' "FROM debian:bookworm-slim" "COPY program $3" "${@:4}" > "$engine/image/Dockerfile"
    # The old builder: the new one is a plugin, which may be missing.
    DOCKER_BUILDKIT=0 docker build --quiet --tag "$1" "$engine/image" > /dev/null || die "$1 cannot be made"
    rm -rf "$engine/image"
  }
}

# From the registry where there is one, else the compiler of this machine in Debian.
rust_image() { # tag
  has_image "$1" || docker pull --quiet "$1" > /dev/null 2>&1 || {
    local compiler
    compiler=$(rustc --print sysroot) || missing "$1 cannot be pulled, and there is no rustc"
    say "$1 cannot be pulled: making it from $compiler"
    mkdir -p "$engine/image"
    # What compiles: no documents, no sources.
    tar --create --directory "$compiler" --exclude=rustlib/src bin lib > "$engine/image/compiler.tar"
    printf '%s\n' "FROM debian:bookworm-slim" \
      "RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev" \
      "ADD compiler.tar /usr/local/rust/" "ENV CARGO_HOME=/usr/local/cargo PATH=/usr/local/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
      > "$engine/image/Dockerfile"
    DOCKER_BUILDKIT=0 docker build --quiet --tag "$1" "$engine/image" > /dev/null || die "$1 cannot be made"
    rm -rf "$engine/image"
  }
}
