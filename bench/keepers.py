"""What keeps series of checkpoints, each by its own means; what differs is how many bytes that takes.

A keeper is made by a context manager below a work directory of its own, which exists and is empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import zstandard
from blake3 import blake3
from pyfastcdc import FastCDC

from ckptfs.formats.base import BytesSource
from ckptfs.formats.recognise import recognise

from .contestants import Contestant, ckptfs_remote, find_tool, juicefs_compressing
from .machine import cpu_seconds, size_of

_LEVEL = 3
_CDC_BYTES = 64 << 10
_ZIPNN_LEAST_BYTES = 4096
"""A smaller tensor is not worth a header."""

_FIRST_BYTES = 8 << 20
"""Enough for the background process to begin before the clock does."""


@dataclass(frozen=True)
class Keeper:
    """Takes one checkpoint after the other."""

    add: Callable[[Path], None]
    """Keeps what is in a directory; returns when that is done."""
    stored_bytes: Callable[[], int]
    cpu_s: Callable[[], float]
    """Processor time spent so far, on what `add` begins."""


Make = Callable[[Path], contextlib.AbstractContextManager[Keeper]]


def available() -> dict[str, Make]:
    """What this machine has, in the order in which tables show it."""
    found: dict[str, Make] = {
        "ckptfs": ckptfs_with_deltas,
        "no-delta": ckptfs_without_deltas,
        "zstd": zstd,
        "cdc": content_defined,
    }
    if find_spec("zipnn"):
        found["zipnn"] = zipnn
    if find_tool("borg"):
        found["borg"] = borg
    if find_tool("juicefs"):
        found["juicefs"] = juicefs
    return found


@contextlib.contextmanager
def ckptfs_with_deltas(work: Path) -> Iterator[Keeper]:
    """A mount with a `file://` remote: the processor time is that of the daemon and its background process."""
    with ckptfs_remote(work) as mounted:
        keeper = _mounted(mounted, work / "bucket")
        (mounted.directory / "first").write_bytes(os.urandom(_FIRST_BYTES))
        mounted.settle()
        yield keeper


@contextlib.contextmanager
def ckptfs_without_deltas(work: Path) -> Iterator[Keeper]:
    """The same, where every chunk is encoded for itself."""
    (work / "store").mkdir(mode=0o700)
    (work / "store" / "settings.json").write_text(json.dumps({"tuning": {"delta": False}}))
    with ckptfs_with_deltas(work) as keeper:
        yield keeper


@contextlib.contextmanager
def juicefs(work: Path) -> Iterator[Keeper]:
    """JuiceFS, whose blocks of 4 MiB are compressed by zstd and never compared."""
    with juicefs_compressing(work) as mounted:
        yield _mounted(mounted, work / "bucket")


@contextlib.contextmanager
def zstd(work: Path) -> Iterator[Keeper]:
    """Every file by itself."""
    yield _counting(lambda data: len(zstandard.ZstdCompressor(level=_LEVEL).compress(data)))


@contextlib.contextmanager
def content_defined(work: Path) -> Iterator[Keeper]:
    """What backup programs do: chunks whose content decides where they end, each kept once. Indexes are not counted."""
    cutter = FastCDC(_CDC_BYTES)
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    known: set[bytes] = set()

    def keep(data: bytes) -> int:
        taken = 0
        for chunk in cutter.cut_buf(data):
            digest = blake3(chunk.data).digest()
            if digest not in known:
                known.add(digest)
                taken += len(compressor.compress(chunk.data))
        return taken

    yield _counting(keep)


@contextlib.contextmanager
def zipnn(work: Path) -> Iterator[Keeper]:
    """ZipNN on each tensor, told its type, and zstd on what is between them and on other types."""
    from zipnn import ZipNN

    codecs = {each: ZipNN(bytearray_dtype=each, threads=1) for each in ("float32", "bfloat16", "float16")}
    compressor = zstandard.ZstdCompressor(level=_LEVEL)

    def keep(data: bytes) -> int:
        taken = at = 0
        for tensor in recognise(BytesSource(data)):
            if tensor.dtype not in codecs or tensor.end - tensor.start < _ZIPNN_LEAST_BYTES:
                continue
            part = bytearray(data[tensor.start : tensor.end])  # a copy: it is overwritten
            taken += len(compressor.compress(data[at : tensor.start])) + len(codecs[tensor.dtype].compress(part))
            at = tensor.end
        return taken + len(compressor.compress(data[at:]))

    yield _counting(keep)


@contextlib.contextmanager
def borg(work: Path) -> Iterator[Keeper]:
    """BorgBackup without encryption, one archive a checkpoint."""
    repository = work / "repository"
    environment = {**os.environ, "BORG_BASE_DIR": str(work), "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}

    def run(*arguments: str, cwd: Path = work) -> None:
        subprocess.run(["borg", *arguments], env=environment, cwd=cwd, check=True, capture_output=True)

    def add(checkpoint: Path) -> None:
        run("create", "--compression", f"zstd,{_LEVEL}", f"{repository}::{checkpoint.name}", ".", cwd=checkpoint)

    run("init", "--encryption", "none", str(repository))
    yield Keeper(add, lambda: size_of(repository), _own_cpu_s)


def _mounted(mounted: Contestant, bucket: Path) -> Keeper:
    def add(checkpoint: Path) -> None:
        shutil.copytree(checkpoint, mounted.directory / checkpoint.name)
        mounted.settle()

    return Keeper(add, lambda: size_of(bucket), lambda: cpu_seconds(mounted.pids()))


def _counting(keep: Callable[[bytes], int]) -> Keeper:
    """One that adds up what *keep* says that a file takes, and writes nothing."""
    stored = 0

    def add(checkpoint: Path) -> None:
        nonlocal stored
        stored += sum(keep(path.read_bytes()) for path in sorted(checkpoint.rglob("*")) if path.is_file())

    return Keeper(add, lambda: stored, _own_cpu_s)


def _own_cpu_s() -> float:
    """Of this process and of the programs that it ran."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in both)
