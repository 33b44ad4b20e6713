#!/usr/bin/env python3
"""Writes the tables of measured numbers in README.md and docs/ from results/, so that no figure is
typed by hand, and the code from examples/, so that all of it compiles. A table stands between two markers:

    <!-- measured: NAME -->
    <!-- /measured -->

And the code between `// [snippet NAME]` and `// [end]` of examples/*.cpp, which tests run, between

    <!-- snippet: NAME -->
    <!-- /snippet -->

    scripts/readme_tables.py            rewrite what differs
    scripts/readme_tables.py --check    change nothing; exit 1 and say what differs
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"(<!-- measured: (?P<name>[\w-]+) -->\n)(?P<table>.*?)(<!-- /measured -->)",
                   re.DOTALL)
SNIPPET = re.compile(r"(<!-- snippet: (?P<name>[\w-]+) -->\n)(?P<code>.*?)(<!-- /snippet -->)",
                     re.DOTALL)
CODE = re.compile(r"^ *// \[snippet (?P<name>[\w-]+)\]\n(?P<code>.*?)^ *// \[end\]$",
                  re.DOTALL | re.MULTILINE)
CPU_CASES = ["prefill_2", "prefill_4", "prefill_8", "decode_4"]
NOTHING = "Nothing is measured yet; `make bench` does.\n"


def load(names):
    paths = [RESULTS / "cpu" / f"{name}.json" for name in names]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def table(titles, rows):
    """Markdown; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "--:|" * (len(titles) - 1)]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


def ms(microseconds):
    value = microseconds / 1000
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def footnote(results):
    about = results[0]["machine"]
    commits = sorted({result["machine"]["commit"] for result in results})
    dates = sorted({result["date"][:10] for result in results})
    return (f"\n{about['cores']} cores of {about['cpu']}, {about['memory_gb']:g} GB, "
            f"Linux {about['kernel']}, {about['compiler']}, {about.get('mpi', '')}; "
            f"commit {', '.join(commits)}, {', '.join(dates)}; `make bench`.\n")


def cpu_ratio():
    """Wherry against the stronger MPI variant: the table of the README."""
    results = load(CPU_CASES)
    if not results:
        return NOTHING
    rows = []
    for result in results:
        summary = result["summary"]
        for run, entry in summary.items():
            if "floor_fraction" not in entry:
                continue
            rows.append([f"{result['shape']}, `{run}`", ms(entry["total_us"]),
                         ms(summary[result["base"]]["total_us"]), f"**{entry['ratio']:.2f}×**",
                         f"{100 * entry['floor_fraction']:.0f} %"])
    return table(["ranks as processes", "Wherry", "MPI", "ratio", "of the floor"],
                 rows) + footnote(results)


def cpu_stages():
    """Where the time goes, stage by stage."""
    results = load([*CPU_CASES, "more_ranks_than_cores", "decode_8"])
    if not results:
        return NOTHING
    rows = []
    for result in results:
        for run, entry in result["summary"].items():
            switches = entry.get("involuntary_switches")
            floor = entry.get("floor_us")
            rows.append([f"{result['title']}: {run}", ms(entry["plan_us"]),
                         ms(entry["dispatch_us"]), ms(entry["combine_us"]), ms(entry["total_us"]),
                         ms(entry["p99_us"]), ms(floor) if floor is not None else "",
                         f"{switches:.2f}" if switches is not None else ""])
    return table(["", "plan", "dispatch", "combine", "total", "p99", "floor", "switches"],
                 rows) + footnote(results)


def cpu_limits():
    """What must hold, and what was measured."""
    results = load([*CPU_CASES, "formats_4", "more_ranks_than_cores", "decode_8"])
    if not results:
        return NOTHING
    rows = []
    for result in results:
        for limit in result["limits"]:
            against = f" / {limit['of']}" if limit["of"] else ""
            bound = (f"≤ {limit['most']:g}" if limit["most"] is not None
                     else f"≥ {limit['least']:g}")
            rows.append([f"{result['title']}: {limit['run']}{against}, `{limit['quantity']}`", bound,
                         f"{limit['value']:.3g}", "yes" if limit["holds"] else "**no**"])
    return table(["", "limit", "measured", "holds"], rows) + footnote(results)


