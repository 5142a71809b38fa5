#!/usr/bin/env python3
"""How fast checkpoints are saved and loaded: a plain directory, ckptfs, and its peers, interleaved on one disk.

    python bench/save_load.py [--runs 5] [--size-mib 1024] [--fsync] [--cold] [--only plain,ckptfs,juicefs]

Every run visits all contestants, beginning with another one each time, so that a slow minute of the machine hits all of
them alike. A visit: new content, save (timed), wait until the background work is done, load (timed; after dropping all
caches with --cold), compare every byte, delete. CPU is that of the processes that serve the mount, from the save to the
end of the background work. Figures are medians; the range is in brackets.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import contestants, machine, workloads  # noqa: E402  (this directory must leave sys.path first)
from bench.contestants import PLAIN, Contestant  # noqa: E402
from bench.crew import fsync  # noqa: E402
from bench.figures import names, turns  # noqa: E402
from bench.machine import GIB, MIB  # noqa: E402

console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@dataclass(frozen=True)
class Visit:
    """One save and one load on one contestant."""

    workload: str
    contestant: str
    run: int
    size_bytes: int
    save_s: float
    load_s: float
    background_s: float
    """From the end of the save until nothing was left to do."""
    cpu_s: float


def main() -> None:
    arguments = parse()
    visits: list[Visit] = []
    with machine.workspace(arguments.dir) as work, ExitStack() as stack:
        mounted = []
        for name in arguments.only:
            (work / name).mkdir()
            mounted.append(stack.enter_context(contestants.available()[name](work / name)))
        for workload in arguments.workloads:
            visits += measure(workload, mounted, arguments)
            report(workload, [visit for visit in visits if visit.workload == workload], arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(visit) for visit in visits], indent=1))


def parse() -> argparse.Namespace:
    possible = contestants.available()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--size-mib", type=int, default=1024, help="of each checkpoint; less where memory is short")
    options.add_argument("--fsync", action="store_true", help="a save ends with fsync")
    options.add_argument("--cold", action="store_true", help="drop all caches before each load (root)")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    options.add_argument("--json", type=Path, metavar="FILE", help="write every single measurement")
    options.add_argument(
        "--only", type=names(possible), metavar="NAME,...", help=f"of {', '.join(possible)}",
        default=[name for name in possible if name not in contestants.OPTIONAL],
    )  # fmt: skip
    options.add_argument(
        "--workloads", type=names(workloads.available()), metavar="NAME,...", default=list(workloads.available())
    )
    arguments = options.parse_args()
    if arguments.cold and os.geteuid() != 0:
        options.error("--cold drops the kernel's caches, which only root may do")
    return arguments


def measure(name: str, mounted: list[Contestant], arguments: argparse.Namespace) -> list[Visit]:
    """All visits of one workload; the first visit to each contestant is a warm-up of a sixteenth of the size."""
    # The object, what is loaded, and the pages of two caches have to fit.
    size_bytes = min(arguments.size_mib * MIB, machine.available_bytes() // 6)
    warm_up = workloads.available()[name](size_bytes // 16)
    for contestant in mounted:
        visit(warm_up, contestant, 0, arguments)
    workload = workloads.available()[name](size_bytes)
    return [visit(workload, contestant, run, arguments) for run, contestant in turns(mounted, arguments.runs)]


def visit(workload: workloads.Workload, contestant: Contestant, run: int, arguments: argparse.Namespace) -> Visit:
    workload.change()
    os.sync()  # what the visit before left dirty is not this one's to write
    path = contestant.directory / f"checkpoint-{run}{workload.suffix}"
    cpu_before = machine.cpu_seconds(contestant.pids())
    started = time.perf_counter()
    workload.save(path)
    if arguments.fsync:
        fsync(path)
    save_s = time.perf_counter() - started
    contestant.settle()
    background_s = time.perf_counter() - started - save_s
    cpu_s = machine.cpu_seconds(contestant.pids()) - cpu_before
    size_bytes = path.stat().st_size
    if arguments.cold:
        machine.drop_caches()
    started = time.perf_counter()
    loaded = workload.load(path)
    load_s = time.perf_counter() - started
    if not workload.matches(loaded):
        raise SystemExit(f"{contestant.name}: {path.name} was read with other content than it was saved with")
    del loaded
    gc.collect()  # torch's loaded state is cyclic; its memory is wanted for the next visit
    path.unlink()
    return Visit(workload.name, contestant.name, run, size_bytes, save_s, load_s, background_s, cpu_s)


def report(name: str, visits: list[Visit], arguments: argparse.Namespace) -> None:
    """One table: GB/s with ratios to the plain directory and to the best peer, and CPU seconds a GB."""
    by_contestant: dict[str, list[Visit]] = {}
    for each in visits:
        by_contestant.setdefault(each.contestant, []).append(each)
    how = f"save{' + fsync' if arguments.fsync else ''}, {'cold' if arguments.cold else 'warm'} load"
    title = f"{name}: {visits[0].size_bytes / GIB:.2f} GiB, {how}, {arguments.runs} runs"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for phase in ("save", "load"):
        for heading in (f"{phase} GB/s", "x plain", "x best peer"):
            table.add_column(heading, justify="right")
    table.add_column("background s", justify="right")
    table.add_column("CPU s/GB", justify="right")
    speeds = {
        phase: {
            contestant: [each.size_bytes / 1e9 / getattr(each, f"{phase}_s") for each in its]
            for contestant, its in by_contestant.items()
        }
        for phase in ("save", "load")
    }
    for contestant, its in by_contestant.items():
        cells = [contestant]
        for phase in ("save", "load"):
            medians = {each: statistics.median(values) for each, values in speeds[phase].items()}
            values, own = speeds[phase][contestant], medians[contestant]
            best_peer = max((value for each, value in medians.items() if contestants.is_peer(each)), default=None)
            cells.append(f"{own:.2f} [{min(values):.2f}-{max(values):.2f}]")
            cells.append(f"{own / medians[PLAIN]:.2f}" if PLAIN in medians else "")
            cells.append(f"{own / best_peer:.2f}" if best_peer else "")
        cells.append(f"{statistics.median(each.background_s for each in its):.1f}")
        cells.append(f"{statistics.median(each.cpu_s / (each.size_bytes / 1e9) for each in its):.2f}")
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
