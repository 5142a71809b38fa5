#!/usr/bin/env python3
"""How fast a checkpoint comes back on a machine that has only the bucket.

    python bench/restore.py [--gib 2] [--runs 5] [--latency-ms 30 --mbit 1000]

A torch file and a set of safetensors shards are saved through one mount into a real S3 server (SeaweedFS). Then, with
cold caches and a fresh store each time, interleaved:

    raw       a parallel boto3 download of the very packs that hold them, 12 ranges at once, into files
    read      plain sequential reads of 1 MiB through a second mount
    load      torch.load, or safetensors' load_file of each shard
    prefetch  `ckptfs prefetch`

The rate is that of the files' bytes; `x raw` compares the time with the download of the encoded bytes, which are fewer.
With --latency-ms or --mbit everything passes a proxy that makes the link that long and that thin.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import torch
from boto3.s3.transfer import TransferConfig
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckptfs  # noqa: E402  (this directory must leave sys.path first)
from bench import machine  # noqa: E402
from bench.machine import GIB, MIB  # noqa: E402
from ckptfs.client import ask  # noqa: E402
from tests.support.proxy import FaultProxy, Faults  # noqa: E402
from tests.support.seaweed import Seaweed  # noqa: E402

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

_TENSORS = 96
_SHARDS = 4
_CONNECTIONS = 12


@dataclass
class Results:
    """Of one way to restore one kind of checkpoint."""

    seconds: list[float] = field(default_factory=list)
    first_byte_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gib", type=float, default=2, help="size of each checkpoint")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--latency-ms", type=float, default=0, help="added to each request")
    options.add_argument("--mbit", type=float, help="bandwidth of the link, in megabits a second")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    arguments = options.parse_args()
    with machine.workspace(arguments.dir) as work, Seaweed() as server, link(server.endpoint, arguments) as endpoint:
        os.environ.update(server.environment())
        bucket = server.create_bucket("bench")
        size = int(arguments.gib * GIB)
        for kind, save in (("torch", save_torch), ("safetensors", save_safetensors)):
            remote = f"s3://{bucket}/{kind}"
            with ckptfs.mounted(work / "near", remote=remote, store=work / f"{kind}-near-store") as directory:
                save(directory, size)
                ckptfs.wait(directory, "replicated")
            shutil.rmtree(work / f"{kind}-near-store")
            os.environ.update(server.environment(endpoint))
            report(kind, size, measure(kind, work, bucket, remote, arguments.runs), arguments)
            os.environ.update(server.environment())


def save_torch(directory: Path, size: int) -> None:
    torch.save(tensors(size, _TENSORS), directory / "model.pt")


def save_safetensors(directory: Path, size: int) -> None:
    for shard in range(_SHARDS):
        save_file(tensors(size // _SHARDS, _TENSORS // _SHARDS), directory / f"model-{shard}.safetensors")


def tensors(size: int, count: int) -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.randn(size // count // 4) for number in range(count)}


def measure(kind: str, work: Path, bucket: str, remote: str, runs: int) -> dict[str, Results]:
    """Each way in turn, beginning with another one each time."""
    ways: dict[str, Callable[[Path, Results], None]] = {"read": read, "load": load, "prefetch": prefetch}
    results: dict[str, Results] = {}
    for run in range(runs):
        names = ["raw", *ways]
        for name in names[run % len(names) :] + names[: run % len(names)]:
            result = results.setdefault(name, Results())
            machine.drop_caches()
            if name == "raw":
                started = time.perf_counter()
                download(bucket, f"{kind}/packs/", work / "raw")
                result.seconds.append(time.perf_counter() - started)
                shutil.rmtree(work / "raw")
                continue
            store = work / "far-store"
            with ckptfs.mounted(work / "far", remote=remote, store=store) as directory:
                pid = ask(store, "hello")["pid"]
                before = machine.cpu_seconds([pid])
                started = time.perf_counter()
                ways[name](directory, result)
                result.seconds.append(time.perf_counter() - started)
                result.cpu_s.append(machine.cpu_seconds([pid]) - before)
            gc.collect()
            shutil.rmtree(store)
    return results


def read(directory: Path, result: Results) -> None:
    started = time.perf_counter()
    first = True
    buffer = bytearray(MIB)
    for path in sorted(directory.iterdir()):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                if first:
                    result.first_byte_s.append(time.perf_counter() - started)
                    first = False


def load(directory: Path, result: Results) -> None:
    """And touch every tensor: safetensors maps them, and torch takes its time."""
    for path in sorted(directory.iterdir()):
        loaded = torch.load(path) if path.suffix == ".pt" else load_file(path)
        for tensor in loaded.values():
            tensor.view(torch.int32).sum()


def prefetch(directory: Path, result: Results) -> None:
    ckptfs.prefetch(directory)


def download(bucket: str, prefix: str, target: Path) -> None:
    """All objects below *prefix*, several at once, in parallel ranges."""
    target.mkdir()
    client = boto3.client("s3")
    listing = client.list_objects_v2(Bucket=bucket, Prefix=prefix)
    keys = [each["Key"] for each in listing["Contents"]]
    assert not listing["IsTruncated"]
    config = TransferConfig(multipart_threshold=8 * MIB, multipart_chunksize=8 * MIB, max_concurrency=4)
    with ThreadPoolExecutor(_CONNECTIONS // 4) as pool:
        done = [
            pool.submit(client.download_file, bucket, key, str(target / key.replace("/", "-")), Config=config)
            for key in keys
        ]
        for each in done:
            each.result()


@contextmanager
def link(endpoint: str, arguments: argparse.Namespace) -> Iterator[str]:
    """The endpoint behind a link as asked for; in a process of its own, whose work is not the contestants'."""
    if not arguments.latency_ms and not arguments.mbit:
        yield endpoint
        return
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_proxy, args=(far, endpoint, arguments.latency_ms / 1e3, arguments.mbit), daemon=True
    )
    process.start()
    try:
        yield near.recv()
    finally:
        process.terminate()
        process.join(10)


def _proxy(pipe, endpoint: str, latency_s: float, mbit: float | None) -> None:  # type: ignore[no-untyped-def]
    rate = mbit * 1e6 / 8 if mbit else None
    with FaultProxy(endpoint) as proxy:
        proxy.faults = Faults(latency_s=latency_s, up_bytes_per_s=rate, down_bytes_per_s=rate)
        pipe.send(proxy.endpoint)
        time.sleep(1e6)


def report(kind: str, size: int, results: dict[str, Results], arguments: argparse.Namespace) -> None:
    shaped = f", {arguments.latency_ms:.0f} ms, {arguments.mbit or 'any'} Mb/s" if arguments.latency_ms else ""
    table = Table(title=f"{kind}: {size / GIB:.2f} GiB, {arguments.runs} runs, cold{shaped}", title_justify="left")
    for heading in ("", "seconds", "GB/s", "x raw", "first byte s", "CPU s/GB"):
        table.add_column(heading, justify="right" if heading else "left")
    raw = statistics.median(results["raw"].seconds)
    for name, each in results.items():
        middle = statistics.median(each.seconds)
        table.add_row(
            name,
            f"{middle:.2f} [{min(each.seconds):.2f}-{max(each.seconds):.2f}]",
            f"{size / 1e9 / middle:.2f}",
            f"{raw / middle:.2f}",
            f"{statistics.median(each.first_byte_s):.2f}" if each.first_byte_s else "",
            f"{statistics.median(each.cpu_s) / (size / 1e9):.2f}" if each.cpu_s else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
