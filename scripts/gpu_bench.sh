#!/usr/bin/env bash
# scripts/gpu_bench.sh [processes] [threads] [gpus] [quick | decode]: builds bench/cuda and measures plan, dispatch
# and combine: with one process a rank on one GPU, under CUDA MPS; with ranks that are threads, so each
# stage is one launch; with one GPU a rank (results of its own folder). By default the first two.
# quick: some shapes only; decode: those of few tokens. PROGRAM: run this one instead of building. Results: $OUT, or results/h200 and
# results/h200-xN. WHERRY_COMMIT names the commit where the machine has the files without the history.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/gpu_common.sh

modes=()
quick=()
for argument in "$@"; do
  case ${argument} in
    processes | threads | gpus) modes+=("${argument}") ;;
    quick | decode) quick=("${argument}") ;;
    *) echo "gpu_bench.sh: '${argument}' is none of processes, threads, gpus, quick, decode" >&2; exit 2 ;;
  esac
done
[ ${#modes[@]} -gt 0 ] || modes=(processes threads)

program=${PROGRAM:-}
if [ -z "${program}" ]; then
  build_targets gpu_bench || { echo "gpu_bench does not build"; exit 1; }
  program=${build}/bin/gpu_bench
fi
status=0
for mode in "${modes[@]}"; do
  started=${SECONDS}
  folder=${out}
  [ "${mode}" != gpus ] || [ -n "${OUT:-}" ] || folder=results/h200-x${gpus}
  mkdir -p "${folder}"
  run=()
  [ "${mode}" != processes ] || run=(with_mps)
  "${run[@]}" timeout "${TIMEOUT:-400}" "${program}" "${folder}/${mode}.json" "${mode}" "${quick[@]}" || status=1
  echo "-- $((SECONDS - started)) s: ${mode}"
done
exit "${status}"
