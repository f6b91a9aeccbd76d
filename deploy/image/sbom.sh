#!/bin/bash
# Writes a software bill of materials (CycloneDX 1.6, JSON) to standard output. The same parts make the same bytes.
#
#   sbom.sh image Cargo.lock crates   crates of the programs (deploy/dist/crates.sh) with the checksums of Cargo.lock,
#                                     and the packages of Debian that are installed here
#   sbom.sh wheels cuda.txt           what a file of `pip download` names
set -euo pipefail
export LC_ALL=C

die() { echo "sbom: error: $*" >&2; exit 1; }

# name, version, purl, licence, SHA-256 with tabs between; the last two may be empty.
crates() { # Cargo.lock, crates
  awk -F '\t' '
    # name, version and checksum of each [[package]], in this order.
    NR == FNR { split($0, part, "\""); if (/^name/) name = part[2]; if (/^version/) version = part[2]
                if (/^checksum/) sum[name " " version] = part[2]; next }
    { gsub(/ *\/ */, " OR ", $3)
      print $1 "\t" $2 "\tpkg:cargo/" $1 "@" $2 "\t" $3 "\t" sum[$1 " " $2] }' "$1" "$2"
}

packages() {
  # shellcheck disable=SC1091
  local distribution=$(. /etc/os-release && echo "$ID-$VERSION_ID")
  dpkg-query --show --showformat '${Package}\t${Version}\t${Architecture}\n' |
    awk -F '\t' -v distribution="$distribution" '
      { version = $2; gsub(/\+/, "%2B", version); gsub(/:/, "%3A", version)
        print $1 "\t" $2 "\tpkg:deb/debian/" $1 "@" version "?arch=" $3 "&distro=" distribution "\t\t" }'
}

wheels() { # file
  sed -nE 's/^([a-z0-9-]+)==([^ ]+) --hash=sha256:([0-9a-f]{64})$/\1\t\2\tpkg:pypi\/\1@\2\t\t\3/p' "$1"
}

document() { # components on standard input
  awk -F '\t' -v revision="${REVISION:-unknown}" '
    function text(value) { gsub(/\\/, "\\\\", value); gsub(/"/, "\\\"", value); return "\"" value "\"" }
    BEGIN {
      print "{\"bomFormat\": \"CycloneDX\", \"specVersion\": \"1.6\", \"version\": 1,"
      print " \"metadata\": {\"component\": {\"type\": \"container\", \"bom-ref\": \"tandem\", \"name\": \"tandem\", \"version\": " text(revision) "}},"
      printf " \"components\": ["
    }
    { printf "%s\n  {\"type\": \"library\", \"bom-ref\": %s, \"name\": %s, \"version\": %s, \"purl\": %s",
        (NR > 1 ? "," : ""), text($3), text($1), text($2), text($3)
      if ($4 != "") printf ", \"licenses\": [{\"expression\": %s}]", text($4)
      if ($5 != "") printf ", \"hashes\": [{\"alg\": \"SHA-256\", \"content\": %s}]", text($5)
      printf "}" }
    END { if (NR == 0) exit 1; print "\n ]\n}" }' || die "there is nothing to list"
}

case "${1:-}" in
  image)
    { [ -s "${2:-}" ] && [ -s "${3:-}" ]; } || die "sbom.sh image Cargo.lock crates"
    { crates "$2" "$3"; packages; } | document
    ;;
  wheels)
    [ -s "${2:-}" ] || die "sbom.sh wheels FILE"
    wheels "$2" | document
    ;;
  *) die "sbom.sh image|wheels, not ${1:-nothing}" ;;
esac
