#!/usr/bin/env bash
# scripts/lint.sh [JOBS] [PATTERN]: clang-tidy 19 on the project's C++ sources, those that match PATTERN
# where one is given. The compile database is that of the clang preset with CUDA, where there is a CUDA
# compiler; kernels (.cu) are not for clang-tidy.
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=${1:-2}
pattern=${2:-.}
command -v clang-tidy-19 >/dev/null ||
  { echo "clang-tidy-19 is missing: scripts/install_packages.sh ci" >&2; exit 2; }
cmake --preset clang -B build/lint -DWHERRY_CUDA=AUTO >/dev/null
mapfile -t sources < <(
  sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' build/lint/compile_commands.json |
    grep -v -e "^${PWD}/build/" -e '\.cu$' | grep -E "${pattern}" | sort -u)
[[ ${#sources[@]} -gt 0 ]] || { echo "lint.sh: no source matches '${pattern}'" >&2; exit 2; }
printf '%s\0' "${sources[@]}" |
  xargs -0 -P "${jobs}" -n 1 clang-tidy-19 --quiet -p build/lint \
    2> >(grep -v 'warnings\? generated' >&2)
