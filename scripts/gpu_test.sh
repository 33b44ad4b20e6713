#!/usr/bin/env bash
# scripts/gpu_test.sh [FILTER]: builds the GPU tests and runs each in a process of its own (those of the
# experts in one), the ranks under CUDA MPS (its ranks as processes are the product's way), then
# `wherry layer` and `wherry bench --device cuda` in some layouts and a small test under compute-sanitizer.
# FILTER: of GoogleTest; with one, only its tests run. PROGRAM: run this one instead of building.
# What passed goes to $OUT or results/h200, tests.json. WHERRY_COMMIT names the commit where the machine
# has the files without the history.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/gpu_common.sh

filter=${1:-*}
asked=$*
started=${SECONDS}
program=${PROGRAM:-}
if [ -z "${program}" ]; then
  build_targets gpu_test wherry_cli || { echo "the GPU tests do not build"; exit 1; }
  echo "-- $((SECONDS - started)) s: build"
  program=$(find "${build}" -name gpu_test -type f -perm -u+x | head -1)
fi

status=0
rows=()
# run NAME command...: one line of the result, and the output where it fails.
run() {
  local name=$1 start=${SECONDS} log passed=true
  shift
  log=$(mktemp)
  if ! "$@" >"${log}" 2>&1; then
    passed=false
    status=1
    grep -vE '^(Note: Google Test filter|\[=|\[-|\[ RUN|\[  PASSED)' "${log}" | tail -"${LINES_OF_FAILURE:-12}" | cut -c-600
  fi
  rm -f "${log}"
  rows+=("{\"test\": \"${name}\", \"passed\": ${passed}, \"seconds\": $((SECONDS - start))}")
  printf '%s %3d s  %s\n' "$([ "${passed}" = true ] && echo ok || echo FAILED)" "$((SECONDS - start))" "${name}"
}

# Also of a run that is cut short.
write_results() {
  {
    printf '{%s, "command": "scripts/gpu_test.sh %s",\n "tests": [\n  ' "$(describe_machine)" "${asked}"
    local first=1 row
    for row in "${rows[@]}"; do
      [ "${first}" = 1 ] || printf ',\n  '
      first=0
      printf '%s' "${row}"
    done
    printf ']}\n'
  } >"${out}/tests.json"
}
trap write_results EXIT

# Passes only if the tool says that it has looked.
sanitized() {
  # So many launches have more barriers than synccheck follows by itself.
  timeout "${TIMEOUT:-120}" compute-sanitizer --tool "$1" --num-cuda-barriers 65536 --error-exitcode 9 "${program}" \
    --gtest_filter='Sanitized.*' 2>&1 | tee "${build}/sanitizer.log"
  [ "${PIPESTATUS[0]}" = 0 ] &&
    grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed' "${build}/sanitizer.log"
}

mapfile -t tests < <("${program}" --gtest_list_tests --gtest_filter="${filter}" |
                     awk '/^[^ ]/ { suite = $1; if (suite ~ /ExpertsOnGpu/) print suite "*"; next }
                          suite !~ /ExpertsOnGpu/ { print suite $1 }')
for test in "${tests[@]}"; do
  run "${test}" with_mps timeout "${TIMEOUT:-120}" "${program}" --gtest_filter="${test}"
done
# A whole layer, experts and all, against the dense reference.
layer() {
  local name=$1
  shift
  [ -x "${build}/bin/wherry" ] || return 0
  run "wherry layer --device cuda, ${name}" with_mps timeout "${TIMEOUT:-120}" "${build}/bin/wherry" layer \
    --device cuda --model deepseek-v3 --expert-hidden 256 --steps 3 "$@"
}
if [ "${filter}" = '*' ]; then
  for layout in grouped tokens slots; do
    layer "4 ranks, ${layout}" --ranks 4 --tokens 64 --layout "${layout}"
  done
  layer "4 threads, 32 replicas, skewed" --ranks 4 --threads --tokens 64 --replicas 32 --skew 1
  layer "e4m3 out" --ranks 2 --tokens 64 --wire e4m3_block128
  layer "8 ranks, 1024 tokens" --ranks 8 --tokens 1024
fi
# Times, of what has been verified in the same run.
measure() {
  local name=$1
  shift
  [ -x "${build}/bin/wherry" ] || return 0
  run "wherry bench --device cuda, ${name}" with_mps timeout "${TIMEOUT:-120}" "${build}/bin/wherry" bench \
    --device cuda --tokens 16 "$@"
}
if [ "${filter}" = '*' ]; then
  # Processes are measured with a GPU each where there are several.
  measure "processes, tokens" --ranks "$((gpus > 1 ? gpus : 4))" --layout tokens
  measure "2 threads, slots, e4m3 out, up to 16 tokens" --ranks 2 --threads --layout slots --wire e4m3_block128 --sweep
fi
if [ "${filter}" = '*' ]; then
  for tool in memcheck racecheck synccheck; do
    run "Sanitized.* under ${tool}" sanitized "${tool}"
  done
fi

echo "-- $((SECONDS - started)) s in all"
exit "${status}"
