"""Sizes past what fits 32 bits or one system call: as on a plain file system, here and on another machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from tests.frameworks.conftest import QUICK, MakeSite
from tests.frameworks.places import disk_bytes, remote_objects, sha256

pytestmark = pytest.mark.timeout(600)

MIB = 1 << 20
GIB = 1 << 30


def data_runs(path: Path) -> list[tuple[int, int]]:
    """(start, end) of what is not a hole."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size, at, runs = os.fstat(fd).st_size, 0, []
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole is left
                break
            at = os.lseek(fd, start, os.SEEK_HOLE)
            runs.append((start, at))
        return runs
    finally:
        os.close(fd)


PLACES = (0, 123 * MIB, 2 * GIB - 8192, 4 * GIB + 4096, 5 * GIB - 4096)


def make_sparse(path: Path) -> None:
    """5 GiB of which 20 KiB are written, on both sides of 2 and 4 GiB."""
    with open(path, "wb") as file:
        file.truncate(5 * GIB)
        for number, at in enumerate(PLACES):
            os.pwrite(file.fileno(), bytes([number + 1]) * 4096, at)


def test_a_sparse_file_of_5_gib_stays_sparse(machine: MakeSite, url: str, tmp_path: Path) -> None:
    """Size, holes, what is read and the space taken are as on a plain file system; the remote gets the data alone."""
    here, there = machine("here"), machine("there")
    plain = tmp_path / "plain"
    make_sparse(plain)
    here.mount("--remote", url, *QUICK)
    path = here.mountpoint / "sparse"
    make_sparse(path)
    same_sparse(path, plain)
    assert ckptfs.wait(path, "replicated", 60)
    same_sparse(path, plain)
    assert disk_bytes(here.store / "images") < MIB
    assert sum(remote_objects(url, here.environment).values()) < MIB
    there.mount("--remote", url, *QUICK)
    same_sparse(there.mountpoint / "sparse", plain, runs=False)
    assert disk_bytes(there.store / "images") < MIB
    os.truncate(path, 4 * GIB + 5000)
    os.truncate(plain, 4 * GIB + 5000)
    same_sparse(path, plain)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[3 * GIB] = 255
    assert path.stat().st_size == 4 * GIB + 5000
    with open(path, "rb") as file:
        assert os.pread(file.fileno(), 3, 3 * GIB - 1) == b"\x00\xff\x00"


def same_sparse(path: Path, plain: Path, *, runs: bool = True) -> None:
    assert path.stat().st_size == plain.stat().st_size
    if runs:
        assert path.stat().st_blocks <= plain.stat().st_blocks + 64
    with open(path, "rb") as left, open(plain, "rb") as right:
        for start, end in data_runs(plain):
            around = (max(start - 9000, 0), min(end + 9000, plain.stat().st_size))
            assert os.pread(left.fileno(), around[1] - around[0], around[0]) == os.pread(
                right.fileno(), around[1] - around[0], around[0]
            )


@pytest.fixture
def big(tmp_path: Path) -> Iterator[np.ndarray]:  # type: ignore[type-arg]
    """2.5 GiB in which each page differs."""
    pages = 5 * GIB // 2 // 4096
    made = np.zeros((pages, 512), np.uint64)
    made[:, 0] = np.arange(pages)
    made[:, 300] = np.arange(pages) * 2654435761
    yield made


@pytest.mark.slow
def test_a_single_write_of_2_5_gib(machine: MakeSite, url: str, tmp_path: Path, big: np.ndarray) -> None:  # type: ignore[type-arg]
    """write(2) takes as much of it as on a plain file system; np.save and readers get all, here and elsewhere."""
    here, there = machine("here"), machine("there")
    here.mount("--remote", url, *QUICK)
    raw = memoryview(big).cast("B")
    taken = {}
    for path in (tmp_path / "plain", here.mountpoint / "written"):
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)
        taken[path] = os.write(fd, raw)
        assert os.fstat(fd).st_size == taken[path]
        assert os.write(fd, raw[taken[path] :]) == len(raw) - taken[path]
        os.close(fd)
    assert len(set(taken.values())) == 1, taken
    expected = sha256(tmp_path / "plain")
    (tmp_path / "plain").unlink()
    assert sha256(here.mountpoint / "written") == expected
    np.save(here.mountpoint / "array.npy", big)
    (here.mountpoint / "written").unlink()
    loaded = np.load(here.mountpoint / "array.npy", mmap_mode="r")
    assert np.array_equal(loaded[:, 0], big[:, 0])
    assert ckptfs.wait(here.mountpoint / "array.npy", "replicated", 400)
    there.mount("--remote", url, *QUICK)
    far = np.load(there.mountpoint / "array.npy", mmap_mode="r")
    for start in range(0, len(big), 10_000):
        assert np.array_equal(far[start : start + 50], big[start : start + 50])
    assert np.array_equal(far[-1000:], big[-1000:])
