#!/bin/bash
# Builds the tests' container images out of Debian's packages and upstream's programs: no registry, no Docker.
# Prints the folder that holds them, as archives for `docker load`. What is built once from these inputs is never built again.
#   windlass.test/busybox:1   busybox, as a shell
#   windlass.test/store:1     a Redis
#   windlass.test/web:N       a web page that counts its visits in the store, in the versions 1 and 2
#   windlass.test/agnhost:1   upstream's test program
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${WINDLASS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/windlass}
upstream=$("$here/../upstream/build.sh" agnhost)
key=$(cat "$0" "$here"/web/* "$upstream/agnhost" | sha256sum | cut -c1-16)
out=$cache/images/$key
[ -e "$out/done" ] && { echo "$out"; exit; }
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# archive NAME:TAG ROOTFS CONFIG: the layout of `docker save`
archive() {
  local name=$1 root=$2 config=$3 dir=$work/archive file
  rm -rf "$dir"; mkdir -p "$dir"
  tar --sort=name --mtime=@0 --numeric-owner --owner=0 --group=0 -C "$root" -cf "$dir/layer.tar" .
  local layer; layer=$(sha256sum "$dir/layer.tar" | cut -d' ' -f1)
  printf '{"architecture":"amd64","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' "$config" "$layer" > "$dir/config.json"
  printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$name" > "$dir/manifest.json"
  file=${name//[\/:]/_}.tar
  tar -C "$dir" -cf "$out/.$file" manifest.json config.json layer.tar
  mv "$out/.$file" "$out/$file"
}

# shell ROOTFS: busybox and its applets
shell() {
  mkdir -p "$1/bin" "$1/tmp" "$1/etc" "$1/root" "$1/var/tmp"
  chmod 1777 "$1/tmp"
  cp /bin/busybox "$1/bin/busybox"
  for applet in $(/bin/busybox --list); do [ -e "$1/bin/$applet" ] || ln -s busybox "$1/bin/$applet"; done
  echo 'root:x:0:0:root:/root:/bin/sh' > "$1/etc/passwd"
  echo 'root:x:0:' > "$1/etc/group"
}

path='"Env":["PATH=/bin:/usr/bin:/sbin:/usr/sbin"]'
shell "$work/busybox"
archive windlass.test/busybox:1 "$work/busybox" "{$path,\"Cmd\":[\"sh\"]}"

mkdir -p "$work/agnhost/tmp"
cp "$upstream/agnhost" "$work/agnhost/agnhost"
archive windlass.test/agnhost:1 "$work/agnhost" "{$path,\"Entrypoint\":[\"/agnhost\"],\"Cmd\":[\"pause\"]}"

# shellcheck disable=SC1091
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
mmdebstrap --quiet --variant=extract --include=redis-server,redis-tools "$codename" "$work/redis.tar"
mkdir "$work/store" && tar -C "$work/store" --exclude='./dev/*' --exclude='./usr/share/*' -xf "$work/redis.tar"
shell "$work/store"
archive windlass.test/store:1 "$work/store" "{$path,\"Cmd\":[\"redis-server\",\"--bind\",\"0.0.0.0\",\"--protected-mode\",\"no\",\"--save\",\"\"],\"ExposedPorts\":{\"6379/tcp\":{}}}"
for version in 1 2; do
  mkdir -p "$work/store/www/cgi-bin"
  cp "$here/web/visit" "$work/store/www/cgi-bin/visit"
  echo "$version" > "$work/store/www/version"
  archive "windlass.test/web:$version" "$work/store" "{$path,\"Cmd\":[\"httpd\",\"-f\",\"-p\",\"8080\",\"-h\",\"/www\"],\"ExposedPorts\":{\"8080/tcp\":{}}}"
done
touch "$out/done"
echo "$out"
