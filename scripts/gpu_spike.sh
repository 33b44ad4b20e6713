#!/usr/bin/env bash
# scripts/gpu_spike.sh [build|check|sanitize|soak|launch|processes|time|gpus|all ...]: the CUDA kernels
# against their oracle, and their times (launch: all ranks in one launch; processes: one process a
# rank, under CUDA MPS; time: both; gpus: one process and one GPU a rank), with what a bare CUDA machine has: nvcc and a C++20 compiler.
# Results go to $OUT, or results/h200.
set -uo pipefail
cd "$(dirname "$0")/.."

build=${BUILD:-/tmp/build-cuda}
out=${OUT:-results/h200}
architectures=${ARCHITECTURES:-90a}
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(all)
program=${build}/wherry_gpu
mkdir -p "${build}" "${out}"

gencode=()
for architecture in ${architectures}; do
  gencode+=(-gencode "arch=compute_${architecture},code=sm_${architecture}")
done
flags=(-std=c++20 -O3 --fmad=false -lineinfo -Xcompiler=-Wall,-Wextra,-ffp-contract=off
       -Isrc -Iinclude "${gencode[@]}")
sources=(src/kernels/cuda/{count,plan_dispatch,dispatch_send,dispatch_recv,combine_send,combine_recv}.cu
         bench/cuda/{cluster,cluster_checks,check,soak,time,main}.cu)

build_program() {
  local objects=() failed=0 source object jobs=()
  for source in "${sources[@]}"; do
    object=${build}/$(basename "${source}" .cu).o
    objects+=("${object}")
    if [ "${SERIAL:-0}" = 1 ]; then
      nice nvcc "${flags[@]}" -c "${source}" -o "${object}" || failed=1
    else
      nvcc "${flags[@]}" -c "${source}" -o "${object}" &
      jobs+=($!)
    fi
  done
  for job in "${jobs[@]}"; do wait "${job}" || failed=1; done
  [ "${failed}" = 0 ] && nvcc "${gencode[@]}" "${objects[@]}" -o "${program}"
}

# Runs a command with an MPS daemon of its own, in a fresh folder: a killed rank can spoil one.
with_mps() {
  local folder
  folder=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=${folder}/pipe CUDA_MPS_LOG_DIRECTORY=${folder}/log
  mkdir -p "${CUDA_MPS_PIPE_DIRECTORY}" "${CUDA_MPS_LOG_DIRECTORY}"
  nvidia-cuda-mps-control -d || return 1
  "$@"
  local status=$?
  echo quit | nvidia-cuda-mps-control >/dev/null
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  rm -rf "${folder}"
  return "${status}"
}

export CUDA_MODULE_LOADING=EAGER
if command -v nvidia-smi >/dev/null; then
  WHERRY_MACHINE=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
  WHERRY_DRIVER=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
fi
WHERRY_NVCC=$(nvcc --version | sed -n 's/.*release \(.*\),.*/\1/p')
: "${WHERRY_COMMIT:=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
export WHERRY_MACHINE WHERRY_DRIVER WHERRY_NVCC WHERRY_COMMIT

status=0
step() {
  local started=${SECONDS}
  "$@" || { status=1; echo "FAILED: $*"; }
  echo "-- $((SECONDS - started)) s: $*"
}
wanted() { [[ " ${steps[*]} " == *" $1 "* || " ${steps[*]} " == *" all "* ]]; }

wanted build && { step build_program; [ "${status}" = 0 ] || exit 1; }
wanted check && step timeout 150 "${program}" check
if wanted sanitize; then
  for tool in memcheck racecheck synccheck; do
    step timeout 120 compute-sanitizer --tool "${tool}" --error-exitcode 9 "${program}" sanitize
  done
fi
wanted soak && step with_mps timeout 200 "${program}" soak "${SOAK_STEPS:-1000}"
{ wanted time || wanted launch; } && step timeout 200 "${program}" time "${out}/one_launch.json" launch
[[ " ${steps[*]} " == *" gpus "* ]] && step timeout 200 "${program}" time "${out}/gpus.json" gpus
{ wanted time || wanted processes; } && step with_mps timeout 200 "${program}" time "${out}/processes.json" processes
exit "${status}"
