#!/bin/bash
# `make up`: a one-node cluster on this machine. Flags go to `windlass up`.
set -euo pipefail
. "$(dirname "$0")/env.sh"
if [ "$(id -u)" != 0 ]; then
  echo "windlass needs root: it makes network links, mounts and containers. Run: sudo make up" >&2
  exit 1
fi

packages() {
  need dockerd=docker.io docker=docker.io iptables-restore=iptables conntrack=conntrack
  need_rust
}

answers() { [ -S /var/run/docker.sock ] && curl --silent --fail --max-time 2 --unix-socket /var/run/docker.sock http://docker/_ping >/dev/null; }

docker_running() {
  need curl=curl
  answers && return
  if [ -d /run/systemd/system ]; then
    systemctl start docker
  else
    # Containers outlive this daemon, as they do under the service manager of a real machine.
    setsid dockerd --live-restore >/var/log/dockerd.log 2>&1 </dev/null &
  fi
  for _ in $(seq 300); do
    answers && return
    sleep 0.1
  done
  echo "dockerd does not answer on /var/run/docker.sock; see /var/log/dockerd.log or journalctl -u docker" >&2
  exit 1
}

build() { cd "$root" && cargo build --release --quiet --locked --bin windlass; }

phase packages packages
phase docker docker_running
phase build build
exec "$CARGO_TARGET_DIR/release/windlass" up "$@"
