#!/usr/bin/env bash
# scripts/gpu_spike.sh [build|check|sanitize|soak|launch|processes|time|gpus|all ...]: the CUDA kernels
# against their oracle, and their times (launch: all ranks in one launch; processes: one process a
# rank, under CUDA MPS; time: both; gpus: one process and one GPU a rank). A machine that has the CUDA
# toolkit, CMake and a C++20 compiler but none of the libraries takes them from scripts/gpu_bundle.sh.
# Results go to $OUT, or results/h200.
set -uo pipefail
cd "$(dirname "$0")/.."

build=${BUILD:-/tmp/build-cuda}
out=${OUT:-results/h200}
architectures=${ARCHITECTURES:-90a-real}
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(all)
program=${build}/bin/wherry_gpu
mkdir -p "${build}" "${out}"

build_program() {
  cmake -S . -B "${build}" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DWHERRY_CUDA=ON -DWHERRY_CPU_EXPERTS=OFF \
        -DWHERRY_NUMA=OFF -DCMAKE_PREFIX_PATH="${PWD}/build/bundle/usr" \
        -DCMAKE_CUDA_ARCHITECTURES="${architectures}" >"${build}/configure.log" ||
    { cat "${build}/configure.log"; return 1; }
  cmake --build "${build}" --target wherry_gpu -j "${JOBS:-$(nproc)}"
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
