#!/usr/bin/env python3
"""What training loses while a checkpoint is sealed and uploaded behind it, and what the upload loses to training.

    python bench/interference.py [--gib 10] [--runs 5] [--threads N] [--train-s 120] [--server-priority idle|normal]

A torch training loop keeps --threads cores busy in a process of its own, all of them if not said otherwise. Each run
does, on fresh data every time:

    idle      save --gib as one file, and wait until it is replicated, while nothing else wants the processors
    training  train alone; pause for the save, as trainers do; train until it is replicated, or for --train-s; train
              alone again once it is; train beside a process that only hashes memory, with processor time that nobody
              else wants: what this machine's processors lose to any neighbour

The slowdown compares steps during the upload with the steps alone before and after it, in the same run. The upload's
pace is what was uploaded a second, sealing included, while it trained and on the idle machine. Then the checkpoint is
brought back on a second store. CPU and memory are the daemon's with its background process; memory is the most of both
and of the packs between them while it uploads, or of the daemon alone at any time.

The S3 server (SeaweedFS) runs on this machine too: with --server-priority idle, the default, only with processor time
that nobody else wants, so that its work is not charged to ckptfs. Where training leaves none, little is uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckptfs  # noqa: E402  (this directory must leave sys.path first)
from bench import machine  # noqa: E402
from bench.figures import console, spread, table, turns  # noqa: E402
from bench.machine import GIB, MIB, Clock  # noqa: E402
from bench.workloads import save_streamed  # noqa: E402
from ckptfs.client import ask  # noqa: E402
from tests.support.footprint import Footprint  # noqa: E402
from tests.support.seaweed import Seaweed  # noqa: E402

_LONGEST_S = 7200.0
_SIDES = ("idle", "training")


@dataclass
class Results:
    """Of one side."""

    save_s: list[float] = field(default_factory=list)
    upload_s: list[float] = field(default_factory=list)
    """From the close until it was replicated."""
    save_cpu_s: list[float] = field(default_factory=list)
    upload_cpu_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)
    restore_s: list[float] = field(default_factory=list)
    restore_cpu_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)
    """Share by which a step took longer during the upload."""
    slowdown_by_hashing: list[float] = field(default_factory=list)
    """The same beside a process that only hashes."""
    longest_alone_s: list[float] = field(default_factory=list)
    longest_during_s: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    """Bytes a second that were sealed and uploaded, while it trained."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gib", type=float, default=10, help="size of the checkpoint")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--alone-s", type=float, default=30, help="how long to train alone before and after")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the training")
    options.add_argument("--train-s", type=float, default=120, help="train for at most so long beside the upload")
    options.add_argument("--width", type=int, default=1024, help="of the model: 1024 makes steps of about 0.1 s")
    options.add_argument("--server-priority", choices=("idle", "normal"), default="idle")
    options.add_argument("--dir", type=Path, help="where everything lies [default: the temporary directory]")
    arguments = options.parse_args()
    size = int(arguments.gib * GIB)
    results = {side: Results() for side in _SIDES}
    with machine.workspace(arguments.dir) as work, Seaweed() as server:
        os.environ.update(server.environment())
        priority = machine.make_idle(server.pid) if arguments.server_priority == "idle" else "normal"
        with training(arguments.width, arguments.threads) as trainer:
            for run, side in turns(_SIDES, arguments.runs):
                seed = 2 * run + _SIDES.index(side)
                visit(results[side], trainer if side == "training" else None, work, server, size, seed, arguments)
                console.print(f"   run {run + 1}, {side}: uploaded in {results[side].upload_s[-1]:.1f} s")
    report(results, size, priority, arguments)


