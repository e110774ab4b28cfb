#!/bin/bash
# Builds programs of upstream Kubernetes (peers and clients of the tests) from the pinned Go modules.
# usage: build.sh PROGRAM...     PROGRAM: kubectl etcd kube-apiserver kube-scheduler kube-controller-manager loadgen agnhost helm
# Prints the folder that holds them. What is built once for these pins is never built again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${WINDLASS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/windlass}
key=$(cd "$here" && find . -type f \( -name '*.go' -o -name 'go.*' \) -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
bin=$cache/upstream/$key
mkdir -p "$bin"
helm=v4.3.2
version=k8s.io/component-base/version
stamp="-s -w -X $version.gitVersion=v1.37.2 -X $version.gitMajor=1 -X $version.gitMinor=37"
for program in "$@"; do
  [ -x "$bin/$program" ] && continue
  echo "building $program" >&2
  # A partial build must never be taken for a whole one: build beside, then rename.
  beside=$bin/.$program.$$
  case $program in
    helm) # Its own module: it pins other Kubernetes modules than the ones under test.
      mkdir "$beside"
      GOBIN=$beside CGO_ENABLED=0 go install -ldflags '-s -w' "helm.sh/helm/v4/cmd/helm@$helm"
      mv "$beside/helm" "$bin/helm" && rmdir "$beside"
      continue ;;
    kubectl) package=k8s.io/kubernetes/cmd/kubectl ;;
    etcd) package=go.etcd.io/etcd/server/v3 ;;
    agnhost) package=k8s.io/kubernetes/test/images/agnhost ;;
    kube-apiserver) package=./cmd/apiserver ;;
    kube-scheduler) package=./cmd/scheduler ;;
    kube-controller-manager) package=./cmd/kcm ;;
    loadgen) package=./cmd/loadgen ;;
    *) echo "build.sh: unknown program $program" >&2; exit 2 ;;
  esac
  (cd "$here" && CGO_ENABLED=0 go build -ldflags "$stamp" -o "$beside" "$package")
  mv "$beside" "$bin/$program"
done
echo "$bin"
