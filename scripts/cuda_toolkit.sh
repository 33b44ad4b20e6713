#!/usr/bin/env bash
# scripts/cuda_toolkit.sh: prints the path of an nvcc that Wherry can be built with: the one on PATH, or
# one that it installs from PyPI into build/cuda-toolkit (1 GB with cuBLAS; needs no GPU and no root). Where neither
# is to be had it says so on stderr and prints nothing: the build then goes without CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
          nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.1.0.3)
folder=build/cuda-toolkit
toolkit=${PWD}/${folder}/nvidia/cu13

if command -v nvcc; then exit 0; fi
if [ "$(cat "${folder}/packages.txt" 2>/dev/null)" != "${packages[*]}" ]; then
  rm -rf "${folder}"
  log=$(mktemp)
  trap 'rm -f "${log}"' EXIT
  if ! python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "${folder}" \
         "${packages[@]}" >"${log}" 2>&1; then
    sed 's/^/  /' "${log}" >&2
    echo "No CUDA compiler on PATH, and none could be installed from PyPI." >&2
    exit 0
  fi
  echo "${packages[*]}" >"${folder}/packages.txt"
fi
# Python packages carry no links, and a linker looks for lib64.
[ -e "${toolkit}/lib64" ] || ln -s lib "${toolkit}/lib64"
echo "${toolkit}/bin/nvcc"