def cpu_formats():
    """The same step with other number formats on the way to the experts."""
    results = load(["formats_4"])
    if not results:
        return NOTHING
    rows = []
    for wire, entry in results[0]["summary"].items():
        rows.append([f"`{wire}`", f"{entry['bytes'] / 1e6:.0f} MB", ms(entry["dispatch_us"]),
                     ms(entry["combine_us"]), f"{100 * entry['wire_error']:.1f} %"])
    head = f"{results[0]['shape']}, `grouped`"
    return table([head, "rows, out and home", "dispatch", "combine", "error"],
                 rows) + footnote(results)


def gpu(folder, name):
    path = RESULTS / folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def gpu_footnote(results, folder, names):
    first = results[0]
    rates = sorted({entry["copy_gbps"] for result in results for entry in result["results"]
                    if "copy_gbps" in entry})
    what = "copy over the link" if folder != "h200" else "copy, read + write,"
    files = ", ".join(f"`results/{folder}/{name}.json`" for name in names)
    return (f"\n{first['machine']}, {what} {rates[0]}-{rates[-1]} GB/s, driver {first['driver']}, CUDA "
            f"{first['cuda']}, commit {first['commit']}; {files}.\n")


def gpu_stages(result, keep):
    """{shape key: {stage: entry}} of the entries that `keep`, in their order."""
    shapes = {}
    for entry in result["results"]:
        if keep(entry):
            key = tuple(entry[field] for field in ("ranks", "sms", "tokens", "hidden", "topk", "layout",
                                                   "reduction", "sum_at", "kernels",
                                                   "dispatch_wire"))
            shapes.setdefault(key, {})[entry["stage"]] = entry
    return shapes


def share(entry):
    return f"{entry['median_us']:.0f} µs, {entry['floor_percent']:.0f} %"


def more(entry, base):
    return f"+{100 * (entry['median_us'] / base['median_us'] - 1):.1f} %"


def is_throughput(entry):
    return (entry["tokens"] == 4096 and entry["hidden"] == 7168 and entry["topk"] == 8
            and entry["layout"] == "tokens" and entry["kernels"] == "cuda")


def gpu_throughput():
    """4096 tokens a rank, one row per (token, rank)."""
    processes, threads = gpu("h200", "processes"), gpu("h200", "threads")
    if not processes or not threads:
        return NOTHING
    as_processes = gpu_stages(processes, is_throughput)
    as_threads = gpu_stages(threads, is_throughput)
    rows = []
    for key, p in as_processes.items():
        t = as_threads[key]
        rows.append([f"{key[0]} x {key[1]}", share(p["dispatch"]), share(p["combine"]),
                     share(p["step"]), more(p["plan_dispatch"], p["dispatch"]),
                     share(t["dispatch"]), share(t["combine"]), share(t["step"])])
    return (table(["ranks x SMs", "dispatch, processes", "combine", "both", "plan too",
                   "dispatch, threads", "combine", "both"], rows)
            + gpu_footnote([processes, threads], "h200", ["processes", "threads"]))


def gpu_shapes():
    """Other rows and layouts, 8 ranks x 16 SMs."""
    threads = gpu("h200", "threads")
    if not threads:
        return NOTHING
    shapes = gpu_stages(threads, lambda e: e["tokens"] == 4096 and not is_throughput(e))
    rows = []
    for (_, _, _, hidden, topk, layout, reduction, sum_at, kernels, _), t in shapes.items():
        summed = f", summed at {sum_at}" if layout == "grouped" and reduction == "by_rank" else ""
        name = f"`{layout}` `{reduction}`{summed}, {hidden}, top-{topk}"
        if kernels != "cuda":
            name += f", `{kernels}`"
        rows.append([name, share(t["dispatch"]), share(t["combine"]), share(t["step"])])
    return (table(["threads, 8 x 16", "dispatch", "combine", "both"], rows)
            + gpu_footnote([threads], "h200", ["threads"]))


