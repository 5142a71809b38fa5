#!/usr/bin/env python3
"""What small files cost: a plain directory, ckptfs, and its peers, interleaved on one disk.

    python bench/metadata.py [--files 10000] [--runs 5] [--only plain,ckptfs,juicefs]

Each phase is timed over --files files of 4 KiB: create (open, write, close), list (`ls -l`: names and attributes), list
again, rename, unlink; then an array of as many chunks of 4 KiB, saved by zarr, and by tensorstore, which syncs each
file and its directory, where they are installed. Milliseconds a file, medians; ratios to the plain directory.

An ext4 without a journal takes 0.4 ms more to create a file, whosever it is, while many were just removed: choose
another disk with --dir.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import contestants, machine  # noqa: E402  (this directory must leave sys.path first)
from bench.contestants import PLAIN, Contestant  # noqa: E402
from bench.figures import names, turns  # noqa: E402

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

_SIZE = 4096


def main() -> None:
    possible = contestants.available()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--files", type=int, default=10_000)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    options.add_argument(
        "--only", type=names(possible), metavar="NAME,...", help=f"of {', '.join(possible)}",
        default=[name for name in possible if name not in (*contestants.OPTIONAL, "rclone")],
    )  # fmt: skip
    arguments = options.parse_args()
    timings: dict[str, dict[str, list[float]]] = {}
    with machine.workspace(arguments.dir) as work, ExitStack() as stack:
        mounted = []
        for name in arguments.only:
            (work / name).mkdir()
            mounted.append(stack.enter_context(possible[name](work / name)))
        for _, contestant in turns(mounted, arguments.runs):
            visit(contestant, arguments.files, timings)
    report(timings, arguments)


def visit(contestant: Contestant, count: int, timings: dict[str, dict[str, list[float]]]) -> None:
    top = contestant.directory / "small"
    top.mkdir()
    phases: list[tuple[str, Callable[[], None]]] = [
        ("create", lambda: create(top, count)),
        ("list", lambda: list_all(top)),
        ("list again", lambda: list_all(top)),
        ("rename", lambda: rename(top, count)),
        ("unlink", lambda: unlink(top, count)),
    ]
    array = np.random.default_rng(0).standard_normal((count, _SIZE // 4), dtype=np.float32)
    if find_spec("zarr"):
        phases.append(("zarr save", lambda: save_zarr(contestant.directory / "zarr", array)))
    if find_spec("tensorstore"):
        phases.append(("tensorstore save", lambda: save_tensorstore(contestant.directory / "tensorstore", array)))
    for name, phase in phases:
        started = time.perf_counter()
        phase()
        taken = time.perf_counter() - started
        timings.setdefault(name, {}).setdefault(contestant.name, []).append(taken / count * 1e3)
    for name in ("small", "zarr", "tensorstore"):
        shutil.rmtree(contestant.directory / name, ignore_errors=True)
    contestant.settle()


def create(top: Path, count: int) -> None:
    data = os.urandom(_SIZE)
    for number in range(count):
        with open(f"{top}/{number}", "wb", buffering=0) as file:
            file.write(data)


def list_all(top: Path) -> None:
    with os.scandir(top) as entries:
        for entry in entries:
            entry.stat(follow_symlinks=False)


def rename(top: Path, count: int) -> None:
    for number in range(count):
        os.rename(f"{top}/{number}", f"{top}/r{number}")


def unlink(top: Path, count: int) -> None:
    for number in range(count):
        os.unlink(f"{top}/r{number}")


def save_zarr(path: Path, array: np.ndarray) -> None:
    import zarr

    chunks = (1, array.shape[1])
    zarr.create_array(path, shape=array.shape, chunks=chunks, dtype=array.dtype, compressors=None)[:] = array


def save_tensorstore(path: Path, array: np.ndarray) -> None:
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}
    metadata = {"chunks": [1, array.shape[1]], "compressor": None}
    opened = tensorstore.open({**spec, "metadata": metadata}, create=True, dtype=array.dtype, shape=array.shape)
    opened.result().write(array).result()


def report(timings: dict[str, dict[str, list[float]]], arguments: argparse.Namespace) -> None:
    table = Table(title=f"{arguments.files} files of 4 KiB, {arguments.runs} runs, ms a file", title_justify="left")
    table.add_column("")
    for name in arguments.only:
        table.add_column(name, justify="right")
    for phase, by_contestant in timings.items():
        medians = {name: statistics.median(values) for name, values in by_contestant.items()}
        plain = medians.get(PLAIN)
        cells = [f"{medians[name]:.3f}" + (f" ({medians[name] / plain:.1f}x)" if plain else "") for name in medians]
        table.add_row(phase, *(cells[list(medians).index(name)] for name in arguments.only))
    console.print(table)


if __name__ == "__main__":
    main()
