#!/usr/bin/env python3
"""How fast a fresh checkpoint leaves the machine, and how soon another one can read it.

    python bench/upload.py [--size-mib 1024] [--runs 5] [--kinds random,bf16,fp32] [--latency-ms 30 --mbit 1000]

A safetensors file of content that nobody has seen is saved, and from its close on are timed, interleaved:

    raw        parallel boto3 PUTs of encoded packs as ckptfs made them, over as many connections as it uses
    upload     `ckptfs wait --for replicated`: flush, cut, hash, encode, send, publish
    elsewhere  until a second mount shows the file whole and gives its last byte; unhurried, so it settles first

All of them send the same number of bytes, to a SeaweedFS of this machine whose processor time is shown beside the
sender's: on few cores they compete. With --latency-ms or --mbit everything passes a proxy that makes the link that long
and that thin. `x raw` is the time of the raw PUTs by one's own; `beyond raw s` is the time that was added to them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckptfs  # noqa: E402  (this directory must leave sys.path first)
from bench import bucket, machine  # noqa: E402
from bench.figures import console, names, spread, table, turns  # noqa: E402
from bench.machine import GIB, MIB, Clock  # noqa: E402
from ckptfs.client import ask  # noqa: E402
from ckptfs.config import Settings  # noqa: E402
from tests.support.seaweed import Seaweed  # noqa: E402

_TENSORS = 16
_LOOK_EVERY_S = 0.02
_LONGEST_S = 1800.0

WEIGHTS = 0.02
"""Standard deviation of weights as they are initialised: few exponents, which is what compresses."""
KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "random": lambda size: torch.randint(-(1 << 31), 1 << 31, (size // 4,), dtype=torch.int32),
    "bf16": lambda size: torch.randn(size // 2, dtype=torch.float32).mul_(WEIGHTS).to(torch.bfloat16),
    "fp32": lambda size: torch.randn(size // 4, dtype=torch.float32).mul_(WEIGHTS),
}


@dataclass
class Results:
    """Of one way to send one kind of data."""

    seconds: list[float] = field(default_factory=list)
    encoded_bytes: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of who sends."""
    server_cpu_s: list[float] = field(default_factory=list)
    """Of the server, and of the proxy where there is one."""

    def add(self, sending: Clock, serving: Clock) -> None:
        self.seconds.append(sending.seconds)
        self.cpu_s.append(sending.cpu_s)
        self.server_cpu_s.append(serving.cpu_s)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--size-mib", type=int, default=1024, help="of each file")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument(
        "--kinds", type=names(KINDS), metavar="KIND,...", default=list(KINDS), help="of " + ", ".join(KINDS)
    )
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    bucket.add_link_options(options)
    arguments = options.parse_args()
    # The packs that are put raw lie in memory, beside the file's pages.
    size = min(arguments.size_mib * MIB, machine.available_bytes() // 6)
    with (
        machine.workspace(arguments.dir) as work,
        Seaweed() as server,
        bucket.link(server.endpoint, arguments) as link,
    ):
        os.environ.update(server.environment(link.endpoint))
        for kind in arguments.kinds:
            sender = Sender(kind, size, work, server, link)
            sender.upload(Results())  # the packs of the first raw PUTs; and it warms up
            results = {way: Results() for way in ("raw", "upload", "elsewhere")}
            for _, way in turns(list(results), arguments.runs):
                getattr(sender, way)(results[way])
            report(kind, size, results, arguments)


class Sender:
    """Sends one kind of data in every way. Each time has a bucket of its own, whose disk space is free again after."""

    def __init__(self, kind: str, size_bytes: int, work: Path, server: Seaweed, link: bucket.Link) -> None:
        self._make = KINDS[kind]
        self._size_bytes = size_bytes
        self._work = work
        self._server = server
        self._server_pids = [*machine.process_tree(server.pid), *link.pids]
        self._packs: dict[str, bytes] = {}
        """Those of the latest upload."""

    def raw(self, result: Results) -> None:
        target, connections = self._server.create_bucket("raw"), most_connections()
        s3 = bucket.client(connections)
        with Clock([os.getpid()]) as sending, Clock(self._server_pids) as serving:
            bucket.put(s3, target, self._packs, connections)
        result.add(sending, serving)
        result.encoded_bytes.append(sum(map(len, self._packs.values())))
        self._server.delete_bucket(target)

    def upload(self, result: Results) -> None:
        def replicated(path: Path) -> None:
            if not ckptfs.wait(path, "replicated", _LONGEST_S):
                raise TimeoutError(f"not replicated after {_LONGEST_S:.0f} s")

        target = self._server.create_bucket("upload")
        self._send(target, replicated, result)
        self._packs = bucket.fetch(target, "run/packs/")
        result.encoded_bytes.append(sum(map(len, self._packs.values())))
        self._server.delete_bucket(target)

    def elsewhere(self, result: Results) -> None:
        target = self._server.create_bucket("elsewhere")
        with ckptfs.mounted(self._work / "far", remote=f"s3://{target}/run", store=self._work / "far-store") as far:

            def readable(path: Path) -> None:
                until_readable(far / path.name, path.stat().st_size)

            self._send(target, readable, result)
        shutil.rmtree(self._work / "far-store")
        result.encoded_bytes.append(sum(bucket.sizes(target, "run/packs/").values()))
        self._server.delete_bucket(target)

    def _send(self, target: str, arrive: Callable[[Path], None], result: Results) -> None:
        """Save a fresh file and time *arrive*, which returns when it is where it belongs."""
        store = self._work / "near-store"
        tensors = {f"layer.{number}": self._make(self._size_bytes // _TENSORS) for number in range(_TENSORS)}
        with ckptfs.mounted(self._work / "near", remote=f"s3://{target}/run", store=store) as directory:
            pid = ask(store, "hello")["pid"]
            save_file(tensors, directory / "model.safetensors")
            with Clock([pid], children=True) as sending, Clock(self._server_pids) as serving:
                arrive(directory / "model.safetensors")
        shutil.rmtree(store)
        result.add(sending, serving)


def most_connections() -> int:
    """Over which ckptfs sends packs, once it has found out that the remote takes them."""
    tuning = Settings().tuned
    return min(tuning.upload_most, tuning.upload_bytes // tuning.pack_bytes)


def until_readable(path: Path, size_bytes: int) -> None:
    """Return once *path* has all its bytes and the last of them were read."""
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        try:
            with open(path, "rb") as file:
                if file.seek(-1, os.SEEK_END) == size_bytes - 1 and file.read(1):
                    return
        except FileNotFoundError:
            pass
        time.sleep(_LOOK_EVERY_S)
    raise TimeoutError(f"not seen on the second mount after {_LONGEST_S:.0f} s")


def report(kind: str, size: int, results: dict[str, Results], arguments: argparse.Namespace) -> None:
    title = f"{kind}: {size / GIB:.2f} GiB, {arguments.runs} runs, {bucket.words_for_link(arguments)}"
    settle_s = Settings().settle_s
    found = table(title, "", "seconds", "GB/s", "encoded MB/s", "x raw", "beyond raw s", "CPU s/GB", "server CPU s/GB")
    raw_s = statistics.median(results["raw"].seconds)
    for way, each in results.items():
        middle = statistics.median(each.seconds)
        found.add_row(
            way,
            spread(each.seconds),
            f"{size / 1e9 / middle:.3f}",
            f"{statistics.median(each.encoded_bytes) / 1e6 / middle:.0f}",
            f"{raw_s / middle:.2f}" if way != "elsewhere" else "",
            f"{middle - raw_s:.2f}" if way != "raw" else "",
            *(f"{statistics.median(cpu_s) / (size / 1e9):.2f}" for cpu_s in (each.cpu_s, each.server_cpu_s)),
        )
    console.print(found)
    encoded = statistics.median(results["upload"].encoded_bytes) / size
    console.print(
        f"   encoded: {encoded:.0%} of the file. Of what elsewhere takes beyond raw, {settle_s:g} s are for settling."
    )


if __name__ == "__main__":
    main()