def gpu_decode():
    """Few tokens: slots, e4m3_block128 out, bf16 home."""
    processes, threads = gpu("h200", "processes"), gpu("h200", "threads")
    if not processes or not threads:
        return NOTHING

    def of(result):
        return {key[2]: stages
                for key, stages in gpu_stages(
                    result, lambda e: e["layout"] == "slots" and e["kernels"] == "cuda").items()}

    as_processes, as_threads = of(processes), of(threads)
    rows = []
    stages = ["dispatch", "plan_dispatch", "combine", "step", "planned_step"]
    for tokens, t in as_threads.items():
        rows.append([f"{tokens}", *(f"{t[stage]['median_us']:.1f}" for stage in stages),
                     *(f"{as_processes[tokens][stage]['median_us']:.1f}" for stage in stages)])
    names = ["dispatch", "with its plan", "combine", "step", "with its plan"]
    return (table(["tokens a rank, µs", *(f"{n}, threads" for n in names[:1]), *names[1:],
                   *(f"{n}, processes" for n in names[:1]), *names[1:]], rows)
            + gpu_footnote([processes, threads], "h200", ["processes", "threads"]))


def gpu_link():
    """One rank a GPU: what crosses the link, at the rate of a copy over it."""
    result = gpu("h200-x2", "gpus")
    if not result:
        return NOTHING
    rows = []
    engine = link_figure(result, "round trip")["engine_gbps"]
    shapes = gpu_stages(result, lambda e: "stage" in e)

    def order(key):
        _, sms, tokens, _, _, layout, _, _, _, wire = key
        return (-1, 0, 0, 0) if tokens <= 128 else (-tokens, layout != "tokens", wire != "bf16", sms)

    for key in sorted(shapes, key=order):
        found = shapes[key]
        _, sms, tokens, _, _, layout, reduction, _, _, wire = key

        def cell(entry):
            if entry["tokens"] <= 128:
                return f"{entry['median_us']:.1f} µs"
            return f"{share(entry)} ({entry['floor_percent'] * entry['copy_gbps'] / engine:.0f} %)"

        name = f"`{layout}`" if layout != "slots" else f"`{layout}` `{reduction}`"
        if layout != "slots" and wire != "bf16":
            name += f" `{wire}`"
        rows.append([f"{tokens} tokens, {name}, {sms} SMs",
                     *(cell(found[stage]) for stage in ("dispatch", "combine", "step",
                                                        "planned_step"))])
    return (table(["2 GPUs, a rank each", "dispatch", "combine", "both", "plan too"], rows)
            + gpu_footnote([result], "h200-x2", ["gpus"]))


def link_figure(result, name):
    return next(entry for entry in result["results"] if entry.get("link") == name)


def gpu_link_rates():
    """What the link does by itself, in GB/s: one way, and each way of both at once."""
    result = gpu("h200-x2", "gpus")
    if not result:
        return NOTHING
    hows = ["bulk store", "16-byte store", "bulk load", "16-byte load", "bulk store at home",
            "bulk store there and at home"]
    by_blocks = {}
    for entry in result["results"]:
        if entry.get("link") in hows:
            by_blocks.setdefault(entry["blocks"], {})[entry["link"]] = entry
    rows = []
    for blocks, found in by_blocks.items():
        cells = [found.get(how) for how in hows]
        rows.append([f"{blocks} blocks", *(f"{cell['one_way_gbps']:.0f}, {cell['both_ways_gbps']:.0f}"
                                           if cell else "" for cell in cells)])
    engine, trip = link_figure(result, "engine"), link_figure(result, "round trip")
    return (table(["GB/s one way, both ways", "push, bulk", "push, 16 bytes", "pull, bulk",
                   "pull, 16 bytes", "stores at home", "push and at home"], rows)
            + f"\nCopy engines: {engine['one_way_gbps']:.0f} GB/s one way, "
              f"{engine['both_ways_gbps']:.0f} both ways. A word there and back: "
              f"{trip['relaxed_us']:.2f} µs, {trip['ordered_us']:.2f} µs with a fence before each store "
              f"and acquiring loads.\n"
            + gpu_footnote([result], "h200-x2", ["gpus"]))


