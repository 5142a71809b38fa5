#!/usr/bin/env python3
"""What a series of checkpoints costs to store, beside other ways to keep it.

    python bench/series.py SERIES
    python bench/savings.py SERIES [--regimes A,C,...] [--keepers ckptfs,zipnn,...] [--json FILE]

Each keeper takes the checkpoints of a series one after the other; ckptfs through a real mount, whose remote has
everything before the next one comes. Per regime, the bytes that lie there afterwards as a share of the files' bytes: of
the checkpoints behind the first, and of all. Processor seconds are those of the program that keeps, not of the one that
copies; per GB of files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import keepers, machine  # noqa: E402  (this directory must leave sys.path first)
from bench.figures import console, names, table  # noqa: E402
from bench.series import REGIMES  # noqa: E402

TARGETS = {
    "A": 0.81, "B": 0.77, "B-weights": 0.53, "C": 0.28, "D": 0.06, "E": 0.20, "F": 0.58, "G": 0.01, "H": 0.43,
    "H2": 0.27, "O": 0.20,
}  # fmt: skip
"""Shares of the checkpoints behind the first that ckptfs is to reach: what each regime's redundancy allowed when every
fifth checkpoint was kept whole. O: what is trained is 0.16 of the bytes, and 0.95 of the rest are to be found again."""


@dataclass(frozen=True)
class Result:
    """What one keeper made of one regime."""

    raw: list[int]
    """Bytes of each checkpoint's files."""
    stored: list[int]
    """Bytes that each took in addition to those before."""
    cpu_s: float
    """For all of them."""

    @property
    def later(self) -> float:
        """The share of the checkpoints behind the first."""
        return sum(self.stored[1:]) / sum(self.raw[1:])

    @property
    def all(self) -> float:
        return sum(self.stored) / sum(self.raw)

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (sum(self.raw) / 1e9)


def main() -> None:
    makers = keepers.available()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("series", type=Path, help="what bench/series.py made")
    options.add_argument("--regimes", type=names(REGIMES), default=list(REGIMES), help=", ".join(REGIMES))
    options.add_argument("--keepers", type=names(makers), default=list(makers), help=", ".join(makers))
    options.add_argument("--json", type=Path, help="write every figure there")
    options.add_argument("--dir", type=Path, help="where the stores lie [default: the temporary directory]")
    arguments = options.parse_args()
    results: dict[str, dict[str, Result]] = {}
    with machine.workspace(arguments.dir) as work:
        for regime in arguments.regimes:
            checkpoints = found(arguments.series / regime)
            if len(checkpoints) < 2:
                continue
            results[regime] = {}
            for name in arguments.keepers:
                results[regime][name] = measure(makers[name], checkpoints, work / f"{regime}-{name}")
            report(regime, results[regime])
    summarise(results)
    if arguments.json:
        document = {regime: {name: asdict(each) for name, each in made.items()} for regime, made in results.items()}
        arguments.json.write_text(json.dumps(document))


def found(series: Path) -> list[Path]:
    """The checkpoints, in order."""
    return sorted(series.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def measure(make: keepers.Make, checkpoints: list[Path], work: Path) -> Result:
    work.mkdir()
    stored: list[int] = []
    with make(work) as keeper:
        before, began_with = keeper.cpu_s(), keeper.stored_bytes()
        for checkpoint in checkpoints:
            keeper.add(checkpoint)
            stored.append(keeper.stored_bytes() - began_with - sum(stored))
        cpu_s = keeper.cpu_s() - before
    machine.remove(work)
    return Result([machine.size_of(each) for each in checkpoints], stored, cpu_s)


def report(regime: str, results: Mapping[str, Result]) -> None:
    raw = next(iter(results.values())).raw
    target = f"; to reach: {TARGETS[regime]:.2f}" if regime in TARGETS else ""
    title = f"{regime}: {REGIMES[regime]}. {len(raw)} of {sum(raw) / len(raw) / 1e6:.1f} MB{target}"
    shown = table(title, "", "behind the first", "all", "CPU s/GB", "each, in % of its bytes")
    for name, each in results.items():
        parts = " ".join(f"{100 * took / size:.1f}" for took, size in zip(each.stored, each.raw, strict=True))
        shown.add_row(name, f"{each.later:.3f}", f"{each.all:.3f}", f"{each.cpu_s_per_gb:.2f}", parts)
    console.print(shown)


def summarise(results: Mapping[str, Mapping[str, Result]]) -> None:
    """One line a regime: shares behind the first."""
    columns = list(dict.fromkeys(name for each in results.values() for name in each))
    shown = table("Share of the bytes that the checkpoints behind the first take", "", "to reach", *columns)
    for regime, each in results.items():
        target = f"{TARGETS[regime]:.2f}" if regime in TARGETS else ""
        shown.add_row(regime, target, *(f"{each[name].later:.3f}" if name in each else "" for name in columns))
    console.print(shown)


if __name__ == "__main__":
    main()
