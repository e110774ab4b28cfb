# Sourced by the other scripts: where things are kept, and how a missing package is installed.
# shellcheck shell=bash
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export WINDLASS_CACHE=${WINDLASS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/windlass}
# Outside the checkout, so that a fresh clone builds only what changed.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$WINDLASS_CACHE/target}
export PATH=$PATH:/usr/sbin:/sbin:/usr/local/go/bin:$HOME/.cargo/bin

# need PROGRAM=PACKAGE...: installs the Debian packages of the programs that are missing.
need() {
  local missing=() item
  for item in "$@"; do
    command -v "${item%%=*}" >/dev/null || missing+=("${item#*=}")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if ! command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]} (Debian's package names). Install them, then run this again." >&2
    exit 1
  fi
  local sudo=()
  [ "$(id -u)" = 0 ] || sudo=(sudo)
  echo "installing ${missing[*]}" >&2
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

need_rust() {
  need cc=gcc make=make protoc=protobuf-compiler
  command -v cargo >/dev/null && return
  echo "missing: Rust 1.95 or newer. Install it with rustup (https://rustup.rs), then run this again." >&2
  exit 1
}

# phase NAME COMMAND...: runs the command and says how long it took.
phase() {
  local name=$1 start=${EPOCHREALTIME/./}
  shift
  "$@"
  printf '%-28s %6.1f s\n' "$name" "$(( (${EPOCHREALTIME/./} - start) / 100000 ))e-1" >&2
}
