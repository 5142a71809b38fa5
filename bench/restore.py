#!/usr/bin/env python3
"""How fast a checkpoint comes back on a machine that has only the bucket, whole and in parts.

    python bench/restore.py [--gib 2] [--tensors 96] [--runs 5] [--delta] [--latency-ms 30 --mbit 1000]

A torch file and a set of safetensors shards are saved through one mount into a real S3 server (SeaweedFS). Then, with
cold caches and a fresh store each time, interleaved, all of it:

    raw         a parallel boto3 download of the very packs that hold them, 12 ranges at once, into files
    read        plain sequential reads of 1 MiB through a second mount
    load        torch.load, or safetensors' load_file of each shard
    prefetch    `ckptfs prefetch`

and as mapped tensors (torch.load(mmap=True), safe_open):

    one tensor  the first that a reader asks for, from the middle of a file
    a few       every eighth tensor
    processes   all tensors, by --processes at once, as the ranks of one machine do

The rate is that of the files' bytes; `x raw` compares the time with the download of the encoded bytes, which are fewer.
`x needed` compares the bytes that were fetched, counted by a proxy on the way, with the encoded bytes of the tensors
that were touched, however many processes touched them. With --latency-ms or --mbit everything passes a proxy that makes
the link that long and that thin; a first byte is then also told in round trips.

With --delta what comes back is the second checkpoint of a series: its tensors moved a little since the first, and are
stored as differences to it. Raw is then a download of both.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckptfs  # noqa: E402  (this directory must leave sys.path first)
from bench import bucket, machine  # noqa: E402
from bench.crew import Crew  # noqa: E402
from bench.figures import console, spread, table, turns  # noqa: E402
from bench.machine import GIB, MIB, Clock  # noqa: E402
from ckptfs.client import ask  # noqa: E402
from tests.support.seaweed import Seaweed  # noqa: E402

_SHARDS = 4
_A_FEW = 8


@dataclass
class Results:
    """Of one way to restore one kind of checkpoint."""

    seconds: list[float] = field(default_factory=list)
    first_byte_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    touched_bytes: int = 0
    """Of tensors, not counted again for a second process."""
    fetched_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Saved:
    """A checkpoint in the bucket."""

    kind: str
    bucket: str
    size_bytes: int
    packs: dict[str, int]
    """Their keys, with their bytes."""
    path: str
    """In the mount."""

    @property
    def encoded_bytes(self) -> int:
        return sum(self.packs.values())

    @property
    def remote(self) -> str:
        return f"s3://{self.bucket}/{self.kind}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gib", type=float, default=2, help="size of each checkpoint")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--tensors", type=int, default=96, help="in each checkpoint, of the same size")
    options.add_argument("--processes", type=int, default=8, help="how many map the checkpoint at once")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    options.add_argument("--delta", action="store_true", help="restore what is stored as differences")
    bucket.add_link_options(options)
    arguments = options.parse_args()
    with (
        machine.workspace(arguments.dir) as work,
        Seaweed() as server,
        bucket.link(server.endpoint, arguments) as link,
        bucket.link(server.endpoint, arguments, counting=True) as counted,
        Crew(arguments.processes, Mapped, 0) as crew,
    ):
        os.environ.update(server.environment())
        name = server.create_bucket("bench")
        for kind, save in (("torch", save_torch), ("safetensors", save_safetensors)):
            saved = upload(kind, save, arguments, name, work)
            os.environ["AWS_ENDPOINT_URL"] = link.endpoint
            report_whole(saved, measure_whole(saved, work, arguments.runs), arguments)
            os.environ["AWS_ENDPOINT_URL"] = counted.endpoint
            report_parts(saved, measure_parts(saved, work, counted, crew, arguments), arguments)
            os.environ["AWS_ENDPOINT_URL"] = server.endpoint


def upload(
    kind: str, save: Callable[[Path, int, int, float], None], arguments: argparse.Namespace, name: str, work: Path
) -> Saved:
    size, store, steps = int(arguments.gib * GIB), work / "near-store", 1 + arguments.delta
    with ckptfs.mounted(work / "near", remote=f"s3://{name}/{kind}", store=store) as directory:
        for step in range(steps):
            (directory / f"step-{step}").mkdir()
            save(directory / f"step-{step}", size, arguments.tensors, 1e-4 * step)
            ckptfs.wait(directory, "replicated")
    shutil.rmtree(store)
    return Saved(kind, name, size, bucket.sizes(name, f"{kind}/packs/"), f"step-{steps - 1}")


def save_torch(directory: Path, size: int, count: int, moved: float) -> None:
    torch.save(tensors(size, count, moved), directory / "model.pt")


def save_safetensors(directory: Path, size: int, count: int, moved: float) -> None:
    for shard in range(_SHARDS):
        name = f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors"
        save_file(tensors(size // _SHARDS, count // _SHARDS, moved, shard), directory / name)


def tensors(size: int, count: int, moved: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """The same for the same *seed*, but *moved* by that share of a standard deviation."""
    random, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    found = {f"layer.{number}": torch.randn(size // count // 4, generator=random) for number in range(count)}
    for tensor in found.values() if moved else ():
        tensor += moved * torch.randn(tensor.shape, generator=other)
    return found


@contextmanager
def fresh_mount(saved: Saved, work: Path) -> Iterator[tuple[Path, int]]:
    """A mount with an empty store and cold caches, and its daemon's pid."""
    machine.drop_caches()
    store = work / "far-store"
    with ckptfs.mounted(work / "far", remote=saved.remote, store=store) as directory:
        yield directory / saved.path, ask(store, "hello")["pid"]
        gc.collect()  # what is mapped would keep the mount busy
    shutil.rmtree(store)


