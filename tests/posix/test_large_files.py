"""Files beyond 2 and 4 GiB: sizes, offsets and single calls that do not fit into 31 or 32 bits."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.posix.sides import Side
from tests.support.mounts import Site

GIB = 1 << 30


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With the tuning that users have: tiny chunks of such files would be millions."""
    with Site(tmp_path_factory.mktemp("large")) as made:
        made.mount("--owner", "stored", "--allow-other")
        yield made
        made.umount()
        assert "Traceback" not in made.log(), made.log()


def test_a_sparse_file_of_five_gib(site: Site, same: Callable[..., None]) -> None:
    """Offsets beyond 4 GiB hold what was written there; the holes cost nothing and are sealed in no time."""

    def case(d: Side) -> None:
        fd = d.open("sparse", os.O_CREAT | os.O_RDWR)
        for offset in (0, 2 * GIB - 3, 4 * GIB - 3, 5 * GIB - 6):
            d.attempt("write", os.pwrite, fd, b"marker", offset)
        d.fstat(fd)
        d.close(fd)
        d.sealed("sparse")
        fd = d.open("sparse", os.O_RDWR)
        for offset in (0, 100, 2 * GIB - 3, 3 * GIB, 4 * GIB - 3, 5 * GIB - 6):
            d.attempt("read", os.pread, fd, 20, offset)
        d.attempt("far beyond", os.pwrite, fd, b"x", 1 << 43)
        d.attempt("shorter", os.ftruncate, fd, 4 * GIB)
        d.attempt("read", os.pread, fd, 20, 4 * GIB - 3)
        with mmap.mmap(fd, mmap.PAGESIZE, offset=2 * GIB) as page:
            d.see("mapped", page[0:8])
        d.see("little on the disk", os.fstat(fd).st_blocks < 1000)
        d.attempt("tiny", os.ftruncate, fd, 10)  # and its snapshot is quick

    same(case, seal=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_single_write_of_two_and_a_half_gib(site: Site, tmp_path: Path) -> None:
    """One write() takes what Linux takes at most, 0x7ffff000 bytes, and reports it; every byte is there afterwards."""
    data = os.urandom(1 << 20) * 2560
    path = site.mountpoint / "large"
    with open(path, "wb", buffering=0) as file:
        assert file.write(data) == 0x7FFFF000
        assert file.write(memoryview(data)[0x7FFFF000:]) == len(data) - 0x7FFFF000
    assert path.stat().st_size == len(data)
    with open(path, "rb", buffering=0) as file:
        at = 0
        while part := file.read(256 << 20):
            assert part == data[at : at + len(part)]
            at += len(part)
    assert at == len(data)
    site.umount()
    site.mount("--owner", "stored", "--allow-other")
    with open(path, "rb", buffering=0) as file:
        first = file.read(len(data))
        assert len(first) == 0x7FFFF000 and first == data[: len(first)]
    path.unlink()