def gpu_nccl():
    """The peer on two GPUs."""
    result = gpu("h200-x2", "nccl")
    if not result:
        return NOTHING
    rows = [[entry["peer"], f"{entry['median_us']:.0f} µs", f"{entry['gbps']:.0f} GB/s"]
            for entry in result["results"]]
    return (table(["NCCL `all_to_all_single`, 2 GPUs, rows in order already", "median", "over the link"],
                  rows)
            + f"\n{result['machine']}, NCCL {result['nccl']}, torch {result['torch']}, commit "
              f"{result['commit']}; `results/h200-x2/nccl.json`.\n")


def gpu_deepep():
    """The other peer, on the machine and in the hour of our own figures; its best build and its best way."""
    result, ours, wide = (gpu("h200-x2", name) for name in ("deepep", "gpus", "bench"))
    if not result or not ours or not wide:
        return NOTHING
    shapes = gpu_stages(ours, lambda e: "stage" in e)

    def own(stage, **wanted):
        return next(found[stage]["median_us"] for found in shapes.values()
                    if all(found[stage][field] == value for field, value in wanted.items()))

    def theirs(**wanted):
        return min(entry["us_median"] for entry in result["results"]
                   if all(entry[field] == value for field, value in wanted.items()))

    rows = []
    for name, peer, mine in [
        ("4096 tokens, 24 SMs, dispatch in bf16",
         theirs(mode="normal", stage="dispatch", dtype="bf16"),
         own("dispatch", sms=24, layout="tokens", dispatch_wire="bf16")),
        ("dispatch in 8 bits, which ours quantises on the way", theirs(mode="normal", stage="dispatch", dtype="fp8"),
         own("dispatch", sms=24, layout="tokens", dispatch_wire="e4m3_block128")),
        ("combine in bf16", theirs(mode="normal", stage="combine"),
         own("combine", sms=24, layout="tokens", dispatch_wire="bf16")),
        ("plan and dispatch in bf16", theirs(mode="normal", stage="layout+dispatch uncached"),
         own("plan_dispatch", sms=24, layout="tokens", dispatch_wire="bf16")),
        ("128 tokens, 8 bits out, bf16 home, dispatch and combine",
         theirs(mode="low_latency", stage="dispatch+combine"),
         own("step", tokens=128, sms=64, reduction="by_token")),
        ("the same, ours `by_rank`", theirs(mode="low_latency", stage="dispatch+combine"),
         own("step", tokens=128, sms=64, reduction="by_rank")),
        ("the same with 128 of 132 SMs (theirs takes all)",
         theirs(mode="low_latency", stage="dispatch+combine"),
         statistics.median(e["p50"]["step_us"] for e in wide["results"]
                           if (e["reduction"], e["num_sms"]) == ("by_rank", 128))),
        ("the same, and the plan made in the same call",
         theirs(mode="low_latency", stage="dispatch+combine"),
         statistics.median(e["p50"]["total_us"] for e in wide["results"]
                           if (e["reduction"], e["num_sms"]) == ("by_rank", 128))),
    ]:
        rows.append([name, f"{peer:.0f} µs", f"{mine:.0f} µs", f"{mine / peer:.2f}"])
    return (table(["2 GPUs, a rank each", "DeepEP", "ours", "ours / DeepEP"], rows)
            + f"\n{result['machine']}, driver {result['driver']}, {result['peer']}, commit {result['commit']}; "
              "`results/h200-x2/deepep.json`, `gpus.json` and `bench.json` beside it.\n")


