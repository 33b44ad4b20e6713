#!/usr/bin/env bash
# scripts/gpu_bundle.sh: copies the libraries that Wherry is built with, as Debian installs them, into
# build/bundle. A machine with a GPU, the CUDA toolkit, CMake and a C++20 compiler but without those
# libraries and without a network can then build the tree that it is given together with that folder;
# scripts/gpu_test.sh and scripts/gpu_bench.sh look there.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(libfmt-dev libfmt9 libhwy-dev libhwy1 libcli11-dev nlohmann-json3-dev libgtest-dev libgmock-dev)
bundle=build/bundle
rm -rf "${bundle}"
mkdir -p "${bundle}"
for package in "${packages[@]}"; do
  dpkg -L "${package}" | grep -E '^/usr/(include|lib|share/cmake)/' |
    tar -C / -cf - --no-recursion -T - 2>/dev/null | tar -C "${bundle}" -xf -
  dpkg-query -W -f='${Package} ${Version}\n' "${package}" >>"${bundle}/packages.txt"
done
du -sh "${bundle}"
