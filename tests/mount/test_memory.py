"""What the daemon takes with its background process: memory whatever the size of what is saved, and nothing more after
many small operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from tests.conftest import Bucket
from tests.support.footprint import Footprint
from tests.support.mounts import Site, peak_bytes, resident_bytes

MIB = 1 << 20
_BLOCK = 64 * MIB


@pytest.fixture
def sites(tmp_path: Path, bucket: Bucket) -> Iterator[tuple[Site, Site]]:
    """Two machines with the product's own sizes."""
    with (
        Site(tmp_path, environment=bucket.environment, name="near") as near,
        Site(tmp_path, environment=bucket.environment, name="far") as far,
    ):
        yield near, far


def blocks(unique: bytes, size: int) -> Iterator[memoryview]:
    """*size* bytes that go through *unique* again and again."""
    at = 0
    while at < size:
        start = at % len(unique)
        length = min(_BLOCK, len(unique) - start, size - at)
        yield memoryview(unique)[start : start + length]
        at += length


def numpy_header(size: int) -> bytes:
    """Of a .npy file with *size* bytes of float32."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size // 4},), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def unknown_header(size: int) -> bytes:
    return b"no format that anybody knows"


def grows_to(
    sites: tuple[Site, Site], url: str, header: bytes, unique_bytes: int, size: int, *, most_mib: int = 256
) -> None:
    """Save, seal and upload here, read there.

    Neither daemon may ever take more than *most_mib*, together with its background process and packs on their way.
    """
    memory = ("--memory", f"{most_mib}M")
    near, far = sites
    unique = np.random.default_rng(1).standard_normal(unique_bytes // 4, np.float32).tobytes()
    near.mount("--remote", url, *memory)
    with Footprint(near.pid()) as together:
        with open(near.mountpoint / "model", "wb", buffering=0) as file:
            file.write(header)
            for block in blocks(unique, size):
                assert file.write(block) == len(block)
        peaks = {"saved": max(peak_bytes(near.pid()), together.most_bytes)}
        assert ckptfs.wait(near.mountpoint, "sealed", 1200)  # in the background: who else is busy here comes first
        peaks["sealed"] = max(peak_bytes(near.pid()), together.most_bytes)
        assert ckptfs.wait(near.mountpoint, "replicated", 1200)
        peaks["uploaded"] = max(peak_bytes(near.pid()), together.most_bytes)
    far.mount("--remote", url, *memory)
    with Footprint(far.pid()) as together, open(far.mountpoint / "model", "rb", buffering=0) as file:
        assert file.read(len(header)) == header
        for block in blocks(unique, size):
            at = 0
            while at < len(block):
                part = file.read(len(block) - at)
                assert part and part == block[at : at + len(part)]
                at += len(part)
    peaks["read"] = max(peak_bytes(far.pid()), together.most_bytes)
    assert max(peaks.values()) <= most_mib * MIB, {name: f"{peak // MIB} MiB" for name, peak in peaks.items()}


@pytest.fixture
def finely_cut(tmp_path: Path, bucket: Bucket) -> Iterator[tuple[Site, Site]]:
    """Two machines that cut unknown formats into chunks of 4 KiB: half a GiB has as many as 8 GiB usually have."""
    tuning = {"cdc_bytes": 4096}
    with (
        Site(tmp_path, environment=bucket.environment, name="near", tuning=tuning) as near,
        Site(tmp_path, environment=bucket.environment, name="far", tuning=tuning) as far,
    ):
        yield near, far


@pytest.mark.timeout(300)
def test_memory_is_bounded_with_many_chunks(finely_cut: tuple[Site, Site], bucket: Bucket) -> None:
    """A file of 130,000 chunks, a fifth of them unique, is saved, sealed, uploaded and read elsewhere in 256 MiB."""
    size = 512 * MIB
    grows_to(finely_cut, f"{bucket.url}/run", unknown_header(size), 100 * MIB, size)


@pytest.mark.timeout(300)
def test_the_least_memory_is_enough(sites: tuple[Site, Site], bucket: Bucket) -> None:
    """320 MiB are saved, sealed, uploaded and read elsewhere in 192 MiB."""
    size = 320 * MIB
    grows_to(sites, f"{bucket.url}/run", numpy_header(size), size // 2, size, most_mib=192)


FORMATS = pytest.mark.parametrize("header", [numpy_header, unknown_header], ids=["npy", "unknown format"])


@FORMATS
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_bounded(sites: tuple[Site, Site], bucket: Bucket, header: Callable[[int], bytes]) -> None:
    """2 GiB of which 512 MiB are unique: saved, sealed, uploaded, and read on a second store in 256 MiB."""
    size = 2048 * MIB
    grows_to(sites, f"{bucket.url}/run", header(size), size // 4, size)


@FORMATS
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_bounded_for_large_files(
    sites: tuple[Site, Site], bucket: Bucket, header: Callable[[int], bytes]
) -> None:
    """The same with 10 GiB, of which 2 GiB are unique."""
    grows_to(sites, f"{bucket.url}/run", header(10240 * MIB), 2048 * MIB, 10240 * MIB)


def nothing_grows(site: Site, url: str, operations: int, rounds: int, most_mib: int) -> None:
    """After *rounds* times *operations* the daemon has the descriptors, and within *most_mib* the memory, of the first.

    It is asked often what was saved, and everything is replicated and deleted in between.
    """
    site.mount("--remote", url, "--settle", "1s")
    work(site.mountpoint, operations)
    assert ckptfs.wait(site.mountpoint, "replicated", 60)
    before, descriptors = resident_bytes(site.pid()), open_files(site.pid())
    for _ in range(rounds):
        work(site.mountpoint, operations)
        assert ckptfs.wait(site.mountpoint, "replicated", 60)
    growth = resident_bytes(site.pid()) - before
    assert growth < most_mib * MIB, f"{growth / MIB:.1f} MiB more than {before / MIB:.1f} MiB"
    assert abs(open_files(site.pid()) - descriptors) <= 4, "descriptors leak"  # connections to the remote come and go


def test_nothing_grows_with_operations(sites: tuple[Site, Site], bucket: Bucket) -> None:
    """Four thousand of them."""
    nothing_grows(sites[0], f"{bucket.url}/run", 1_000, 3, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_grows_with_a_hundred_thousand_operations(sites: tuple[Site, Site], bucket: Bucket) -> None:
    """A leak of 200 bytes in each would show."""
    nothing_grows(sites[0], f"{bucket.url}/run", 5_000, 20, 16)


def work(root: Path, operations: int) -> None:
    """Create, write, look, read, rename, change, delete: ten operations a turn."""
    kept = root / "kept"
    for turn in range(operations // 10):
        folder = root / f"d{turn}"
        folder.mkdir()
        path = folder / "new"
        path.write_bytes(b"%d" % turn * 100)
        path.stat()
        os.setxattr(path, "user.turn", b"1")
        os.replace(path, folder / "file")
        assert (folder / "file").read_bytes().startswith(b"%d" % turn)
        os.utime(folder / "file", (turn, turn))
        os.replace(folder / "file", kept)
        os.listdir(folder)
        folder.rmdir()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