def visit(
    result: Results,
    trainer: Trainer | None,
    work: Path,
    server: Seaweed,
    size: int,
    seed: int,
    arguments: argparse.Namespace,
) -> None:
    name = server.create_bucket("interference")
    remote = f"s3://{name}/run"
    server_pids = machine.process_tree(server.pid)
    with ckptfs.mounted(work / "near", remote=remote, store=work / "near-store") as directory:
        pid = ask(work / "near-store", "hello")["pid"]
        alone = trainer.train(arguments.alone_s) if trainer else []
        with Clock([pid], children=True) as save:
            save_streamed(directory / "weights.npy", size, seed)
        if trainer:
            trainer.begin()
        with Footprint(pid) as footprint, Clock([pid], children=True) as upload, Clock(server_pids) as serving:
            began = time.perf_counter()
            within = ckptfs.wait(directory, "replicated", arguments.train_s if trainer else _LONGEST_S)
            seconds = time.perf_counter() - began
            during = trainer.end() if trainer else []
            left = ckptfs.status(directory)["pending"]["bytes"]
            result.rate.append((size - left) / seconds)
            if not within and not ckptfs.wait(directory, "replicated", _LONGEST_S):
                raise TimeoutError(f"not replicated after {_LONGEST_S:.0f} s")
        if trainer:
            alone += trainer.train(arguments.alone_s)
            with hashing():
                beside = trainer.train(arguments.alone_s)
            result.slowdown.append(statistics.fmean(during) / statistics.fmean(alone) - 1)
            result.slowdown_by_hashing.append(statistics.fmean(beside) / statistics.fmean(alone) - 1)
            result.longest_alone_s.append(max(alone))
            result.longest_during_s.append(max(during))
        result.peak_bytes.append(max(footprint.most_bytes, machine.status_bytes(pid, "VmHWM")))
    shutil.rmtree(work / "near-store")
    with (
        ckptfs.mounted(work / "far", remote=remote, store=work / "far-store") as directory,
        Clock([ask(work / "far-store", "hello")["pid"]], children=True) as restore,
    ):
        ckptfs.prefetch(directory)
    shutil.rmtree(work / "far-store")
    server.delete_bucket(name)
    result.save_s.append(save.seconds)
    result.save_cpu_s.append(save.cpu_s)
    result.upload_s.append(upload.seconds)
    result.upload_cpu_s.append(upload.cpu_s)
    result.server_cpu_s.append(serving.cpu_s)
    result.restore_s.append(restore.seconds)
    result.restore_cpu_s.append(restore.cpu_s)


class Trainer:
    """The training loop, from outside."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        self._pipe.send("train")

    def end(self) -> list[float]:
        """Stop after the step that is running; the seconds of every step since `begin`, one at least."""
        self._pipe.send("stop")
        steps: list[float] = self._pipe.recv()
        return steps

    def train(self, seconds: float) -> list[float]:
        self.begin()
        time.sleep(seconds)
        return self.end()


@contextmanager
def training(width: int, threads: int) -> Iterator[Trainer]:
    """A process with the loop, warm and paused."""
    near, far = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_loop, args=(far, width, threads), daemon=True)
    process.start()
    far.close()
    trainer = Trainer(near)
    try:
        trainer.train(2)  # the first steps take their memory, and pick their kernels
        yield trainer
    finally:
        process.terminate()
        process.join(10)


def _loop(pipe: Connection, width: int, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    model = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(2, 64, width)
    while True:
        assert pipe.recv() == "train"
        steps: list[float] = []
        while not (steps and pipe.poll()):
            started = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            steps.append(time.perf_counter() - started)
        assert pipe.recv() == "stop"
        pipe.send(steps)


@contextmanager
def hashing() -> Iterator[None]:
    """A process that does nothing but hash memory, at idle priority."""
    process = multiprocessing.get_context("spawn").Process(target=_hash, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join(10)


def _hash() -> None:
    os.setsid()  # priority is that of the session, in which the training is
    machine.make_idle(os.getpid())
    memory = os.urandom(64 * MIB)
    while True:
        hashlib.blake2b(memory).digest()


def report(results: dict[str, Results], size: int, priority: str, arguments: argparse.Namespace) -> None:
    console.print(f"The S3 server's priority: {priority}")
    title = f"{size / GIB:g} GiB, {arguments.runs} runs, training on {arguments.threads} of {os.cpu_count()} cores"
    found = table(title, "", *results)
    gigabytes = size / 1e9
    rows = {
        "save, s": "save_s",
        "seal and upload, s": "upload_s",
        "restore (prefetch), s": "restore_s",
        "CPU s/GB, save": "save_cpu_s",
        "CPU s/GB, seal and upload": "upload_cpu_s",
        "CPU s/GB, S3 server meanwhile": "server_cpu_s",
        "CPU s/GB, restore": "restore_cpu_s",
    }
    for words, name in rows.items():
        per = gigabytes if "GB" in words else 1.0
        found.add_row(words, *(spread([value / per for value in getattr(each, name)]) for each in results.values()))
    peaks = (max(each.peak_bytes) / MIB for each in results.values())
    found.add_row("daemon's peak, MiB", *(f"{peak:.0f}" for peak in peaks))
    trained = results["training"]
    found.add_row("longest step alone, s", "", spread(trained.longest_alone_s))
    found.add_row("longest step during the upload, s", "", spread(trained.longest_during_s))
    found.add_row("steps slowed down by, %", "", spread([100 * each for each in trained.slowdown], 1))
    by_hashing = spread([100 * each for each in trained.slowdown_by_hashing], 1)
    found.add_row("  by a process that only hashes, %", "", by_hashing)
    rates = (spread([rate / 1e6 for rate in each.rate], 0) for each in results.values())
    found.add_row("uploaded meanwhile, MB/s", *rates)
    pace = statistics.median(results["idle"].rate) / statistics.median(trained.rate)
    found.add_row("upload's time, x idle", "", f"{pace:.2f}")
    console.print(found)


if __name__ == "__main__":
    main()
