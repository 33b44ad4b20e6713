#!/usr/bin/env bash
# Proves the README on an empty machine: a minimal Debian 12 tree, a clean clone of the last commit
# in it, then the two commands. Run as root; needs debootstrap and some 4 GB in ${TMPDIR:-/var/tmp}.
#
#   scripts/fresh_machine.sh                 # make demo, make test
#   scripts/fresh_machine.sh 'make demo'     # commands of your own, in the clone
#   KEEP=1 scripts/fresh_machine.sh          # leave the tree for a look around
#
# Packages come from the mirror this machine's apt is configured with (MIRROR=... overrides it).
# Mounts and processes live in namespaces of their own and go when the script does.
set -euo pipefail

suite=bookworm
repository=$(cd "$(dirname "$0")/.." && pwd)
die() { echo "fresh_machine.sh: $*" >&2; exit 2; }
step() { printf '\n== %s (%d s)\n' "$*" "${SECONDS}"; }

[[ ${EUID} -eq 0 ]] || die "run it as root: it makes a chroot"
command -v debootstrap >/dev/null || die "debootstrap is missing: scripts/install_packages.sh fresh"
if [[ ${WHERRY_FRESH_INSIDE:-} != 1 ]]; then
  root=$(mktemp -d "${TMPDIR:-/var/tmp}/wherry-fresh.XXXXXX")
  chmod 755 "${root}"  # apt reads in it as the user _apt
  child=
  cleanup() {
    set +e
    # unshare ignores gentler signals; everything in the namespace dies with it.
    if [[ -n ${child} ]]; then kill -KILL "${child}" 2>/dev/null; wait "${child}" 2>/dev/null; fi
    if [[ ${KEEP:-} == 1 ]]; then echo "kept: ${root}"; else rm -rf --one-file-system "${root}"{,.log}; fi
  }
  trap cleanup EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  WHERRY_FRESH_INSIDE=1 WHERRY_FRESH_ROOT="${root}" \
    unshare --mount --pid --fork --kill-child --propagation private -- bash "$0" "$@" &
  child=$!
  result=0
  wait "${child}" || result=$?
  child=
  exit "${result}"
fi
root=${WHERRY_FRESH_ROOT}
mount -t proc proc /proc  # the tree's processes only, in our own namespace

if [[ -z ${MIRROR:-} ]]; then
  MIRROR=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
           awk -v suite="${suite}" '$1 == suite {print $2; exit}')
  [[ -n ${MIRROR} ]] || die "apt here knows no ${suite}; name a Debian mirror in MIRROR"
fi
proxy=$(apt-config shell proxy Acquire::http::Proxy); eval "${proxy:-proxy=}"
export http_proxy=${http_proxy:-${proxy}} https_proxy=${https_proxy:-${proxy}}

step "debootstrap ${suite}"
debootstrap --variant=minbase "${suite}" "${root}" "${MIRROR}" >"${root}.log" 2>&1 ||
  { tail -20 "${root}.log" >&2; die "debootstrap failed"; }

# The network as this machine has it: apt's sources, keys, options, name resolution, certificates.
rm -f "${root}/etc/apt/sources.list"
for path in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/apt/keyrings \
            /etc/apt/trusted.gpg.d /usr/share/keyrings /etc/resolv.conf /etc/hosts \
            /etc/ssl/certs/ca-certificates.crt; do
  if [[ -e ${path} ]]; then
    mkdir -p "${root}$(dirname "${path}")"
    cp -rL "${path}" "${root}$(dirname "${path}")/"
  fi
done

mount -t proc proc "${root}/proc"
mount --rbind -o ro /sys "${root}/sys"
for node in null zero full random urandom tty; do
  touch "${root}/dev/${node}"
  mount --bind "/dev/${node}" "${root}/dev/${node}"
done
mkdir -p "${root}/dev/shm" "${root}/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "${root}/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "${root}/dev/pts"
ln -sf pts/ptmx "${root}/dev/ptmx"

inside() {
  chroot "${root}" /usr/bin/env -i HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ${http_proxy:+http_proxy="${http_proxy}"} ${https_proxy:+https_proxy="${https_proxy}"} \
    bash -euo pipefail -c "$1"
}

step "git and make, which the README takes for granted"
inside 'export DEBIAN_FRONTEND=noninteractive
        apt-get -qq update
        apt-get -qq install -y --no-install-recommends git make ca-certificates >/dev/null'

step "a clean clone of $(git -C "${repository}" rev-parse --short HEAD)"
git clone --quiet --no-hardlinks "${repository}" "${root}/root/wherry"

[[ $# -gt 0 ]] || set -- 'make demo' 'make test'
for command in "$@"; do
  step "${command}"
  inside "cd /root/wherry && ${command}"
done
step "done: $*"
