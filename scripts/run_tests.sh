#!/usr/bin/env bash
# scripts/run_tests.sh BUILD [ctest arguments...]: runs ctest there, then lists every test that did
# not run and why, leaves their names in BUILD/skipped.txt, and ends with ctest's closing line.
set -uo pipefail

build=$1
shift
output=$(mktemp)
trap 'rm -f "${output}"' EXIT
ctest --test-dir "${build}" --output-on-failure --no-tests=error "$@" | tee "${output}"
result=${PIPESTATUS[0]}

# GoogleTest prints "file:line: Skipped", the reason, then "[  SKIPPED ]"; ctest keeps it in its log.
skipped=$(awk '
  /^[0-9]+\/[0-9]+ Test: / { name = $0; sub(/^[0-9]+\/[0-9]+ Test: /, "", name) }
  /^\[ RUN      \]/ { reason = ""; inside = 0; next }
  /^\[  SKIPPED \] .* \([0-9]+ ms\)$/ {
    print name ": " (reason == "" ? "no reason given" : reason); inside = 0; next
  }
  /: Skipped$/ { inside = 1; next }
  inside && NF { reason = reason (reason == "" ? "" : " ") $0 }
' "${build}/Testing/Temporary/LastTest.log" 2>/dev/null)
not_built=$(cat "${build}/tests/not_built.txt" 2>/dev/null)
all=$(printf '%s\n%s\n' "${skipped}" "${not_built}" | sed '/^$/d' | sort)
sed 's/: .*//; s/ (not built)$//' <<<"${all}" | sed '/^$/d' >"${build}/skipped.txt"

echo
if [[ -n ${all} ]]; then
  echo "Skipped here:"
  sed 's/^/  /' <<<"${all}"
else
  echo "Skipped here: nothing."
fi
if [[ " $* " == *" -LE soak "* ]]; then
  soak=$(ctest --test-dir "${build}" -N -L soak 2>/dev/null | sed -n 's/^Total Tests: //p')
  echo "Left to make test-all: ${soak:-0} tests that run for many minutes."
fi
grep -E '^[0-9]+% tests passed|^No tests were found' "${output}"
exit "${result}"
