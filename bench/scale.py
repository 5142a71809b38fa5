#!/usr/bin/env python3
"""How the cost of a mount grows with what is in it: with files, with their bytes, with checkpoints.

    python bench/scale.py [--files 10000] [--gib 100] [--checkpoints 10000] [--runs 5] [--sweeps files,gib,checkpoints]

Three sweeps, each on a mount of its own (with a file:// remote on the same disk) that grows by powers of ten up to the
number given (100,000 files take a while):

    files         of 4 KiB, a thousand in each directory
    gib           in files of 1 GiB that are sparse: 16 MiB of each are data, the rest holes
    checkpoints   a directory with weights of 4 KiB, an optimizer of 8 KiB and trainer_state.json each

At every size everything is replicated first; then, --runs times: unmount, mount (timed), list everything as `ls -lR`
does (timed), save 16 MiB (from open to close), wait until it is replicated (from close), read the daemon's resident
size and its peak. Once for each size, a fresh store mounts the same remote and lists everything: that is `elsewhere`.
What should stay flat is mount, save and the time until replicated; the listing may grow with the number of names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckptfs  # noqa: E402  (this directory must leave sys.path first)
from bench import machine  # noqa: E402
from bench.figures import console, names, table  # noqa: E402
from bench.machine import GIB, MIB  # noqa: E402
from ckptfs.client import ask  # noqa: E402

_SMALL_BYTES = 4096
_IN_DIRECTORY = 1000
_DATA_BYTES = 16 * MIB
"""In each sparse file, and in what is saved at every size."""
_LONGEST_S = 7200.0


@dataclass
class Cost:
    """Of one mount with so much in it."""

    size: int
    grow_s: float
    """To make what was added since the size before, and ..."""
    added: int
    replicate_s: float
    """... until it was replicated."""
    mount_s: list[float] = field(default_factory=list)
    list_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    far_mount_s: float = 0.0
    far_list_s: float = 0.0
    catalog_bytes: int = 0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--files", type=int, default=10_000, help="most files")
    options.add_argument("--gib", type=int, default=100, help="most GiB")
    options.add_argument("--checkpoints", type=int, default=10_000, help="most checkpoints")
    options.add_argument("--runs", type=int, default=5, help="mounts at each size")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    sweeps: dict[str, tuple[str, Callable[[Path, int], None], int]] = {
        "files": ("files", add_file, 1),
        "gib": ("GiB", add_sparse, 1),
        "checkpoints": ("checkpoints", add_checkpoint, 10),
    }
    options.add_argument("--sweeps", type=names(sweeps), metavar="SWEEP,...", default=list(sweeps))
    arguments = options.parse_args()
    with machine.workspace(arguments.dir) as work:
        for sweep in arguments.sweeps:
            words, add, first = sweeps[sweep]
            where = work / sweep
            where.mkdir()
            report(words, measure(where, add, powers(first, getattr(arguments, sweep)), arguments.runs))
            shutil.rmtree(where)


def powers(first: int, last: int) -> list[int]:
    """first, 10 first, 100 first ... and last."""
    sizes = [first * 10**power for power in range(10)]
    return [*(size for size in sizes if size < last), last]


def measure(work: Path, add: Callable[[Path, int], None], sizes: list[int], runs: int) -> list[Cost]:
    (work / "bucket").mkdir()
    remote = f"file://{work / 'bucket'}"
    costs: list[Cost] = []
    there = 0
    for size in sizes:
        with ckptfs.mounted(work / "near", remote=remote, store=work / "near-store") as directory:
            started = time.perf_counter()
            for number in range(there, size):
                add(directory, number)
            grown = time.perf_counter()
            replicated(directory)
            costs.append(Cost(size, grown - started, size - there, time.perf_counter() - grown))
            there = size
        for run in range(runs):
            look(costs[-1], work, remote, run)
        look_elsewhere(costs[-1], work, remote)
        console.print(f"   {size}: mount {statistics.median(costs[-1].mount_s):.2f} s")
    return costs


def look(cost: Cost, work: Path, remote: str, run: int) -> None:
    """One mount of the store as it is."""
    data = os.urandom(_DATA_BYTES)
    started = time.perf_counter()
    with ckptfs.mounted(work / "near", remote=remote, store=work / "near-store") as directory:
        cost.mount_s.append(time.perf_counter() - started)
        cost.list_s.append(list_all(directory))
        path = directory / f"saved-{run}"
        started = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            file.write(data)
        cost.save_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        replicated(path)
        cost.publish_s.append(time.perf_counter() - started)
        pid = ask(work / "near-store", "hello")["pid"]
        cost.resident_bytes.append(machine.status_bytes(pid, "VmRSS"))
        cost.peak_bytes.append(machine.status_bytes(pid, "VmHWM"))
        path.unlink()
    cost.catalog_bytes = (work / "near-store" / "catalog.db").stat().st_size


def look_elsewhere(cost: Cost, work: Path, remote: str) -> None:
    started = time.perf_counter()
    with ckptfs.mounted(work / "far", remote=remote, store=work / "far-store") as directory:
        cost.far_mount_s = time.perf_counter() - started
        cost.far_list_s = list_all(directory)
    shutil.rmtree(work / "far-store")


def list_all(directory: Path) -> float:
    """Seconds to see every name and its attributes."""
    started = time.perf_counter()
    left = [os.fspath(directory)]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
    return time.perf_counter() - started


def replicated(path: Path) -> None:
    if not ckptfs.wait(path, "replicated", _LONGEST_S):
        raise TimeoutError(f"{path}: not replicated after {_LONGEST_S:.0f} s")


def add_file(directory: Path, number: int) -> None:
    folder = directory / f"folder-{number // _IN_DIRECTORY}"
    if number % _IN_DIRECTORY == 0:
        folder.mkdir()
    (folder / f"{number}").write_bytes(os.urandom(_SMALL_BYTES))


def add_sparse(directory: Path, number: int) -> None:
    with open(directory / f"sparse-{number}.bin", "wb", buffering=0) as file:
        file.write(os.urandom(_DATA_BYTES))
        file.truncate(GIB)


def add_checkpoint(directory: Path, number: int) -> None:
    checkpoint = directory / f"checkpoint-{number}"
    checkpoint.mkdir()
    (checkpoint / "model.bin").write_bytes(os.urandom(_SMALL_BYTES))
    (checkpoint / "optimizer.bin").write_bytes(os.urandom(2 * _SMALL_BYTES))
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": number}))


def report(words: str, costs: list[Cost]) -> None:
    runs = len(costs[0].mount_s)
    found = table(f"medians of {runs} mounts at each size", words, *(f"{each.size:,}" for each in costs))

    def middle(values: list[float], scale: float = 1.0, digits: int = 2) -> str:
        return f"{statistics.median(values) * scale:.{digits}f}"

    rows: dict[str, Callable[[Cost], str]] = {
        "to add one, ms": lambda each: f"{each.grow_s / each.added * 1e3:.2f}",
        "until the added were replicated, s": lambda each: f"{each.replicate_s:.1f}",
        "mount, s": lambda each: middle(each.mount_s),
        "first listing, s": lambda each: middle(each.list_s, digits=3),
        "save 16 MiB, ms": lambda each: middle(each.save_s, 1e3, 1),
        "until it is replicated, s": lambda each: middle(each.publish_s),
        "daemon resident, MiB": lambda each: middle([*each.resident_bytes], 1 / MIB, 0),
        "daemon's peak, MiB": lambda each: f"{max(each.peak_bytes) / MIB:.0f}",
        "catalog, MiB": lambda each: f"{each.catalog_bytes / MIB:.1f}",
        "elsewhere: mount, s": lambda each: f"{each.far_mount_s:.2f}",
        "elsewhere: first listing, s": lambda each: f"{each.far_list_s:.3f}",
    }
    for row, value in rows.items():
        found.add_row(row, *map(value, costs))
    console.print(found)


if __name__ == "__main__":
    main()
