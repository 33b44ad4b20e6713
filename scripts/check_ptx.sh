#!/usr/bin/env bash
# scripts/check_ptx.sh [NVCC]: compiles the CUDA kernels to PTX and reads the memory-order rules of
# docs/design.md section 5 in it. One GPU does not show a scope that is too small or a copy that is
# signalled before it is written; this does. Needs nvcc, no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc=${1:-nvcc}
folder=$(mktemp -d)
trap 'rm -rf "${folder}"' EXIT
failures=0
fail() { echo "check_ptx: $*" >&2; failures=$((failures + 1)); }

kernels=(count plan_dispatch dispatch_send dispatch_send_e4m3 dispatch_send_converted dispatch_recv
         combine_send combine_send_converted combine_recv combine_recv_bulk combine_recv_converted
         combine_partials copy_rows
         convert_rows scalars tell)
for name in "${kernels[@]}"; do
  "${nvcc}" -std=c++20 -O3 --fmad=false -Isrc -Iinclude -arch=compute_90a -ptx \
    "src/kernels/cuda/${name}.cu" -o "${folder}/${name}.ptx"
done

# One file for each entry function: kernel.ptx of `.entry kernel(...)`; and one for each function that they call.
for name in "${kernels[@]}"; do
  awk -v prefix="${folder}/${name}" '
    /\.entry / { n++; out = prefix "." n ".entry" }
    /^\.func .*\($/ { n++; out = prefix "." n ".func" }
    out { print > out }' "${folder}/${name}.ptx"
done

# has FILE PATTERN WHAT / hasnt FILE PATTERN WHAT
has() { grep -qE "$2" "$1" || fail "$(basename "$1"): no $3"; }
hasnt() {
  if grep -nE "$2" "$1" >&2; then fail "$(basename "$1"): $3"; fi
}
# An arrival is an inc that orders. (The counter of items orders nothing and has no end.)
arrivals_order() {
  if grep -vE 'global\.inc.*, 0xFFFFFFFE;' "$1" | grep -nE '(red|atom)\.relaxed\.[a-z]+\.global\.inc' >&2; then
    fail "$(basename "$1"): an arrival that orders nothing"
  fi
}
signals='st\.relaxed\.sys\.global\.u64'
# Line of the first or last match.
first() { { grep -nE "$2" "$1" || true; } | head -1 | cut -d: -f1; }
last() { { grep -nE "$2" "$1" || true; } | tail -1 | cut -d: -f1; }

for file in "${folder}"/*.{entry,func}; do
  hasnt "${file}" 'ld\.global(\.[a-z0-9:_]+)*\.nc' "a non-coherent load; peers write what kernels read"
  hasnt "${file}" '(ld\.(acquire|relaxed)|st\.(release|relaxed))\.(gpu|cta|cluster)' "a signal or a word whose scope is smaller than the system"
  hasnt "${file}" 'fence\.(acq_rel|sc)\.(gpu|cta|cluster)' "a fence whose scope is smaller than the system"
  arrivals_order "${file}"
done
entries=0
for file in "${folder}"/*.entry; do
  entries=$((entries + 1))

  # A signal is st.relaxed.sys of one word. (Counts are st.relaxed.sys.v2: they carry their epoch.)
  if grep -q "${signals}" "${file}"; then
    # The last block: arrival, fence, signal, in this order.
    arrival=$(first "${file}" 'atom\.acq_rel\.gpu\.global\.inc')
    signal=$(first "${file}" "${signals}")
    fence=$(last <(head -"${signal}" "${file}") 'fence\.acq_rel\.sys')
    case ${file} in
      */combine_send.* | */combine_recv.* | */combine_recv_bulk.* | */combine_recv_converted.* | */tell.*) ;;  # one block, or what earlier kernels have written
      *) [ -n "${arrival}" ] || fail "$(basename "${file}"): signals without an arrival counter (atom.acq_rel.gpu)" ;;
    esac
    [ -n "${fence}" ] || fail "$(basename "${file}"): signals without fence.acq_rel.sys before it"
    case ${file} in
      */combine_send.* | */combine_recv.* | */combine_recv_bulk.* | */combine_recv_converted.* | */tell.*) ;;  # its signal says that earlier kernels have finished
      *) [ "${arrival:-999999}" -lt "${fence:-0}" ] || fail "$(basename "${file}"): fences before all blocks arrived" ;;
    esac
  fi
  if grep -q 'cp\.async\.bulk\.global\.shared' "${file}"; then
    has "${file}" 'cp\.async\.bulk\.commit_group' "commit_group after bulk stores"
    written=$(last "${file}" 'cp\.async\.bulk\.wait_group[[:space:]]+0')
    arrival=$(first "${file}" 'atom\.acq_rel\.gpu\.global\.inc')
    [ -n "${written}" ] || fail "$(basename "${file}"): bulk stores are never waited for (only .read)"
    [ "${written:-999999}" -lt "${arrival}" ] || fail "$(basename "${file}"): arrives before its bulk stores are written"
  fi
