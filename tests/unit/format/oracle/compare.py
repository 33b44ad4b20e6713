#!/usr/bin/env python3
"""Compares the library's number formats with ml_dtypes and with NumPy, bit for bit.

usage: compare.py --codec PROGRAM [--venv FOLDER]

Elements: all codes, and fp32 inputs: a sweep of all bit patterns, every bf16, and each boundary
between two codes with its neighbours. Rows: every wire, dtype, kernel set and scale layout over
many hidden sizes and kinds of data. Needs numpy and ml_dtypes, from this Python or the folder made
by scripts/python_venv.sh; without them it is skipped (exit code 77)."""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", required=True)
    parser.add_argument("--venv", default=str(HERE.parents[3] / "build" / "venv"))
    return parser.parse_args()


def import_or_skip(venv):
    try:
        import ml_dtypes  # noqa: F401
        import numpy  # noqa: F401
    except ImportError as missing:
        python = pathlib.Path(venv) / "bin" / "python"
        if python.exists() and pathlib.Path(sys.prefix).resolve() != pathlib.Path(venv).resolve():
            os.execv(python, [str(python), *sys.argv])
        print(f"compare.py: Skipped\n{missing}; scripts/python_venv.sh installs it\n"
              "[  SKIPPED ] format_oracle (0 ms)")
        sys.exit(77)


ARGS = arguments()
import_or_skip(ARGS.venv)

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import formats  # noqa: E402
import planes  # noqa: E402

F32 = np.float32
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": F32}
NAN_CODES = {"bf16": 0x7FC0, "f16": 0x7E00, "f32": 0x7FC00000}
failures = 0


class Codec:
    """The program and its files, with one kernel set pinned."""

    def __init__(self, program, folder, kernels=""):
        self.program = program
        self.folder = pathlib.Path(folder)
        self.environment = dict(os.environ, WHERRY_KERNELS=kernels)

    def run(self, *args):
        done = subprocess.run([self.program, *map(str, args)], env=self.environment, check=False,
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{self.program} {' '.join(map(str, args))}: {done.stderr}")
        return done.stdout

    def elements(self, command, element, values, result):
        source, target = self.folder / "in", self.folder / "out"
        values.tofile(source)
        self.run(command, element, source, target)
        return np.fromfile(target, result)

    def quantise(self, wire, dtype, x, layout):
        files = [self.folder / name for name in ("x", "payload", "scales")]
        x.tofile(files[0])
        self.run("quantize", wire, dtype, x.shape[1], layout, x.shape[0], *files)
        return files[1].read_bytes(), files[2].read_bytes()

    def dequantise(self, wire, dtype, shape, layout, payload, scales):
        files = [self.folder / name for name in ("x", "payload", "scales")]
        files[1].write_bytes(payload)
        files[2].write_bytes(scales)
        self.run("dequantize", wire, dtype, shape[1], layout, shape[0], *files)
        return np.fromfile(files[0], DTYPES[dtype]).reshape(shape)


def bits(values):
    return values.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def canonical(values, dtype):
    """The bits, every NaN replaced by the one NaN."""
    raw = bits(np.ascontiguousarray(values))
    return np.where(np.isnan(values.astype(F32)), raw.dtype.type(NAN_CODES[dtype]), raw)


def expect_equal(what, got, want, source=None):
    global failures
    wrong = np.flatnonzero(got != want)
    if wrong.size == 0:
        return
    failures += 1
    at = wrong[0]
    seen = "" if source is None else f" for {source.flat[at]!r} ({int(bits(source).flat[at]):#x})"
    print(f"FAILED {what}: {wrong.size} of {got.size} differ; first at {at}{seen}: "
          f"expected {int(want.flat[at]):#x}, got {int(got.flat[at]):#x}")


# ---- Elements --------------------------------------------------------------------------------


def sweep(values):
    """fp32 inputs: a prime stride over all patterns, every bf16, and around every boundary."""
    finite = np.unique(values[np.isfinite(values)].astype(np.float64))
    middles = ((finite[1:] + finite[:-1]) / 2).astype(F32)
    edges = np.concatenate([finite.astype(F32), middles])
    near = [np.nextafter(edges, F32(side)) for side in (-np.inf, np.inf)]
    patterns = np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32)
    all_bf16 = np.arange(2**16, dtype=np.uint32) << 16
    return np.concatenate([patterns.view(F32), all_bf16.view(F32), edges, *near])


