#!/usr/bin/env python3
"""The longest that one call keeps a saver waiting while an earlier checkpoint is sealed and uploaded behind it.

    python bench/stall.py [--gib 1] [--format npy|unknown] [--rounds 2] [--sides plain,alone,remote]

One file of --gib is saved. From that moment on a second saver writes files of 4 MiB (open, four writes, fsync, close,
rename), one every 50 ms, until the first file is replicated (sealed, where there is no remote; for as long, in a plain
directory), and each call is timed. The sides take turns; the remote is a SeaweedFS on this machine, which takes its
share of the processors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckptfs  # noqa: E402  (this directory must leave sys.path first)
from bench import machine  # noqa: E402
from bench.machine import GIB, MIB  # noqa: E402
from tests.support.seaweed import Seaweed  # noqa: E402

T = TypeVar("T")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

CALLS = ("open", "write", "fsync", "close", "rename")
SIDES = {
    "plain": "plain directory",
    "alone": "ckptfs, no remote: sealing",
    "remote": "ckptfs, SeaweedFS: sealing and uploading",
}
_PLAIN_S = 15.0
_PAUSE_S = 0.05
_LONGEST_S = 1800.0


@dataclass
class Timings:
    """Seconds of every call, by kind."""

    calls: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})
    busy_s: float = 0.0
    """How long the earlier checkpoint kept the daemon busy."""

    def timed(self, call: str, function: Callable[..., T], *arguments: object) -> T:
        started = time.perf_counter()
        result = function(*arguments)
        self.calls[call].append(time.perf_counter() - started)
        return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gib", type=float, default=1, help="size of the earlier checkpoint")
    options.add_argument("--format", choices=("npy", "unknown"), default="npy", help="unknown: many small chunks")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--sides", default=",".join(SIDES), help="which, in this order")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    arguments = options.parse_args()
    sides = arguments.sides.split(",")
    timings = {side: Timings() for side in sides}
    size = int(arguments.gib * GIB)
    with machine.workspace(arguments.dir) as work, Seaweed() as server:
        os.environ.update(server.environment())
        for number in range(arguments.rounds):
            for side in sides:
                where = work / f"{side}-{number}"
                where.mkdir()
                url = f"s3://{server.create_bucket(f'stall-{number}')}/run" if side == "remote" else None
                measure(timings[side], side, where, url, size, arguments.format)
                shutil.rmtree(where)
                shown = ", ".join(f"{call} {max(timings[side].calls[call]) * 1e3:.0f}" for call in CALLS)
                console.print(f"   {SIDES[side]}, round {number + 1}: longest so far, ms: {shown}")
    report(timings, arguments.gib, arguments.format)


def measure(timings: Timings, side: str, where: Path, url: str | None, size: int, kind: str) -> None:
    with ExitStack() as stack:
        if side == "plain":
            directory = where
        else:
            directory = stack.enter_context(ckptfs.mounted(where / "mount", store=where / "store", remote=url))
        save(directory / "earlier", size, kind)
        started = time.perf_counter()
        with saver(directory, timings):
            if side == "plain":
                time.sleep(_PLAIN_S)
            elif not ckptfs.wait(directory / "earlier", "replicated" if url else "sealed", _LONGEST_S):
                raise TimeoutError(f"not done after {_LONGEST_S:.0f} s")
        timings.busy_s += time.perf_counter() - started


def save(path: Path, size: int, kind: str) -> None:
    """A checkpoint of random floats: of a known format, or of one that is cut by content."""
    with open(path, "wb", buffering=0) as file:
        if kind == "npy":
            header = {"descr": "<f4", "fortran_order": False, "shape": (size // 4,)}
            np.lib.format.write_array_header_1_0(file, header)
        else:
            file.write(b"no format that anybody knows")
        source = np.random.default_rng()
        for at in range(0, size, 64 * MIB):
            file.write(source.standard_normal(min(64 * MIB, size - at) // 4, np.float32).data)


@contextmanager
def saver(directory: Path, timings: Timings) -> Iterator[None]:
    """Save small checkpoints until the block ends."""
    stop = threading.Event()
    failed: list[BaseException] = []
    part = os.urandom(MIB)

    def run() -> None:
        number = 0
        try:
            while not stop.wait(_PAUSE_S):
                number += 1
                path = directory / f"later-{number % 10}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                fd = timings.timed("open", os.open, f"{path}.new", flags, 0o644)
                for _ in range(4):
                    timings.timed("write", os.write, fd, part)
                timings.timed("fsync", os.fsync, fd)
                timings.timed("close", os.close, fd)
                timings.timed("rename", os.replace, f"{path}.new", path)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def report(timings: dict[str, Timings], gib: float, kind: str) -> None:
    table = Table(
        title=f"one call of a saver, ms: longest / 99 % / median, while {gib:g} GiB ({kind}) are worked on",
        title_justify="left",
    )
    for heading in ("", *CALLS, "saves", "busy s"):
        table.add_column(heading, justify="right" if heading else "left")
    for side, each in timings.items():
        cells = []
        for call in CALLS:
            seconds = sorted(each.calls[call])
            chosen = (seconds[-1], seconds[int(len(seconds) * 0.99)], seconds[len(seconds) // 2])
            cells.append(" / ".join(f"{one * 1e3:.3g}" for one in chosen))
        table.add_row(SIDES[side], *cells, str(len(each.calls["open"])), f"{each.busy_s:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
