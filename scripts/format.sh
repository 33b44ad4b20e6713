#!/usr/bin/env bash
# clang-format 19 on every source git knows or would add; with --check it changes nothing and fails
# where something differs.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=(-i)
[[ ${1:-} != --check ]] || mode=(--dry-run -Werror)
command -v clang-format-19 >/dev/null ||
  { echo "clang-format-19 is missing: scripts/install_packages.sh ci" >&2; exit 2; }
git ls-files -z --cached --others --exclude-standard --deduplicate \
    '*.hpp' '*.cpp' '*.cu' '*.cuh' '*.inc' |
  while IFS= read -r -d '' file; do [[ ! -f ${file} ]] || printf '%s\0' "${file}"; done |
  xargs -0 -r clang-format-19 "${mode[@]}"
