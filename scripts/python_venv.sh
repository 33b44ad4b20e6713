#!/usr/bin/env bash
# Makes build/venv, the Python of the tests, from tests/requirements.txt; does nothing while that is
# unchanged. Without Python or an index to install from it says so and succeeds: the tests that need
# it then skip and name what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv
stamp=${venv}/requirements.txt
cmp -s tests/requirements.txt "${stamp}" && exit 0

log=$(mktemp)
trap 'rm -f "${log}"' EXIT
echo "Installing Python packages of the tests into ${venv}"
if python3 -m venv --clear "${venv}" >"${log}" 2>&1 &&
   "${venv}/bin/pip" install --quiet --disable-pip-version-check -r tests/requirements.txt \
     >>"${log}" 2>&1; then
  cp tests/requirements.txt "${stamp}"
else
  sed 's/^/  /' "${log}" >&2
  echo "No Python packages for the tests: the comparison with ml_dtypes and NumPy will be skipped." >&2
fi
