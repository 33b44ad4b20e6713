#!/usr/bin/env python3
"""Holds the table of docs/edge_cases.md against the tests that were built.

usage: scripts/edge_cases.py --check [--build build] [--against FILE]

Every kind needs a test, and every test that is named must exist ('Suite.*' any of that suite). Of the
tests whose file lies in tests/conformance, each suite must be in the table. --against compares the kinds
with those of another table (its first column).
Exit codes: 0 all there, 1 something is missing, 2 bad use.
"""
import argparse
import fnmatch
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "edge_cases.md"


def rows(path: pathlib.Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def tests_of(build: pathlib.Path) -> set[str]:
    """Names as GoogleTest has them, without the prefix and the suffix of instances."""
    listing = subprocess.run(["ctest", "--test-dir", str(build), "-N"], capture_output=True, text=True, check=False)
    names = re.findall(r"Test +#\d+: (\S+)", listing.stdout)
    plain = set()
    for name in names:
        parts = name.split("/")
        plain.add(next((part for part in parts if "." in part), name))
    return plain


def suites_of(folder: pathlib.Path) -> set[str]:
    found = set()
    for source in folder.glob("*_test.cpp"):
        found |= set(re.findall(r"^TEST(?:_P|_F)?\((\w+),", source.read_text(), re.MULTILINE))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", required=True)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--against", type=pathlib.Path)
    arguments = parser.parse_args()

    problems = []
    existing = tests_of(arguments.build)
    if not existing:
        print(f"edge_cases.py: no tests in {arguments.build}; run make test first", file=sys.stderr)
        return 2
    named = set()
    table = rows(TABLE)
    for kind, _, promise, tests in table:
        patterns = re.findall(r"`([^`]+)`", tests)
        named |= {pattern.split(".")[0] for pattern in patterns}
        if not patterns and "GPU" not in promise:
            problems.append(f"'{kind}' has no test")
        for pattern in patterns:
            if not fnmatch.filter(existing, pattern):
                problems.append(f"'{kind}': no test is named {pattern}")
    general = {"Kernels"}  # of the kernel sets, not of inputs
    for suite in sorted(suites_of(ROOT / "tests" / "conformance") - named - general):
        problems.append(f"the suite {suite} of tests/conformance is in no row")
    if arguments.against:
        kinds = {row[0] for row in table}
        problems += [f"'{row[0]}' of {arguments.against} is missing" for row in rows(arguments.against) if row[0] not in kinds]

    for problem in problems:
        print(f"edge_cases.py: {problem}", file=sys.stderr)
    if not problems:
        print(f"{len(table)} kinds of input, each with its tests; {len(existing)} tests in all")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
