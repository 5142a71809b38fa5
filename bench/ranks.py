#!/usr/bin/env python3
"""Many processes saving and loading at once, as the ranks of a run do: what they reach together.

    python bench/ranks.py [--ranks 8] [--size-mib 2048] [--runs 5] [--fsync] [--cold] [--only plain,ckptfs,juicefs]

Each of --ranks processes holds its part of --size-mib as a torch or a safetensors file of its own. They save at the
same moment into one directory, wait until the background work is done, and load at the same moment; every byte is
compared. Every run visits all contestants, beginning with another one each time. GB/s are all ranks' bytes over the
time from the first begin to the last end; medians, the range in brackets. CPU is that of the processes that serve the
mount, from the save to the end of the background work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import contestants, machine, workloads  # noqa: E402  (this directory must leave sys.path first)
from bench.contestants import LOCAL, PLAIN, SERVED, Contestant  # noqa: E402
from bench.crew import Crew  # noqa: E402
from bench.figures import console, names, spread, table, turns  # noqa: E402
from bench.machine import GIB, MIB  # noqa: E402


@dataclass
class Results:
    """Of one contestant."""

    size_bytes: int = 0
    save: list[float] = field(default_factory=list)
    """GB/s of all ranks together."""
    load: list[float] = field(default_factory=list)
    background_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    arguments = parse()
    with machine.workspace(arguments.dir) as work, ExitStack() as stack:
        mounted = []
        for name in arguments.only:
            (work / name).mkdir()
            mounted.append(stack.enter_context(contestants.available()[name](work / name)))
        for workload in arguments.workloads:
            report(workload, measure(workload, mounted, arguments), arguments)


def parse() -> argparse.Namespace:
    possible, checkpoints = contestants.available(), workloads.available()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--size-mib", type=int, default=2048, help="of all ranks together; less where memory is short")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--fsync", action="store_true", help="a save ends with fsync")
    options.add_argument("--cold", action="store_true", help="drop all caches before each load (root)")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    options.add_argument(
        "--only", type=names(possible), metavar="NAME,...", help=f"of {', '.join(possible)}",
        default=[name for name in (PLAIN, LOCAL, SERVED, "juicefs") if name in possible],
    )  # fmt: skip
    options.add_argument(
        "--workloads", type=names(checkpoints), metavar="NAME,...", help=f"of {', '.join(checkpoints)}",
        default=[name for name in ("torch", "safetensors") if name in checkpoints],
    )  # fmt: skip
    arguments = options.parse_args()
    if arguments.cold and os.geteuid() != 0:
        options.error("--cold drops the kernel's caches, which only root may do")
    return arguments


def measure(name: str, mounted: list[Contestant], arguments: argparse.Namespace) -> dict[str, Results]:
    """All visits of one workload; the first visit to each contestant warms up and does not count."""
    size_bytes = min(arguments.size_mib * MIB, machine.available_bytes() // 6)
    results = {contestant.name: Results() for contestant in mounted}
    workload = workloads.available()[name]
    with Crew(arguments.ranks, workload, size_bytes // arguments.ranks) as crew:
        for contestant in mounted:
            visit(crew, contestant, workload.suffix, arguments, Results())
        for _, contestant in turns(mounted, arguments.runs):
            visit(crew, contestant, workload.suffix, arguments, results[contestant.name])
    return results


def visit(crew: Crew, contestant: Contestant, suffix: str, arguments: argparse.Namespace, result: Results) -> None:
    crew.change()
    os.sync()  # what the visit before left dirty is not this one's to write
    directory = contestant.directory / "checkpoint"
    directory.mkdir()
    paths = [directory / f"rank-{rank}{suffix}" for rank in range(arguments.ranks)]
    cpu_before = machine.cpu_seconds(contestant.pids())
    save_s = crew.save(paths, fsync=arguments.fsync)
    saved = time.perf_counter()
    contestant.settle()
    result.background_s.append(time.perf_counter() - saved)
    result.cpu_s.append(machine.cpu_seconds(contestant.pids()) - cpu_before)
    result.size_bytes = machine.size_of(directory)
    if arguments.cold:
        machine.drop_caches()
    load_s = crew.load(paths)
    machine.remove(directory)
    result.save.append(result.size_bytes / 1e9 / save_s)
    result.load.append(result.size_bytes / 1e9 / load_s)


def report(name: str, results: dict[str, Results], arguments: argparse.Namespace) -> None:
    how = f"save{' + fsync' if arguments.fsync else ''}, {'cold' if arguments.cold else 'warm'} load"
    size_bytes = next(iter(results.values())).size_bytes
    title = f"{name}: {arguments.ranks} ranks, {size_bytes / GIB:.2f} GiB together, {how}, {arguments.runs} runs"
    found = table(title, "", "save GB/s", "x plain", "load GB/s", "x plain", "background s", "CPU s/GB")
    for contestant, each in results.items():
        cells = []
        for phase in ("save", "load"):
            plain = statistics.median(getattr(results[PLAIN], phase)) if PLAIN in results else None
            own = getattr(each, phase)
            cells += [spread(own), f"{statistics.median(own) / plain:.2f}" if plain else ""]
        cells.append(f"{statistics.median(each.background_s):.1f}")
        cells.append(f"{statistics.median(each.cpu_s) / (size_bytes / 1e9):.2f}")
        found.add_row(contestant, *cells)
    console.print(found)


if __name__ == "__main__":
    main()
