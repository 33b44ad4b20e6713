"""What `make bench` measures, and what each case must hold (on two cores, ranks as processes)."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shape:
    ranks: int
    tokens: int  # a rank
    hidden: int
    topk: int
    experts: int

    def flags(self):
        return [f"--{name}={getattr(self, name)}" for name in ("tokens", "hidden", "topk", "experts")]

    def __str__(self):
        return (f"{self.ranks} ranks x {self.tokens} tokens x {self.hidden}, "
                f"top-{self.topk} of {self.experts}")


@dataclass(frozen=True)
class Run:
    """One command of a case: Wherry with a layout, or (layout None) the MPI baseline."""

    name: str
    shape: Shape
    layout: str | None = None
    flags: tuple = ()
    steps: int = 30


@dataclass(frozen=True)
class Limit:
    """`run` must stay within `most` (or above `least`) of `quantity`; against `of`, as a ratio."""

    run: str
    quantity: str  # a field of the JSON object, "p99.total_us" for one inside another
    of: str | None = None
    most: float | None = None
    least: float | None = None


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    runs: tuple
    limits: tuple = field(default=())
    base: str | None = None  # the run that the others are compared with


BASE = "MPI"
BASE_ROWS = "MPI, a row per choice"


def against_mpi(name, title, shape, layouts, limits, steps=30):
    """`layouts` of Wherry and both variants of the baseline, taking turns."""
    runs = [Run(layout, shape, layout, steps=steps) for layout in layouts]
    runs += [Run(BASE, shape, None, ("--dedup",), steps), Run(BASE_ROWS, shape, None, (), steps)]
    return Case(name, title, tuple(runs), tuple(limits), BASE)


def most(run, ratio):
    return Limit(run, "total_us", BASE, most=ratio)


def prefill(ranks):
    return Shape(ranks, 512, 4096, 8, 64)


def formats(name, title, shape, wires):
    """The same rows in several number formats; what counts is dispatch, which quantises."""
    runs = [Run("bf16", shape, "grouped")]
    runs += [Run(wire, shape, "grouped", (f"--wire={wire}",)) for wire in wires]
    limits = [Limit(wire, "dispatch_us", "bf16", most=1.0)
              for wire in ("e4m3_block128", "int8_token")]
    return Case(name, title, tuple(runs), tuple(limits), "bf16")


DECODE = Shape(4, 16, 7168, 8, 256)
DECODE_STEPS = 200
FLOOR = [Limit(layout, "floor_fraction", least=0.6) for layout in ("tokens", "grouped")]

CASES = [
    against_mpi("prefill_2", "Prefill, 2 ranks", prefill(2), ("tokens", "grouped"),
                [most("tokens", 0.30), most("grouped", 0.30)]),
    against_mpi("prefill_4", "Prefill, 4 ranks", prefill(4), ("tokens", "grouped"),
                [most("tokens", 0.12), most("grouped", 0.22), *FLOOR]),
    against_mpi("prefill_8", "Prefill, 8 ranks", prefill(8), ("tokens", "grouped"),
                [most("tokens", 0.12), most("grouped", 0.22)]),
    against_mpi("decode_4", "Decode, 4 ranks", DECODE, ("slots", "tokens"),
                [most("slots", 0.35)], DECODE_STEPS),
    formats("formats_4", "Formats, 4 ranks", Shape(4, 512, 7168, 8, 64),
            ("e4m3_block128", "int8_token", "mxfp8_e4m3")),
    Case("more_ranks_than_cores", "The same 2048 tokens over 2 and over 8 ranks",
         (Run("2 x 1024", Shape(2, 1024, 4096, 8, 64), "grouped"),
          Run("8 x 256", Shape(8, 256, 4096, 8, 64), "grouped")),
         (Limit("8 x 256", "total_us", "2 x 1024", most=1.3),), "2 x 1024"),
    Case("decode_8", "Decode, 8 ranks",
         (Run("slots", Shape(8, 16, 7168, 8, 256), "slots", steps=DECODE_STEPS),),
         (Limit("slots", "p99.total_us", most=4000.0),
          Limit("slots", "worst_involuntary_switches", most=1.0))),
]
