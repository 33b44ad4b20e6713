#!/usr/bin/env python3
"""Breaks the source on purpose, one rule at a time, and requires that a test notices.

A mutant is a text that must occur exactly once in a file, what replaces it, and the test program
that must fail with it. The mutated tree is a copy in BUILD/mutants; the source stays untouched.

usage: tests/mutants.py [NAME ...]     all mutants, or those named
"""
import pathlib
import shutil
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    breaks: str  # the rule it breaks
    file: str
    old: str
    new: str
    killed_by: str


MUTANTS = [
    Mutant("early_generation", "a generation is reused while its last step is in flight",
           "src/exchange/exchange.cpp", "window.bases(), rank, size, generation};",
           "window.bases(), rank, size, generation * 0};", "exchange_test"),
    Mutant("no_credit", "an unpaired dispatch's rows are freed without asking their reader",
           "src/exchange/exchange.cpp", "window.wait_all({Channel::credit,",
           "if (false) window.wait_all({Channel::credit,", "reuse_test"),
    Mutant("one_count_generation", "counts of the next plan overwrite those being read",
           "src/exchange/plan.cpp", "serial % layout::kCountGenerations,", "serial * 0,", "reuse_test"),
    Mutant("early_epoch", "a wait ends one step too early",
           "src/exchange/window.cpp", "return layout::signal_epoch(seen) >= signal.epoch;",
           "return layout::signal_epoch(seen) + 1 >= signal.epoch;", "reuse_test"),
    Mutant("blame_the_nearest", "a survivor blames whom it waits for, not who holds all up",
           "src/exchange/window.cpp", "peer_died ? peer : root_of(peer);", "peer;", "fault_test"),
    Mutant("keep_quiet", "whoever learns of a fault tells all before it throws",
           "src/exchange/window.cpp", "  tell_all(word);\n  throw", "  throw", "faults_test"),
    Mutant("one_row_too_many", "rows past the capacity are dropped",
           "src/plan/assign.cpp", "if (place < segment.kept) {", "if (place <= segment.kept) {",
           "plan_properties_test"),
    Mutant("unaligned", "a segment starts on a multiple of the alignment",
           "src/plan/assign.cpp", "begin += (s.kept + alignment - 1) / alignment * alignment;",
           "begin += s.kept + alignment - 1;", "plan_properties_test"),
    Mutant("reversed_sum", "by_token sums in k order",
           "src/kernels/reference/sum_rows.hpp", "(sum.rows[i])[h]", "(sum.rows[sum.count - 1 - i])[h]",
           "exchange_test"),
    Mutant("unfused", "multiply and add are fused",
           "src/kernels/reference/sum_rows.hpp", "std::fma(static_cast<Sum>(sum.weights[i]), value(i), acc)",
           "static_cast<Sum>(sum.weights[i]) * value(i) + acc", "exchange_test"),
    Mutant("repeated_row", "the same slot twice in a token makes one row",
           "src/plan/count.cpp", "plan.repeat[at] = 1;", "plan.repeat[at] = 0;", "exchange_test"),
    Mutant("dirty_padding", "padding rows are zero",
           "src/kernels/reference/dispatch_recv.cpp", "case Layout::grouped: zero_padding(a); return;",
           "case Layout::grouped: if (a.topk < 0) zero_padding(a); return;", "exchange_test"),
    Mutant("truncated_bf16", "bf16 rounds to nearest even",
           "src/kernels/numerics.hpp", "(bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16", "bits >> 16",
           "exchange_test"),
    Mutant("half_up_8_bits", "8-bit floats round ties to even",
           "src/kernels/numerics_low.hpp", "((magnitude >> kDropped) & 1U)", "1U", "format_test"),
    Mutant("floor_scale", "a power-of-two scale is rounded up, so that nothing clips",
           "src/kernels/numerics_low.hpp", "(bits + 0x7FFFFFU) >> 23", "bits >> 23", "format_test"),
    Mutant("reciprocal_division", "x / scale rounds as a division does",
           "src/kernels/cpu/convert-inl.hpp", "divided(v, divisor, by)",
           "hn::MulAdd(divisor, hn::Zero(d), hn::Mul(v, by))", "convert_test"),
    Mutant("strayed_scales", "every row that travels quantised has its own scales",
           "src/kernels/send_rows.hpp", "(l.row_capacity), row, source.scales()",
           "(l.row_capacity), 0, source.scales()", "wires_test"),
    Mutant("unseen_switch", "a rank that did not switch its placement is noticed",
           "src/exchange/plan.cpp", "header.placement == first_placement,",
           "header.placement == first_placement || peer > 0,", "switch_test"),
    Mutant("own_replica", "ranks that hold the same tokens agree on the replica of each",
           "src/plan/count.cpp", "placement.slot_for(static_cast<int>(id), token, source);",
           "placement.slot_for(static_cast<int>(id), token, rank);", "replicated_test"),
    Mutant("unlike_routings", "ranks that hold the same tokens must bring the same routing",
           "src/exchange/plan.cpp", "header.id == first_of_set.id,", "true,", "replicated_test"),
    Mutant("lost_scalars", "a rank learns from its peers whether scalars came along",
           "src/exchange/dispatch.cpp", "g.has_scalars = with >= 0;",
           "g.has_scalars = with == rank;", "exchange_test"),
    Mutant("survivors_alone", "a subgroup meets at a place of its own",
           "src/group/group.cpp", "state_->meeting, list, count));", "state_->meeting, count, count));",
           "subgroup_test"),
]

ROOT = pathlib.Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "mutants" / "tree"
BUILD = ROOT / "build" / "mutants" / "build"
COPIED = ["CMakeLists.txt", "CMakePresets.json", "cmake", "include", "src", "tests", "cli"]


def run(*command: str) -> int:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def build(test: str) -> bool:
    return run("cmake", "--build", str(BUILD), "--target", test) == 0


def copy_tree() -> None:
    TREE.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, TREE / name, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy2(source, TREE / name)


def passes(test: str) -> bool:
    return run(str(BUILD / "tests" / test), "--gtest_brief=1") == 0


def verdict(mutant: Mutant) -> str:
    path = TREE / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return f"its text occurs {original.count(mutant.old)} times in {mutant.file}, not once"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        if not build(mutant.killed_by):
            return "it does not compile"
        return f"{mutant.killed_by} did not notice" if passes(mutant.killed_by) else ""
    finally:
        path.write_text(original)


def main() -> int:
    wanted = sys.argv[1:] or [m.name for m in MUTANTS]
    unknown = set(wanted) - {m.name for m in MUTANTS}
    if unknown:
        print(f"no mutant is named {', '.join(sorted(unknown))}; there are: {', '.join(m.name for m in MUTANTS)}")
        return 2
    chosen = [m for m in MUTANTS if m.name in wanted]
    copy_tree()
    configure = ["cmake", "-S", str(TREE), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                 "-DWHERRY_CUDA=OFF", "-DCMAKE_CXX_FLAGS=-O1"]
    if run(*configure) != 0:
        print("the copy of the tree does not configure:", " ".join(configure))
        return 1
    for test in sorted({m.killed_by for m in chosen}):
        if not build(test) or not passes(test):
            print(f"{test} does not pass before anything is broken")
            return 1
    survivors = 0
    for mutant in chosen:
        problem = verdict(mutant)
        survivors += bool(problem)
        print(f"{'SURVIVED' if problem else 'killed  '}  {mutant.name}: {mutant.breaks}"
              f"{'; ' + problem if problem else ' (' + mutant.killed_by + ')'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
