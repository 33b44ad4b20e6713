# Sourced by scripts/gpu_test.sh and scripts/gpu_bench.sh: the build, the machine's description and CUDA
# MPS. A machine that has the CUDA toolkit, CMake and a C++20 compiler but none of the libraries takes
# them from build/bundle, which scripts/gpu_bundle.sh fills elsewhere.

build=${BUILD:-build/gpu}
out=${OUT:-results/h200}
mkdir -p "${build}" "${out}"

# Builds `targets` with CMake for the architecture of this machine's GPU.
build_targets() {
  local arguments=(-S . -B "${build}" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DWHERRY_CUDA=ON
                   -DWHERRY_CPU_EXPERTS=OFF -DWHERRY_NUMA=OFF
                   -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES:-90a-real}")
  [ ! -d build/bundle ] || arguments+=(-DCMAKE_PREFIX_PATH="${PWD}/build/bundle/usr")
  if ! cmake "${arguments[@]}" >"${build}/configure.log" 2>&1; then
    cat "${build}/configure.log"
    return 1
  fi
  cmake --build "${build}" --target "$@" -j "${JOBS:-$(nproc)}" >"${build}/build.log" 2>&1 ||
    { grep -E 'error|Error|\*\*\*' "${build}/build.log" | head -30; return 1; }
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

# Prints what every result names: machine, driver, versions, commit.
describe_machine() {
  printf '"machine": "%s", "driver": "%s", "cuda": "%s", "compiler": "%s", "commit": "%s"' \
    "${WHERRY_MACHINE}" "${WHERRY_DRIVER}" "${WHERRY_NVCC}" "${WHERRY_COMPILER}" "${WHERRY_COMMIT}"
}

export CUDA_MODULE_LOADING=EAGER
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc -l)
WHERRY_MACHINE=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1)
WHERRY_DRIVER=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1)
WHERRY_NVCC=$(nvcc --version | sed -n 's/.*release \(.*\),.*/\1/p')
WHERRY_COMPILER=$(c++ --version | head -1)
: "${WHERRY_COMMIT:=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
export WHERRY_MACHINE WHERRY_DRIVER WHERRY_NVCC WHERRY_COMPILER WHERRY_COMMIT
