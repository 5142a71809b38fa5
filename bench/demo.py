#!/usr/bin/env python3
"""What ckptfs does, in two minutes: save a series of checkpoints, lose the machine, read every byte on another one.

    python bench/demo.py [--gib 1.1] [--keep]

Mounts a directory whose remote is a real S3 server on this machine (SeaweedFS, where it is installed; otherwise a plain
directory), saves checkpoints of a model with a frozen backbone with whatever is installed of numpy, torch and
safetensors, shows what replication does meanwhile, unmounts, moves the store away, mounts the same remote with an empty
store, and compares.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ckptfs
from ckptfs.remote.open import open_remote
from tests.support.seaweed import Seaweed, SeaweedError

console = Console(highlight=False)

try:
    import torch
except ImportError:
    torch = None
try:
    from safetensors.numpy import save_file
except ImportError:
    save_file = None


TRAINING_S = 3.0
"""A run trains between two saves, and that is when replication happens."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gib", type=float, default=1.1, help="bytes to save in all")
    options.add_argument("--keep", action="store_true", help="leave the work directory for a look")
    arguments = options.parse_args()
    work = Path(tempfile.mkdtemp(prefix="ckptfs-demo-"))
    try:
        run(work, int(arguments.gib * (1 << 30)))
    finally:
        if not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)


def run(work: Path, total_bytes: int) -> None:
    with ExitStack() as stack:
        remote, used_bytes = stack.enter_context(bucket(work))
        checkpoints = 6
        console.print(f"[bold]1. A training run[/] saves {checkpoints} checkpoints into {work}/run, remote {remote}")
        with ckptfs.mounted(work / "run", remote=remote, store=work / "store-1") as run_dir:
            saved, save_s = train(run_dir, checkpoints, total_bytes // checkpoints)
            started = time.monotonic()
            while not ckptfs.wait(run_dir, timeout=0.5):
                at_risk = ckptfs.status(run_dir)["at_risk"]
                console.print(f"   replicating: {at_risk['files']} files, {mib(at_risk['bytes'])} to go")
            upload_s = time.monotonic() - started
            digests = dict(hash_tree(run_dir))
            stored = ckptfs.status(run_dir)["bytes"]
        console.print(f"[bold]2. The machine is gone[/], its store moved away; {mib(used_bytes())} are in the bucket")
        (work / "store-1").rename(work / "store-of-the-lost-machine")
        console.print("[bold]3. Another machine[/] mounts the same bucket with an empty store and reads everything")
        with ckptfs.mounted(work / "resumed", remote=remote, store=work / "store-2") as resumed:
            started = time.monotonic()
            read = dict(hash_tree(resumed))
            restore_s = time.monotonic() - started
        if read != digests:
            different = sorted(set(digests.items()) ^ set(read.items()))
            raise SystemExit(f"FAILED: {len(different)} files differ, the first is {different[0][0]}")
    table = Table(title=f"{len(digests)} files, every byte equal", title_justify="left", show_header=False)
    rows = {
        "saved": f"{mib(saved)} at {saved / save_s / 1e9:.2f} GB/s",
        "uploaded (deduplicated, compressed)": f"{mib(stored['on_remote'])} = {stored['on_remote'] / saved:.0%} of it",
        "replicated after the last save": f"{upload_s:.1f} s",
        "restored elsewhere": f"{mib(saved)} in {restore_s:.1f} s ({saved / restore_s / 1e9:.2f} GB/s, all checked)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def train(run_dir: Path, checkpoints: int, size_bytes: int) -> tuple[int, float]:
    """Save checkpoints; returns bytes and the seconds spent in saving alone."""
    random = np.random.default_rng(0)
    rows = size_bytes // 4 // 1024
    backbone = {f"backbone.{i}": random.standard_normal((rows // 10, 1024), np.float32) * 0.02 for i in range(5)}
    head = {f"head.{i}": random.standard_normal((rows // 10, 1024), np.float32) * 0.02 for i in range(2)}
    moments = {name: np.zeros_like(value) for name, value in head.items()}
    saved, seconds = 0, 0.0
    for step in range(1, checkpoints + 1):
        for name, value in head.items():
            gradient = random.standard_normal(value.shape, np.float32)
            moments[name] = np.float32(0.9) * moments[name] + np.float32(0.1) * gradient
            value -= np.float32(1e-3) * moments[name]
        directory = run_dir / f"checkpoint-{step}"
        started = time.perf_counter()
        directory.mkdir()
        save_weights(directory, backbone | head)
        save_optimizer(directory, moments)
        (directory / "config.json").write_text('{"model_type": "demo"}')
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        seconds += time.perf_counter() - started
        size = sum(path.stat().st_size for path in directory.iterdir())
        saved += size
        time.sleep(TRAINING_S)
        status = ckptfs.status(run_dir)
        newest = status["newest_safe_set"]
        console.print(
            f"   checkpoint-{step}: {mib(size)} saved; {TRAINING_S:.0f} s later {mib(status['bytes']['on_remote'])} "
            f"are uploaded, safe: {newest['path'] if newest else 'none'}"
        )
    return saved, seconds


def save_weights(directory: Path, weights: dict[str, np.ndarray]) -> None:
    if save_file is not None:
        save_file(weights, directory / "model.safetensors")
    else:
        np.savez(directory / "model.npz", **weights)


def save_optimizer(directory: Path, moments: dict[str, np.ndarray]) -> None:
    if torch is not None:
        torch.save({name: torch.from_numpy(value) for name, value in moments.items()}, directory / "optimizer.pt")
    else:
        np.savez(directory / "optimizer.npz", **moments)


def hash_tree(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                hasher = hashlib.blake2b()
                while data := file.read(1 << 22):
                    hasher.update(data)
            yield str(path.relative_to(root)), hasher.hexdigest()


@contextmanager
def bucket(work: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """A remote's URL, and a function that tells how many bytes lie there."""
    try:
        server = Seaweed().start()
    except SeaweedError as error:
        console.print(f"no S3 server here ({error}): a plain directory is the remote")
        directory = work / "bucket"
        directory.mkdir()
        yield f"file://{directory}", lambda: sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        return
    try:
        os.environ.update(server.environment())
        url = f"s3://{server.create_bucket('demo')}/run"
        store = open_remote(url)

        def used() -> int:
            total, after = 0, ""
            while True:
                listing = store.list("", start_after=after)
                total += sum(each.size for each in listing.objects)
                if not listing.truncated:
                    return total
                after = listing.objects[-1].key

        yield url, used
    finally:
        server.stop()


def mib(size: float) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


if __name__ == "__main__":
    main()
