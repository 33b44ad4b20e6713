#!/usr/bin/env python3
"""Runs the benchmarks and writes results/cpu/*.json and a picture of them.

The runs of a case take turns, A/B/A/B, for several rounds, so that all see the same moods of the
machine; a ratio is taken within a round, and the median over the rounds counts. Nothing else should
run on the machine meanwhile.

    bench/run.py                       everything, five rounds (about ten minutes)
    bench/run.py --only decode_4 --rounds 1 --out /tmp/results
"""

import argparse
import datetime
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys

import cases
import machine
import picture

ROOT = pathlib.Path(__file__).resolve().parent.parent
MPIRUN = ["mpirun", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]


def command_of(run, build):
    """The command line of a run; it prints one JSON object."""
    flags = [*run.shape.flags(), f"--steps={run.steps}", *run.flags]
    if run.layout is not None:
        return [f"{build}/bin/wherry", "bench", "--json", f"--ranks={run.shape.ranks}",
                f"--layout={run.layout}", *flags]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*MPIRUN, *root, "-n", str(run.shape.ranks), f"{build}/bin/mpi_baseline", *flags]


def execute(run, build):
    command = command_of(run, build)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"bench: {shlex.join(command)} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def quantity(result, path):
    for key in path.split("."):
        result = result[key]
    return result


def median_of(rounds, run, path, of=None):
    """The median over the rounds of a quantity of `run`, divided by that of `of` if given."""
    return statistics.median(
        quantity(results[run], path) / (quantity(results[of], path) if of else 1.0)
        for results in rounds)


def summarise(case, rounds):
    summary = {}
    for run in case.runs:
        fields = ["total_us", "p99.total_us", "plan_us", "dispatch_us", "combine_us"]
        if run.layout is not None:
            fields += ["floor_us", "floor_fraction", "copy_gbps", "involuntary_switches", "bytes",
                       "wire_error"]
        entry = {path.replace("p99.total_us", "p99_us"): median_of(rounds, run.name, path)
                 for path in fields}
        if case.base not in (None, run.name):
            entry["ratio"] = median_of(rounds, run.name, "total_us", case.base)
        summary[run.name] = entry
    return summary


def judge(case, rounds):
    """Every limit of the case with what was measured."""
    judged = []
    for limit in case.limits:
        value = median_of(rounds, limit.run, limit.quantity, limit.of)
        good = ((limit.most is None or value <= limit.most)
                and (limit.least is None or value >= limit.least))
        judged.append({"run": limit.run, "quantity": limit.quantity, "of": limit.of,
                       "most": limit.most, "least": limit.least, "value": value, "holds": good})
    return judged


def sentence(verdict):
    against = f" / {verdict['of']}" if verdict["of"] else ""
    bound = (f"at most {verdict['most']:g}" if verdict["most"] is not None
             else f"at least {verdict['least']:g}")
    mark = "holds " if verdict["holds"] else "MISSED"
    return (f"  {mark} {verdict['run']}{against}: {verdict['quantity']} "
            f"{verdict['value']:.3g}, {bound}")


def measure(case, arguments):
    rounds = []
    for number in range(arguments.rounds):
        rounds.append({})
        for run in case.runs:
            rounds[-1][run.name] = execute(run, arguments.build)
        print(f"  round {number + 1}: " + ", ".join(
            f"{name} {result['total_us'] / 1000:.2f} ms" for name, result in rounds[-1].items()),
            flush=True)
    return rounds


def report(case, rounds, arguments, load):
    about = machine.describe(arguments.build)
    baseline = next((rounds[0][run.name] for run in case.runs if run.layout is None), None)
    if baseline is not None:
        about["mpi"] = baseline["mpi"]
    return {
        "case": case.name,
        "title": case.title,
        "shape": str(case.runs[0].shape),
        "base": case.base,
        "summary": summarise(case, rounds),
        "limits": judge(case, rounds),
        "machine": about,
        "load_before": load,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["bench/run.py", "--only", case.name, "--rounds", str(len(rounds))]),
        "commands": {run.name: shlex.join(command_of(run, "build")) for run in case.runs},
        "rounds": rounds,
    }


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build"), help="the build to measure")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "results" / "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[c.name for c in cases.CASES])
    parser.add_argument("--picture", action="store_true",
                        help="measure nothing: draw the results that are there")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    missed = 0
    for case in [] if arguments.picture else cases.CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        load = os.getloadavg()[0]
        print(f"{case.title}: {case.runs[0].shape}", flush=True)
        rounds = measure(case, arguments)
        result = report(case, rounds, arguments, load)
        path = arguments.out / f"{case.name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print("\n".join(sentence(verdict) for verdict in result["limits"]), flush=True)
        missed += sum(not verdict["holds"] for verdict in result["limits"])
    drawn = picture.draw(arguments.out, [case.name for case in cases.CASES])
    print(f"Results in {arguments.out}" + (f", picture {drawn}" if drawn else ""))
    if missed:
        print(f"{missed} limits were missed; is the machine quiet? (load {os.getloadavg()[0]:.2f})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
