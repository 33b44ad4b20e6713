#!/usr/bin/env bash
# Checks docs/protocol/exchange.pml with spin: every order of events of each run below, and that each
# mistake is found. docs/protocol.md says what that proves.
#
#   scripts/check_model.sh          all runs: some three minutes, one core, less than 2 GB
#   scripts/check_model.sh WORD     the runs whose line has WORD in it; of a run that fails, the events
set -euo pipefail
cd "$(dirname "$0")/.."

# What must hold: ranks, depth, the rest.
proofs='
2 1 PLANS UNPAIRED HALVES
2 1 PLANS UNPAIRED HALVES PUSH
2 2 UNPAIRED HALVES
2 2 UNPAIRED HALVES PUSH
2 2 PLANS HALVES
3 1 PLANS
3 1 UNPAIRED HALVES
3 1 UNPAIRED HALVES PUSH
3 2 UNPAIRED
3 2 HALVES
3 2 HALVES PUSH
2 2 DEATH HALVES
3 1 DEATH HALVES
3 1 DEATH HALVES PUSH
3 1 DEATH ENDS
4 1 DEATH PLANS ONLY_PLANS
'
# What must fail: a mistake each, in the smallest run that shows it.
mistakes='
2 1 HALVES REUSE_EARLY
2 1 UNPAIRED NO_CREDIT
2 1 PLANS ONLY_PLANS ONE_COUNT_GENERATION
2 1 SIGNAL_FIRST
2 1 RETURN_EARLY
2 1 ANY_EPOCH
2 1 EXPERTS_LATE
2 1 RESULTS_EARLY
2 2 HALVES OTHER_ORDER
4 1 DEATH PLANS ONLY_PLANS KEEP_QUIET
'

command -v spin >/dev/null || { echo "spin is missing: scripts/install_packages.sh ci" >&2; exit 2; }
word=${1:-}
model=${PWD}/docs/protocol/exchange.pml
folder=$(mktemp -d)
trap 'rm -rf "${folder}"' EXIT
cp "${model}" "${folder}"
cd "${folder}"

# check "ranks depth flag..." WHAT_MUST_BE: leaves its outcome in `result` and pan's words in pan.txt.
check() {
  local ranks depth flags options=(-DSAFETY) search=()
  read -r ranks depth flags <<<"$1"
  defines=("-DRANKS=${ranks}" "-DDEPTH=${depth}")
  for flag in ${flags}; do defines+=("-D${flag}"); done
  if [[ " ${flags} " == *" ENDS "* ]]; then
    options=(-DNOFAIR)
    search=(-a)
  fi
  if [[ $2 == fails ]]; then  # look for what is read wrong, which says more than ranks that wait
    defines+=(-DMISTAKE)
    search=(-E)
    options+=(-DBFS)  # the shortest way there
  fi
  rm -f exchange.pml.trail
  spin -a "${defines[@]}" exchange.pml >spin.txt || { cat spin.txt; return 1; }
  gcc -O2 -w -DCOLLAPSE -DMEMLIM=1900 "${options[@]}" -o pan pan.c
  ./pan -n -m6000000 "${search[@]}" >pan.txt 2>&1 || true
  result=$(awk '
    /errors: 0$/ { good = 1 }
    /errors: [1-9]/ { bad = 1 }
    /states, stored/ { states = $1 }
    /^pan: elapsed time/ { seconds = $4 }
    /Search not completed|search depth too small/ { short = 1 }
    /^pan:1: .*rows\[/ { why = "rows of another step are read" }
    /^pan:1: .*results\[/ { why = "results of another step are read" }
    /^pan:1: .*counts\[/ { why = "counts of another plan are read" }
    /^pan:1: .*fault\[/ { why = "a survivor is blamed" }
    /^pan:1: .*untaken\[/ { why = "a signal comes before the last was waited for" }
    /^pan:1: .*todo\[/ { why = "ranks are further apart than thought" }
    /^pan:1: invalid end state/ { why = "ranks wait for ever" }
    /^pan:1: acceptance cycle/ { why = "a rank goes on for ever" }
    END {
      print (bad ? "fails" : good && !short ? "holds" : "unfinished"), states, seconds, why
    }' pan.txt)
}

broken=0
# row "what must be" "ranks depth flag..."
row() {
  local outcome states seconds why
  check "$2" "$1"
  read -r outcome states seconds why <<<"${result}"
  printf '%-44s %-6s %10s states %6s s  %s\n' "$2" "${outcome}" "${states}" "${seconds}" "${why}"
  if [[ -n ${word} && ${outcome} == fails ]]; then
    spin -t "${defines[@]}" exchange.pml | sed '/^#processes/,$d' || true
  fi
  if [[ ${outcome} != "$1" ]]; then
    printf '%s: it %s, and must be: %s\n' "$2" "${outcome}" "$1" >&2
    broken=1
  fi
}

echo "ranks, depth, what the program does"
while read -r run; do
  [[ -z ${run} || ${run} != *"${word}"* ]] || row holds "${run}"
done <<<"${proofs}"
echo "with a mistake in it"
while read -r run; do
  [[ -z ${run} || ${run} != *"${word}"* ]] || row fails "${run}"
done <<<"${mistakes}"
exit "${broken}"
