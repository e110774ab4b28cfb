#!/bin/bash
# `make test`: installs what the tests need and runs them all.
set -euo pipefail
. "$(dirname "$0")/../tools/env.sh"
cd "$root"
if [ "$(id -u)" != 0 ]; then
  echo "the tests need root: they make network namespaces, mounts and containers. Run: sudo make test" >&2
  exit 1
fi

packages() {
  need dockerd=docker.io docker=docker.io iptables-restore=iptables conntrack=conntrack ip=iproute2 nsenter=util-linux \
    mmdebstrap=mmdebstrap /bin/busybox=busybox-static openssl=openssl curl=curl git=git
  need_rust
  if ! command -v go >/dev/null; then
    echo "missing: Go 1.26 or newer, which builds the real clients (https://go.dev/dl). Install it, then run this again." >&2
    exit 1
  fi
}

upstream() {
  WINDLASS_UPSTREAM_BIN=$(tests/upstream/build.sh kubectl etcd kube-apiserver kube-scheduler kube-controller-manager loadgen agnhost helm)
  export WINDLASS_UPSTREAM_BIN
}
images() {
  WINDLASS_IMAGES=$(tests/images/build.sh)
  export WINDLASS_IMAGES
}
binary() {
  cargo build --locked --quiet --bin windlass
  export WINDLASS_BIN=$CARGO_TARGET_DIR/debug/windlass
}

phase packages packages
phase "upstream's programs" upstream
phase "test images" images
phase "windlass" binary
phase "building tests" cargo test --workspace --locked --no-run --quiet
# One test process at a time, on two cores: within one, tests run side by side.
phase tests cargo test --workspace --locked --no-fail-fast
