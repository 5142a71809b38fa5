#!/usr/bin/env python3
"""How much memory the daemon takes, whatever the size of the file: saving, sealing, uploading, and reading elsewhere.

    python bench/memory.py [--gib 10] [--unique-gib 2]

One .npy file of --gib is written, of which --unique-gib is random and the rest repeats it. Peaks are the kernel's own
(VmHWM of the daemon), reset before each phase; the file is read back on a second store and every byte compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckptfs  # noqa: E402  (this directory must leave sys.path first)
from bench import machine  # noqa: E402
from bench.machine import GIB, MIB  # noqa: E402
from ckptfs.client import ask  # noqa: E402

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

_BLOCK_BYTES = 64 * MIB
_LONGEST_S = 3600.0


@dataclass(frozen=True)
class Phase:
    """What the daemon took while something went on."""

    name: str
    seconds: float
    peak_bytes: int
    """Largest resident size; pages of mapped files included."""
    after_bytes: int
    cpu_s: float


class Watch:
    """Measures one daemon, phase by phase."""

    def __init__(self, pid: int, phases: list[Phase]) -> None:
        self._pid = pid
        self._phases = phases

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        machine.reset_peak(self._pid)
        started, cpu_before = time.monotonic(), machine.cpu_seconds(machine.process_tree(self._pid))
        yield
        self._phases.append(
            Phase(
                name,
                time.monotonic() - started,
                machine.status_bytes(self._pid, "VmHWM"),
                machine.status_bytes(self._pid, "VmRSS"),
                machine.cpu_seconds(machine.process_tree(self._pid)) - cpu_before,
            )
        )
        console.print(f"   {name}: peak {self._phases[-1].peak_bytes / MIB:.0f} MiB")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gib", type=float, default=10, help="size of the file")
    options.add_argument("--unique-gib", type=float, default=2, help="how much of it is not a repetition")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    arguments = options.parse_args()
    with machine.workspace(arguments.dir) as work:
        phases = run(work, int(arguments.gib * GIB), int(min(arguments.unique_gib, arguments.gib) * GIB))
    report(phases, arguments.gib)


def run(work: Path, size_bytes: int, unique_bytes: int) -> list[Phase]:
    phases: list[Phase] = []
    remote = work / "bucket"
    remote.mkdir()
    unique = np.random.default_rng(1).standard_normal(unique_bytes // 4, np.float32)
    with ckptfs.mounted(work / "mount-1", remote=f"file://{remote}", store=work / "store-1") as directory:
        watch = Watch(ask(work / "store-1", "hello")["pid"], phases)
        with watch.phase("idle after mounting"):
            time.sleep(1)
        with watch.phase("saving"):
            save(directory / "weights.npy", unique, size_bytes)
        with watch.phase("sealing"):
            reach(directory, "sealed")
        with watch.phase("uploading"):
            reach(directory, "replicated")
        with watch.phase("reading what is whole here"):
            compare(directory / "weights.npy", unique, size_bytes)
    with ckptfs.mounted(work / "mount-2", remote=f"file://{remote}", store=work / "store-2") as directory:
        watch = Watch(ask(work / "store-2", "hello")["pid"], phases)
        with watch.phase("reading on a second store"):
            compare(directory / "weights.npy", unique, size_bytes)
    return phases


def save(path: Path, unique: np.ndarray, size_bytes: int) -> None:
    """Write a .npy file of *size_bytes* of data that goes through *unique* again and again."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (size_bytes // 4,)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks(unique, size_bytes):
            file.write(block)


def compare(path: Path, unique: np.ndarray, size_bytes: int) -> None:
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        for block in blocks(unique, size_bytes):
            if file.read(len(block)) != block:
                raise SystemExit(f"{path} was read with other content than it was saved with")
        if file.read(1):
            raise SystemExit(f"{path} is longer than it was saved")


def blocks(unique: np.ndarray, size_bytes: int) -> Iterator[memoryview]:
    data = memoryview(unique).cast("B")
    at = 0
    while at < size_bytes:
        start = at % len(data)
        length = min(_BLOCK_BYTES, len(data) - start, size_bytes - at)
        yield data[start : start + length]
        at += length


def reach(directory: Path, target: str) -> None:
    if not ckptfs.wait(directory, target, timeout=_LONGEST_S):
        raise TimeoutError(f"not {target} after {_LONGEST_S:.0f} s")


def report(phases: list[Phase], gib: float) -> None:
    table = Table(title=f"the daemon's memory, one file of {gib:g} GiB", title_justify="left")
    for heading in ("", "peak MiB", "after MiB", "seconds", "CPU seconds"):
        table.add_column(heading, justify="right" if heading else "left")
    for each in phases:
        sizes = (f"{size / MIB:.0f}" for size in (each.peak_bytes, each.after_bytes))
        table.add_row(each.name, *sizes, f"{each.seconds:.1f}", f"{each.cpu_s:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