def compare_elements(codec):
    for element in ("e4m3", "e5m2", "e2m1"):
        codes = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
        values = formats.decode(element, codes)
        got = codec.elements("decode", element, codes, F32)
        expect_equal(f"decode {element}", canonical(got, "f32"), canonical(values, "f32"))
        x = sweep(values)
        if element == "e2m1":
            x = x[~np.isnan(x)]
        with np.errstate(all="ignore"):
            want = formats.encode(element, x)
        expect_equal(f"encode {element}", codec.elements("encode", element, x, np.uint8), want, x)
        print(f"elements {element}: all {codes.size} codes and {x.size} fp32 inputs, as ml_dtypes")
    for element in ("bf16", "f16"):
        codes = np.arange(2**16, dtype=np.uint16)
        values = codes.view(DTYPES[element]).astype(F32)
        got = codec.elements("decode", element, codes, F32)
        expect_equal(f"decode {element}", canonical(got, "f32"), canonical(values, "f32"))
        x = sweep(values)
        with np.errstate(all="ignore"):
            want = canonical(x.astype(DTYPES[element]), element)
        expect_equal(f"encode {element}", codec.elements("encode", element, x, np.uint16), want, x)
        print(f"elements {element}: all {codes.size} codes and {x.size} fp32 inputs, as ml_dtypes")


# ---- Rows ------------------------------------------------------------------------------------


def rows_of(rng, hidden):
    """fp32 [rows, hidden], one kind of data a row or more."""
    normal = rng.standard_normal((3, hidden)).astype(F32)
    exponents = rng.integers(-149, 128, (2, hidden))
    patterns = rng.integers(0, 2**32, (3, hidden), dtype=np.uint64).astype(np.uint32).view(F32)
    finite = np.where(np.isfinite(patterns), patterns, F32(1))
    spiky = normal.copy()
    for special in (np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, 3e38):
        spiky[rng.random((3, hidden)) < 0.4 / hidden + 0.002] = special
    limits = np.nextafter(F32(448) * np.exp2(rng.integers(-9, 9, (1, hidden))).astype(F32),
                          rng.choice(np.array([-np.inf, np.inf], F32), (1, hidden)))
    ties = (rng.integers(-64, 64, (2, hidden)) * 0.5).astype(F32)  # halfway wherever scales are 2^k
    ties[:, 0] = [448, 127]
    parts = [normal, normal * np.exp2(rng.integers(-130, 120, (3, 1))).astype(F32),
             np.ldexp(normal[:2], exponents).astype(F32), patterns, finite, spiky,
             np.zeros((1, hidden), F32), -np.zeros((1, hidden), F32), limits, ties,
             np.full((1, hidden), np.nan, F32), np.full((1, hidden), -np.inf, F32),
             rng.integers(0, 2**24, (1, hidden), dtype=np.uint32).view(F32)]
    return np.concatenate(parts)


def layouts_of(wire):
    power_of_two = wire.endswith("_pow2") or wire.startswith("mxfp8")
    return ["row_major", "column_major"] + (["packed_ue8m0"] if power_of_two else [])


def compare_rows(codec, kernels, wire, dtype, hidden, rng, layouts):
    with np.errstate(all="ignore"):
        x = rows_of(rng, hidden).astype(DTYPES[dtype])
        wide = x.astype(F32)
    codes, scales, row_scales = formats.quantise(wire, wide)
    with np.errstate(all="ignore"):
        back = canonical(formats.dequantise(wire, codes, scales, row_scales).astype(DTYPES[dtype]),
                         dtype)
    want_payload = planes.payload(wire, codes)
    for layout in layouts:
        what = f"{kernels} {wire} from {dtype}, hidden {hidden}, {layout}"
        want_scales = np.frombuffer(planes.scale_plane(layout, scales, row_scales), np.uint8)
        payload, plane = codec.quantise(wire, dtype, x, layout)
        same_shape = want_payload.shape[1] == hidden
        expect_equal(f"{what}: payload", np.frombuffer(payload, np.uint8), want_payload.ravel(),
                     x if same_shape else None)
        expect_equal(f"{what}: scales", np.frombuffer(plane, np.uint8), want_scales)
        got = codec.dequantise(wire, dtype, x.shape, layout, want_payload.tobytes(),
                               want_scales.tobytes())
        expect_equal(f"{what}: back", canonical(got, dtype).ravel(), back.ravel())
    return x.size


def compare_blocks(program, folder, kernel_sets):
    sizes = (1, 7, 16, 17, 31, 33, 128, 129, 300, 2056, 2880, 7168)
    for kernels in kernel_sets:
        codec = Codec(program, folder, kernels)
        for wire in formats.WIRES:
            rng = np.random.default_rng(7)
            compared = 0
            for number, hidden in enumerate(sizes):
                for dtype in DTYPES:
                    layouts = layouts_of(wire)
                    if kernels != kernel_sets[-1]:  # layouts are not the kernels' affair
                        layouts = [layouts[number % len(layouts)]]
                    compared += compare_rows(codec, kernels, wire, dtype, hidden, rng, layouts)
            print(f"rows {wire} ({kernels}): {compared} elements of {len(sizes)} hidden sizes and "
                  f"{len(DTYPES)} dtypes, as NumPy")


def main():
    with tempfile.TemporaryDirectory() as folder:
        codec = Codec(ARGS.codec, folder)
        kernel_sets = codec.run("kernels").split()
        compare_elements(codec)
        compare_blocks(ARGS.codec, folder, kernel_sets)
    print(f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}, kernels "
          f"{', '.join(kernel_sets)}: "
          f"{'all equal, bit for bit' if failures == 0 else f'{failures} comparisons failed'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
