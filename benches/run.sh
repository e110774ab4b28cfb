#!/bin/bash
# `make bench`: the same load on upstream's API server and scheduler and on ours, one after the other, on this machine.
# Writes docs/performance.md. NODES=, PODS= change the load.
set -euo pipefail
. "$(dirname "$0")/../tools/env.sh"
cd "$root"
nodes=${NODES:-1000} pods=${PODS:-3000}
need curl=curl openssl=openssl
need_rust
bin=$(tests/upstream/build.sh etcd kube-apiserver kube-scheduler kubectl loadgen)
cargo build --release --quiet --locked --bin windlass
windlass=$CARGO_TARGET_DIR/release/windlass
work=$(mktemp -d)
pids=()
stop() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done; done
  pids=()
}
trap 'stop; rm -rf "$work"' EXIT

# cpu PID: CPU seconds so far; peak PID: the largest resident set, MiB
cpu() { awk -v hz="$(getconf CLK_TCK)" '{ sub(/.*\) /, ""); print ($12 + $13) / hz }' "/proc/$1/stat"; }
peak() { awk '/VmHWM/ { printf "%.0f", $2 / 1024 }' "/proc/$1/status"; }
sum() { awk '{ s += $1 } END { printf "%.2f", s }'; }

# answering URL-PORT TOKEN-FILE: waits for readyz
answering() {
  for _ in $(seq 600); do
    "$bin/kubectl" --kubeconfig "$1" get --raw /readyz >/dev/null 2>&1 && return
    sleep 0.1
  done
  echo "the server of $1 does not become ready; see $work" >&2
  exit 1
}

start_upstream() {
  local dir=$work/upstream
  tests/upstream/up.sh "$dir" "$bin" scheduler >/dev/null
  mapfile -t pids < "$dir/pids"
  kubeconfig=$dir/kubeconfig measured=("${pids[@]:1}")
}

# start_windlass NAME FLAGS...: measured are the API server and the scheduler, as upstream
start_windlass() {
  local dir=$work/$1
  shift
  mkdir -p "$dir"
  "$windlass" apiserver --bind-address 127.0.0.1 --secure-port 26443 --data-dir "$dir/data" --write-kubeconfig "$dir/kubeconfig" "$@" > "$dir/apiserver.log" 2>&1 &
  local server=$!
  pids+=("$server")
  for _ in $(seq 100); do [ -s "$dir/kubeconfig" ] && break; sleep 0.1; done
  answering "$dir/kubeconfig"
  "$bin/kubectl" --kubeconfig "$dir/kubeconfig" create serviceaccount default >/dev/null 2>&1 || true
  "$windlass" scheduler --kubeconfig "$dir/kubeconfig" --leader-elect=false > "$dir/scheduler.log" 2>&1 &
  pids+=("$!")
  kubeconfig=$dir/kubeconfig measured=("$server" "$!")
}

start_etcd() {
  "$bin/etcd" --data-dir "$work/etcd" --listen-client-urls http://127.0.0.1:22379 --advertise-client-urls http://127.0.0.1:22379 \
    --listen-peer-urls http://127.0.0.1:22380 --log-level error > "$work/etcd.log" 2>&1 &
  pids+=("$!")
}

# load NAME ENCODING...: prints table rows
load() {
  local name=$1 encoding=("${@:2}") verb before after said
  for verb in "nodes -n $nodes" "sched -n $pods" "patch -n $pods" "list -n 20" "watch -n 200 -w 100" clean; do
    before=$(for pid in "${measured[@]}"; do cpu "$pid"; done | sum)
    # shellcheck disable=SC2086
    said=$("$bin/loadgen" -kubeconfig "$kubeconfig" "${encoding[@]}" $verb 2>&1) || said="FAILED: $said"
    after=$(for pid in "${measured[@]}"; do cpu "$pid"; done | sum)
    echo "| $name | ${encoding[*]:-json} | \`$verb\` | $(awk -v a="$after" -v b="$before" 'BEGIN { printf "%.2f", a - b }') | ${said//$'\n'/; } |"
  done
}

measure() {
  local name=$1
  load "$name"
  load "$name" -proto
  echo "| $name | | peak memory, MiB | $(for pid in "${measured[@]}"; do peak "$pid"; echo; done | sum) | |"
}

{
  echo "# Performance"
  echo
  echo "Written by \`make bench\` on $(date -u +%F), $(nproc) cores, $(awk '/MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo), Linux $(uname -r); by the run alone, never by hand."
  echo "CPU is the sum of user and system seconds of API server and scheduler; etcd is left out on both sides."
  echo "The load: upstream-built \`loadgen\` (\`tests/upstream/cmd/loadgen\`), $nodes hollow nodes, $pods pods."
  echo
  echo "| server | bodies | load | CPU s | loadgen says |"
  echo "| --- | --- | --- | --- | --- |"
  start_upstream
  answering "$kubeconfig"
  measure "upstream 1.37.2"
  stop
  start_windlass embedded
  measure "windlass, embedded store"
  stop
  start_etcd
  start_windlass etcd --etcd-servers http://127.0.0.1:22379
  measure "windlass, etcd"
  stop
} > "$work/performance.md"
cp "$work/performance.md" docs/performance.md
cat docs/performance.md