def gpu_deepep_one():
    """The same where all ranks share one GPU, as processes; with what ours took in that hour."""
    result = gpu("h200", "deepep")
    if not result:
        return NOTHING
    rows = []
    for ranks, sms in [(8, 16), (4, 24)]:
        found = {e["stage"]: e for e in result["ours"] if (e["ranks"], e["sms"]) == (ranks, sms)}
        for name, stage, mine in [("dispatch", "dispatch", "dispatch"), ("combine", "combine", "combine"),
                                  ("plan and dispatch", "layout+dispatch uncached", "plan_dispatch")]:
            peer = next(e["us_median"] for e in result["results"]
                        if (e["ranks"], e["num_sms"], e["stage"], e["dtype"]) == (ranks, sms, stage, "bf16"))
            us = found[mine]["median_us"]
            rows.append([f"{ranks} ranks x {sms} SMs, {name}", f"{peer:.0f} µs", f"{us:.0f} µs",
                         f"{us / peer:.2f}"])
    return (table(["one GPU, 4096 tokens a rank, bf16", "DeepEP", "ours", "ours / DeepEP"], rows)
            + f"\n{result['machine']}, driver {result['driver']}, {result['peer']}, commit {result['commit']}; "
              "`results/h200/deepep.json`.\n")


def gpu_tests():
    """What make gpu-test has run."""
    rows = []
    for folder, machine in (("h200", "one GPU"), ("h200-x2", "two GPUs, ranks in turns")):
        result = gpu(folder, "tests")
        if not result:
            continue
        passed = sum(test["passed"] for test in result["tests"])
        seconds = sum(test["seconds"] for test in result["tests"])
        rows.append([machine, f"{passed} of {len(result['tests'])}", f"{seconds} s",
                     result["machine"], result["driver"], result["cuda"], result["commit"]])
    if not rows:
        return NOTHING
    return table(["`make gpu-test`", "passed", "took", "machine", "driver", "CUDA", "commit"], rows)


TABLES = {"cpu-ratio": cpu_ratio, "cpu-stages": cpu_stages, "cpu-limits": cpu_limits,
          "cpu-formats": cpu_formats, "gpu-throughput": gpu_throughput, "gpu-shapes": gpu_shapes,
          "gpu-decode": gpu_decode, "gpu-link": gpu_link,
          "gpu-link-rates": gpu_link_rates, "gpu-nccl": gpu_nccl, "gpu-deepep": gpu_deepep,
          "gpu-deepep-one": gpu_deepep_one,
          "gpu-tests": gpu_tests}


def snippets():
    found = {}
    for path in sorted((ROOT / "examples").glob("*.cpp")):
        for snippet in CODE.finditer(path.read_text()):
            found[snippet["name"]] = textwrap.dedent(snippet["code"])
    return found


def rewritten(path, content, code):
    def fill(block):
        name = block["name"]
        if name not in TABLES:
            sys.exit(f"{path}: no table '{name}'; there are: {', '.join(TABLES)}")
        return f"{block[1]}\n{TABLES[name]()}\n{block[4]}"

    def show(block):
        name = block["name"]
        if name not in code:
            sys.exit(f"{path}: no snippet '{name}'; there are: {', '.join(code)}")
        return f"{block[1]}\n```cpp\n{code[name]}```\n\n{block[4]}"

    return SNIPPET.sub(show, BLOCK.sub(fill, content))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    code = snippets()
    stale = []
    for path in PAGES:
        content = path.read_text()
        fresh = rewritten(path.relative_to(ROOT), content, code)
        if fresh == content:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(fresh)
    if stale:
        print(f"{'Stale' if check else 'Rewritten'}: {', '.join(stale)}"
              + ("; run scripts/readme_tables.py" if check else ""))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
