#!/usr/bin/env bash
# scripts/lint.sh [JOBS] [PATTERN]: clang-tidy 19 on the project's sources in the compile database
# of the clang preset, those that match PATTERN where one is given.
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=${1:-2}
pattern=${2:-.}
command -v clang-tidy-19 >/dev/null ||
  { echo "clang-tidy-19 is missing: scripts/install_packages.sh ci" >&2; exit 2; }
cmake --preset clang >/dev/null
mapfile -t sources < <(
  sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' build/clang/compile_commands.json |
    grep -v "^${PWD}/build/" | grep -E "${pattern}" | sort -u)
[[ ${#sources[@]} -gt 0 ]] || { echo "lint.sh: no source matches '${pattern}'" >&2; exit 2; }
printf '%s\0' "${sources[@]}" |
  xargs -0 -P "${jobs}" -n 1 clang-tidy-19 --quiet -p build/clang \
    2> >(grep -v 'warnings\? generated' >&2)