done
for file in "${folder}"/{dispatch_send,dispatch_send_e4m3,dispatch_send_converted,dispatch_recv,combine_recv,combine_recv_bulk,combine_recv_converted,combine_partials,plan_dispatch,tell}.*.entry; do
  has "${file}" 'ld\.acquire\.sys' "acquiring wait (ld.acquire.sys)"
done
# What peers have written is bulk-loaded only behind the fence between the two proxies.
for file in "${folder}"/combine_recv_bulk.*.entry; do
  fence=$(first "${file}" 'fence\.proxy\.async;')
  [ "$(first "${file}" 'ld\.acquire\.sys')" -lt "${fence:-0}" ] ||
    fail "$(basename "${file}"): no fence.proxy.async after the wait"
  [ "${fence:-999999}" -lt "$(first "${file}" 'cp\.async\.bulk\.shared')" ] ||
    fail "$(basename "${file}"): bulk loads before fence.proxy.async"
done
# A kernel that may begin early waits for the ones before it ahead of everything that they write.
for file in "${folder}"/{dispatch_send,dispatch_send_e4m3,dispatch_send_converted,combine_send,combine_recv,combine_recv_bulk,combine_partials}.*.entry; do
  [ "$(first "${file}" 'griddepcontrol\.wait')" -lt "$(first "${file}" 'ld\.(relaxed|acquire)\.sys')" ] ||
    fail "$(basename "${file}"): reads before griddepcontrol.wait"
done
for file in "${folder}"/{dispatch_send,dispatch_send_e4m3,dispatch_send_converted,combine_send,combine_send_converted,combine_partials,plan_dispatch,tell}.*.entry; do
  has "${file}" "${signals}" "signal (st.relaxed.sys after a fence)"
done
# A part of a signal is red.relaxed.sys.add of one word; every block fences before it adds its own.
parts='red\.relaxed\.sys\.global\.add\.u64'
for file in "${folder}"/*.entry; do
  grep -qE '(red|atom)\.[a-z.]*global\.add\.u64' "${file}" || continue
  has "${file}" "${parts}" "part of a signal of the system's scope"
  # Nothing but addresses and counts between the fence and the addition: no label, so no other way in.
  awk -v parts="${parts}" '/fence\.acq_rel\.sys/ { fenced = 1 } /^\$L/ { fenced = 0 }
    $0 ~ parts { if (!fenced) bad = 1 } END { exit bad }' "${file}" ||
    fail "$(basename "${file}"): adds to a signal without a fence before it"
  written=$(last "${file}" 'cp\.async\.bulk\.wait_group[[:space:]]+0')
  [ "${written:-0}" -lt "$(first "${file}" "${parts}")" ] ||
    fail "$(basename "${file}"): adds to a signal before its bulk stores are written"
done
for file in "${folder}"/plan_dispatch.*.entry; do
  has "${file}" "${parts}" "part of a signal (red.relaxed.sys.add after a fence)"
done
for file in "${folder}"/{count,plan_dispatch}.*.entry; do
  grep -qE '(ld|st)\.relaxed\.sys\.global\.v2\.u64' "${file}" ||
    fail "$(basename "${file}"): counts do not travel in words of the system's scope"
  hasnt "${file}" '(ld|st)\.relaxed\.sys\.global\.v[24]\.(u32|b32|u16)' "words that are not whole"
done

[ "${entries}" -ge 32 ] || fail "found ${entries} kernels only"
[ "${failures}" = 0 ] || exit 1
echo "check_ptx: ${entries} kernels keep the memory-order rules"
