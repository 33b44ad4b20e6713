#!/usr/bin/env bash
# scripts/cuda_toolkit.sh: prints the path of an nvcc that Wherry can be built with: the one on PATH, or
# one that it installs from PyPI into build/cuda-toolkit. With it come, from PyPI too unless they lie beside
# that nvcc, the headers of cuBLAS (1 GB in all, since its libraries come along; needs no GPU and no root).
# Where nothing is to be had it says so on stderr and prints nothing: the build then goes without CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

compiler=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
          nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)
cublas=(nvidia-cublas==13.1.0.3)
folder=build/cuda-toolkit
toolkit=${PWD}/${folder}/nvidia/cu13

packages=()
if nvcc=$(command -v nvcc); then
  # A wrapper on PATH tells where the toolkit is only when it is asked.
  beside=$(nvcc --dryrun x.cu 2>&1 | sed -n 's/^#\$ TOP=//p')
  [ -e "${beside}/include/cublas_v2.h" ] || packages=("${cublas[@]}")
else
  nvcc=${toolkit}/bin/nvcc
  packages=("${compiler[@]}" "${cublas[@]}")
fi

if [ ${#packages[@]} -gt 0 ] && [ "$(cat "${folder}/packages.txt" 2>/dev/null)" != "${packages[*]}" ]; then
  rm -rf "${folder}"
  log=$(mktemp)
  trap 'rm -f "${log}"' EXIT
  if ! python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "${folder}" \
         "${packages[@]}" >"${log}" 2>&1; then
    sed 's/^/  /' "${log}" >&2
    if [ ${#packages[@]} -gt 1 ]; then
      echo "No CUDA compiler on PATH, and none could be installed from PyPI." >&2
      exit 0
    fi
    echo "cuBLAS could not be installed from PyPI: the experts on GPUs are not built." >&2
    echo "${nvcc}"
    exit 0
  fi
  echo "${packages[*]}" >"${folder}/packages.txt"
fi
# Python packages carry no links; a linker looks for lib64, CMake for libcudart.so.
if [ -d "${toolkit}/bin" ]; then
  [ -e "${toolkit}/lib64" ] || ln -s lib "${toolkit}/lib64"
  [ -e "${toolkit}/lib/libcudart.so" ] || ln -s libcudart.so.13 "${toolkit}/lib/libcudart.so"
fi
echo "${nvcc}"
