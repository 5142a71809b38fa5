#!/usr/bin/env python3
"""One big array, then a train state of many: what each library makes of the disk, of ckptfs and of a thin network.

    python bench/array_vs_state.py [--size-mb 1000] [--runs 5] [--processes 1,2] [--libraries numpy,torch,orbax]

The micro-benchmark with which a training framework explained why it redesigned its checkpoints: an array of 1 GB, and
as much in 360 arrays (parameters and two moments), saved and loaded by numpy (the state pickled), torch, flax's
msgpack, tensorstore and Orbax, on

    plain            a directory of the disk
    ckptfs           a mount without a remote
    network          a directory across a network of 0.77 Gb/s up and 5 Gb/s down, used directly: JuiceFS with a local
                     bucket, limited to these rates, no writeback, nothing cached on disk (100 MB in its memory), and
                     the kernel's pages dropped before each load
    ckptfs+network   ckptfs with such a directory as its remote: it saves and loads locally and uploads behind

by one process and by two at once, which share the bytes. Seconds are those of the slowest process; every byte is
compared. First the peaks of the disk (direct I/O) and of memory (a copy, counted once) are measured; saving and loading
are shown as a share of both. What a library does for safety is its own choice: Orbax and tensorstore sync their files.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import contestants, frameworks, machine  # noqa: E402  (this directory must leave sys.path first)
from bench.contestants import BESIDE, LOCAL, NETWORK, PLAIN, Contestant  # noqa: E402
from bench.crew import Crew  # noqa: E402
from bench.figures import console, names, table, turns  # noqa: E402
from bench.machine import MIB  # noqa: E402

_DIRECT_BYTES = 8 * MIB
_PEAK_BYTES = 1024 * MIB


@dataclass(frozen=True)
class Peaks:
    """What nothing on this machine exceeds, in bytes a second."""

    disk_write: float
    disk_read: float
    memory: float


@dataclass
class Results:
    """Of one library on one contestant."""

    size_bytes: int = 0
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    background_s: list[float] = field(default_factory=list)


def main() -> None:
    arguments = parse()
    with machine.workspace(arguments.dir) as work, ExitStack() as stack:
        if frameworks.missing():
            console.print(f"not installed, left out: {', '.join(frameworks.missing())}")
        peaks = measure_peaks(work / "peak", min(_PEAK_BYTES, arguments.size_mb * 1_000_000))
        mounted = []
        for name in arguments.only:
            (work / name).mkdir()
            mounted.append(stack.enter_context(contestants.available()[name](work / name)))
        for shape in frameworks.SHAPES:
            for processes in arguments.processes:
                results = {
                    library: measure(frameworks.Build(library, shape), processes, mounted, arguments)
                    for library in arguments.libraries
                }
                report(f"{shape}, {processes} process{'es' if processes > 1 else ''}", results, peaks, arguments)


def parse() -> argparse.Namespace:
    possible, libraries = contestants.available(), frameworks.available()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--size-mb", type=int, default=1000, help="of the array, and of the state")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--processes", type=counts, metavar="N,...", default=[1, 2], help="how many at once [1,2]")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    options.add_argument(
        "--only", type=names(possible), metavar="NAME,...", help=f"of {', '.join(possible)}",
        default=[name for name in (PLAIN, LOCAL, NETWORK, BESIDE) if name in possible],
    )  # fmt: skip
    options.add_argument(
        "--libraries", type=names(libraries), metavar="NAME,...", default=libraries, help=f"of {', '.join(libraries)}"
    )
    return options.parse_args()


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def measure_peaks(path: Path, size_bytes: int) -> Peaks:
    """Sequential direct I/O of the disk, and a copy in memory; the best of three, as peaks are."""
    best = [0.0, 0.0, 0.0]
    size_bytes = max(_DIRECT_BYTES, size_bytes // _DIRECT_BYTES * _DIRECT_BYTES)
    source = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    target = np.zeros_like(source)
    for _ in range(3):
        write_s, read_s = direct_io(path, source)
        started = time.perf_counter()
        np.copyto(target, source)
        seconds = (write_s, read_s, time.perf_counter() - started)
        best = [max(rate, size_bytes / each) for rate, each in zip(best, seconds, strict=True)]
    path.unlink()
    found = Peaks(*best)
    rates = (f"{rate * 8 / 1e9:.1f}" for rate in best)
    console.print("peaks, Gb/s: disk write {}, disk read {}, memory copy {}".format(*rates))
    return found


def direct_io(path: Path, data: np.ndarray) -> tuple[float, float]:
    """Seconds to write *data* and to read it back past the page cache."""
    block = mmap.mmap(-1, _DIRECT_BYTES)  # direct I/O wants its memory aligned
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        write_s = 0.0
        for at in range(0, len(data), _DIRECT_BYTES):
            block[:] = data[at : at + _DIRECT_BYTES].tobytes()
            started = time.perf_counter()
            os.write(fd, block)
            write_s += time.perf_counter() - started
        started = time.perf_counter()
        os.fsync(fd)
        write_s += time.perf_counter() - started
        os.lseek(fd, 0, os.SEEK_SET)
        started = time.perf_counter()
        while os.readv(fd, [block]):
            pass
        return write_s, time.perf_counter() - started
    finally:
        os.close(fd)
        block.close()


def measure(
    build: frameworks.Build, processes: int, mounted: list[Contestant], arguments: argparse.Namespace
) -> dict[str, Results]:
    """All visits of one library; the first visit to the first contestant warms the library up and does not count."""
    results = {contestant.name: Results() for contestant in mounted}
    size_bytes = min(arguments.size_mb * 1_000_000, machine.available_bytes() // 6)
    with Crew(processes, build, size_bytes // processes) as crew:
        visit(crew, processes, mounted[0], build.suffix, Results())
        for _, contestant in turns(mounted, arguments.runs):
            visit(crew, processes, contestant, build.suffix, results[contestant.name])
    return results


def visit(crew: Crew, processes: int, contestant: Contestant, suffix: str, result: Results) -> None:
    crew.change()
    os.sync()  # what the visit before left dirty is not this one's to write
    directory = contestant.directory / "checkpoint"
    directory.mkdir()
    paths = [directory / f"rank-{rank}{suffix}" for rank in range(processes)]
    result.save_s.append(crew.save(paths))
    saved = time.perf_counter()
    contestant.settle()
    result.background_s.append(time.perf_counter() - saved)
    result.size_bytes = machine.size_of(directory)
    contestant.before_load(directory)
    result.load_s.append(crew.load(paths))
    machine.remove(directory)


def report(what: str, results: dict[str, dict[str, Results]], peaks: Peaks, arguments: argparse.Namespace) -> None:
    found = table(
        f"{what}, {arguments.size_mb / 1000:g} GB, averages of {arguments.runs} runs", "",
        *("save s", "Gb/s", "x plain", "% disk", "% memory"), *("load s", "Gb/s", "x plain", "% disk", "% memory"),
        "background s",
    )  # fmt: skip
    for library, by_contestant in results.items():
        found.add_row(f"[bold]{library}[/]")
        for contestant, each in by_contestant.items():
            cells = [f"  {contestant}"]
            for phase, disk in (("save_s", peaks.disk_write), ("load_s", peaks.disk_read)):
                mean_s = statistics.fmean(getattr(each, phase))
                rate = each.size_bytes / mean_s
                plain_s = statistics.fmean(getattr(by_contestant[PLAIN], phase)) if PLAIN in by_contestant else None
                cells += [f"{mean_s:.2f}", f"{rate * 8 / 1e9:.2f}", f"{plain_s / mean_s:.2f}" if plain_s else ""]
                cells += [f"{rate / disk:.0%}", f"{rate / peaks.memory:.0%}"]
            found.add_row(*cells, f"{statistics.fmean(each.background_s):.1f}")
        found.add_section()
    console.print(found)


if __name__ == "__main__":
    main()
