# Sourced, after packages.sh, by what packs Tandem's programs for a machine without Rust.
programs="tandem tandem-router tandem-prefill-node tandem-decode-node"

# Makes a folder, or takes an empty one; prints its absolute path.
empty_folder() { # FOLDER
  mkdir -p "$1"
  [ -z "$(ls -A "$1")" ] || die "$1 is not empty"
  (cd "$1" && pwd)
}
