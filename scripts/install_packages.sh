#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages of the groups named, those that are missing only.
#
#   scripts/install_packages.sh build test     # as root: installs; otherwise prints the line to run
#   scripts/install_packages.sh --list         # every package and what it is for
#
# Exit codes: 0 nothing is missing any more, 2 something is and this user cannot install it.
# Elsewhere than on Debian or Ubuntu it says so and leaves it to CMake to name what it misses.
set -euo pipefail

# Group, package, what it is for. `build` is all that `make demo` needs.
packages='
build  make                the two commands of the README
build  git                 the commit that `wherry info` and every result name
build  cmake               the build system, 3.25 or later
build  ninja-build         runs the build
build  g++                 the compiler, 12 or later
build  libfmt-dev          fmt: messages and tables
build  libhwy-dev          Google Highway: portable SIMD kernels, chosen at run time
build  libdnnl-dev         oneDNN: the matrix products of the experts on the CPU
build  libhwloc-dev        hwloc: which processors and memory belong together
build  pkg-config          finds hwloc
build  libcli11-dev        CLI11: arguments of the command line
build  nlohmann-json3-dev  nlohmann-json: --json output, model shapes, traces
test   libgtest-dev        GoogleTest: the tests
test   libgmock-dev        GoogleMock: matchers that say what differs
test   python3             the oracles of the number formats
test   python3-venv        their packages, kept apart in build/venv
test   openmpi-bin         mpirun: a group of ranks that it has started
ci     clang-19            the second compiler
ci     libclang-rt-19-dev  its sanitizers
ci     clang-tidy-19       the linter
ci     clang-format-19     the formatter
ci     spin                tries every order of events of the protocol
bench  libopenmpi-dev      Open MPI: the baseline to compare with
bench  openmpi-bin         mpirun, to start it
bench  python3             runs both in turns and draws the results
fresh  debootstrap         the empty machine of scripts/fresh_machine.sh
'

die() { echo "install_packages.sh: $*" >&2; exit 2; }

if [[ $# -eq 0 ]]; then
  die "name one or more groups: build test ci bench fresh (or --list)"
fi
if [[ $1 == --list ]]; then
  echo "${packages}" | sed '/^$/d'
  exit 0
fi

wanted=()
for group in "$@"; do
  mapfile -t of_group < <(awk -v group="${group}" '$1 == group {print $2}' <<<"${packages}")
  [[ ${#of_group[@]} -gt 0 ]] || die "no group '${group}'; groups: build test ci bench fresh"
  wanted+=("${of_group[@]}")
done

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "Not a Debian or Ubuntu machine: nothing is installed here. Needed are the equivalents of" >&2
  echo "  ${wanted[*]}" >&2
  exit 0
fi

missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "${package}" 2>/dev/null || true)
  [[ ${status} == installed ]] || missing+=("${package}")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

if [[ ${EUID} -ne 0 ]]; then
  echo "Packages are missing. Run this line, then the same command again:" >&2
  echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 2
fi

echo "Installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt_get() { apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@"; }
apt_get update
apt_get install -y --no-install-recommends "${missing[@]}" >/dev/null