def measure_whole(saved: Saved, work: Path, runs: int) -> dict[str, Results]:
    ways: dict[str, Callable[[Path, Results], None]] = {"read": read, "load": load, "prefetch": prefetch}
    results = {way: Results() for way in ("raw", *ways)}
    for _, way in turns(list(results), runs):
        result = results[way]
        if way == "raw":
            machine.drop_caches()
            s3 = bucket.client()
            with Clock([]) as clock:
                bucket.download(s3, saved.bucket, saved.packs, work / "raw")
            shutil.rmtree(work / "raw")
        else:
            with fresh_mount(saved, work) as (directory, pid):
                with Clock([pid]) as clock:
                    ways[way](directory, result)
                result.cpu_s.append(clock.cpu_s)
        result.seconds.append(clock.seconds)
    return results


def read(directory: Path, result: Results) -> None:
    started = time.perf_counter()
    paths = sorted(directory.iterdir())
    with open(paths[0], "rb", buffering=0) as file:
        assert file.read(1)
        result.first_byte_s.append(time.perf_counter() - started)
    buffer = bytearray(MIB)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def load(directory: Path, result: Results) -> None:
    """And touch every tensor: safetensors maps them, and torch takes its time."""
    for path in sorted(directory.iterdir()):
        loaded = torch.load(path) if path.suffix == ".pt" else load_file(path)
        for tensor in loaded.values():
            touch(tensor)


def prefetch(directory: Path, result: Results) -> None:
    ckptfs.prefetch(directory)


def measure_parts(
    saved: Saved, work: Path, counted: bucket.Link, crew: Crew, arguments: argparse.Namespace
) -> dict[str, Results]:
    def by_processes(directory: Path) -> int:
        crew.load([directory] * arguments.processes)
        return saved.size_bytes

    ways: dict[str, Callable[[Path], int]] = {
        "one tensor": lambda directory: touch_mapped(sorted(directory.iterdir())[:1], middle_only=True),
        "a few": lambda directory: touch_mapped(sorted(directory.iterdir()), step=_A_FEW),
        f"{arguments.processes} processes": by_processes,
    }
    results = {way: Results() for way in ways}
    for _, way in turns(list(ways), arguments.runs):
        result = results[way]
        with fresh_mount(saved, work) as (directory, pid):
            counted.take_bytes_down()
            with Clock([pid]) as clock:
                result.touched_bytes = ways[way](directory)
            result.fetched_bytes.append(counted.take_bytes_down())
            result.seconds.append(clock.seconds)
            result.cpu_s.append(clock.cpu_s)
    return results


def touch_mapped(paths: list[Path], *, step: int = 1, middle_only: bool = False) -> int:
    """Map each of *paths* and read every *step*-th tensor, or only the one in the middle; the bytes of these."""
    touched = 0
    for path in paths:
        if path.suffix == ".pt":
            loaded = torch.load(path, mmap=True)
            names, get = list(loaded), loaded.__getitem__
        else:
            file: Any = safe_open(path, "pt")
            names, get = list(file.keys()), file.get_tensor
        for name in [names[len(names) // 2]] if middle_only else names[::step]:
            touched += touch(get(name))
    return touched


def touch(tensor: torch.Tensor) -> int:
    """Read all of it; its bytes."""
    tensor.view(torch.int32).sum()
    return tensor.nbytes


class Mapped:
    """What each process of a crew does: `load` maps everything in a directory and reads it."""

    name = suffix = ""

    def __init__(self, size_bytes: int) -> None: ...

    def change(self) -> None: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> int:
        return touch_mapped(sorted(path.iterdir()))

    def matches(self, loaded: int) -> bool:
        return loaded > 0


def report_whole(saved: Saved, results: dict[str, Results], arguments: argparse.Namespace) -> None:
    title = f"{words(saved, arguments)}, all of it"
    trips = ["round trips"] if arguments.latency_ms else []
    found = table(title, "", "seconds", "GB/s", "x raw", "first byte s", *trips, "CPU s/GB")
    raw = statistics.median(results["raw"].seconds)
    for name, each in results.items():
        middle = statistics.median(each.seconds)
        first = statistics.median(each.first_byte_s) if each.first_byte_s else None
        found.add_row(
            name,
            spread(each.seconds),
            f"{saved.size_bytes / 1e9 / middle:.2f}",
            f"{raw / middle:.2f}",
            f"{first:.3f}" if first else "",
            *(f"{first * 1e3 / arguments.latency_ms:.1f}" if first else "" for _ in trips),
            f"{statistics.median(each.cpu_s) / (saved.size_bytes / 1e9):.2f}" if each.cpu_s else "",
        )
    console.print(found)


def report_parts(saved: Saved, results: dict[str, Results], arguments: argparse.Namespace) -> None:
    title = f"{words(saved, arguments)}, mapped, past a proxy that counts"
    found = table(title, "", "seconds", "touched MiB", "fetched MiB", "x needed", "CPU s/GB")
    for name, each in results.items():
        fetched = statistics.median(each.fetched_bytes)
        needed = each.touched_bytes * saved.encoded_bytes / saved.size_bytes
        found.add_row(
            name,
            spread(each.seconds, 3),
            f"{each.touched_bytes / MIB:.1f}",
            f"{fetched / MIB:.1f}",
            f"{fetched / needed:.2f}",
            f"{statistics.median(each.cpu_s) / (each.touched_bytes / 1e9):.2f}",
        )
    console.print(found)


def words(saved: Saved, arguments: argparse.Namespace) -> str:
    size = f"{saved.size_bytes / GIB:.2f} GiB in {arguments.tensors} tensors{', deltas' if arguments.delta else ''}"
    return f"{saved.kind}: {size}, {arguments.runs} runs, cold, {bucket.words_for_link(arguments)}"


if __name__ == "__main__":
    main()
