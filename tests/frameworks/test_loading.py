"""Group F: loading through maps and in small pieces costs about what reading whole files does, here and elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs
from tests.frameworks.conftest import QUICK, MakeSite
from tests.support.counted import counted
from tests.support.proxy import FaultProxy

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.timeout(170)

KIB, MIB = 1 << 10, 1 << 20


def tensors(megabytes: int) -> dict[str, Any]:
    """Of 4 MiB each, which no codec makes smaller."""
    random = np.random.default_rng(41)
    arrays = (random.integers(0, 1 << 31, MIB, np.int32) for _ in range(megabytes // 4))
    return {f"layer.{number}": torch.from_numpy(array) for number, array in enumerate(arrays)}


def by_map(path: Path) -> dict[str, Any]:
    return dict(safetensors_torch.load_file(path))


def by_read(path: Path) -> dict[str, Any]:
    return dict(safetensors_torch.load(path.read_bytes()))


def load(how: Callable[[Path], dict[str, Any]], path: Path, megabytes: int) -> float:
    """Seconds that it takes until every tensor was looked at; checks them all."""
    expected = tensors(megabytes)
    started = time.monotonic()
    found = how(path)
    total = sum(int(each.sum()) for each in found.values())
    taken = time.monotonic() - started
    assert total == sum(int(each.sum()) for each in expected.values())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())
    return taken


def forget_pages(*tops: Path) -> None:
    """Have the kernel forget the cached pages of all files below *tops*."""
    for path in (each for top in tops for each in top.rglob("*") if each.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def mapped_loads(
    machine: MakeSite, url: str, network: FaultProxy, process: ProcessPoolExecutor, megabytes: int
) -> None:
    here, there = machine("here"), machine("there", endpoint=network.endpoint)
    here.mount("--remote", url, *QUICK)
    path = here.mountpoint / "model.safetensors"
    safetensors_torch.save_file(tensors(megabytes), path)
    assert ckptfs.wait(path, "replicated", 400)
    taken = {}
    for how in (by_read, by_map) * 2:
        forget_pages(here.mountpoint, here.store / "images")
        taken[how] = process.submit(load, how, path, megabytes).result(300)  # the second time counts
    assert taken[by_map] < 3 * taken[by_read] + 0.5, taken
    with counted(there, "--remote", url, "--read-only", *QUICK) as reads:
        process.submit(load, by_map, there.mountpoint / "model.safetensors", megabytes).result(300)
        assert sum(reads()) / len(reads()) >= 64 * KIB, len(reads())
    assert network.counts["GET"].bytes_down < 1.03 * megabytes * MIB + MIB


def test_case_041_mapped_loads(machine: MakeSite, url: str, network: FaultProxy, process: ProcessPoolExecutor) -> None:
    """With cold caches load_file takes at most three times what read and load take; elsewhere the kernel asks for large
    pieces, and each chunk comes once."""
    mapped_loads(machine, url, network, process, 48)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_041_mapped_loads_of_2_gib(
    machine: MakeSite, url: str, network: FaultProxy, process: ProcessPoolExecutor
) -> None:
    """The same with 2 GiB."""
    mapped_loads(machine, url, network, process, 2048)


def load_small(top: Path, count: int) -> int:
    """How many of *count* files hold what they should."""
    return sum(int(torch.load(top / f"{number}.pt")["step"]) == number for number in range(count))


def small_files(machine: MakeSite, url: str, process: ProcessPoolExecutor, count: int) -> None:
    here, there = machine("here"), machine("there")
    here.mount("--remote", url, *QUICK)
    for number in range(count):
        torch.save({"step": number, "weight": torch.full((200,), number)}, here.mountpoint / f"{number}.pt")
    here.umount()
    with counted(there, "--remote", url, "--read-only", *QUICK) as reads:
        assert process.submit(load_small, there.mountpoint, count).result(300) == count
        assert 0 < len(reads()) <= 4 * count


def test_case_042_small_files(machine: MakeSite, url: str, process: ProcessPoolExecutor) -> None:
    """torch.load looks here and there, byte by byte: the kernel asks us at most four times for each file."""
    small_files(machine, url, process, 100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_042_a_thousand_small_files(machine: MakeSite, url: str, process: ProcessPoolExecutor) -> None:
    """The same with a thousand."""
    small_files(machine, url, process, 1000)


SLICES = """
import os, random, sys
path, plain, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
chosen, size, at, slices = random.Random(seed), os.stat(path).st_size, 0, []
while at < size:
    length = min(chosen.randrange(64 << 10, 8 << 20), size - at)
    slices.append((at, length))
    at += length
chosen.shuffle(slices)
with open(path, "rb") as file, open(plain, "rb") as expected:
    for at, length in slices:
        file.seek(at)
        expected.seek(at)
        assert file.read(length) == expected.read(length), at
"""


def shuffled_slices(
    machine: MakeSite, url: str, network: FaultProxy, plain: Path, megabytes: int, processes: int
) -> None:
    here, there = machine("here"), machine("there", endpoint=network.endpoint)
    here.mount("--remote", url, *QUICK)
    with open(plain, "wb") as file:
        np.save(file, np.random.default_rng(42).integers(0, 1 << 31, megabytes * MIB // 4, np.int32))
    shutil.copyfile(plain, here.mountpoint / "array.npy")
    here.umount()
    there.mount("--remote", url, "--read-only", *QUICK)
    path = there.mountpoint / "array.npy"
    assert path.stat().st_size == plain.stat().st_size
    network.reset()
    command = [sys.executable, "-c", SLICES, str(path), str(plain)]
    readers = [subprocess.Popen([*command, str(number)]) for number in range(processes)]
    try:
        assert [reader.wait(300) for reader in readers] == [0] * processes
    finally:
        for reader in readers:
            reader.kill()
            reader.wait(30)
    got = network.counts["GET"]
    assert got.requests <= 1.1 * megabytes, f"{got.requests} requests for {megabytes} chunks of 1 MiB"
    assert got.bytes_down <= 1.1 * megabytes * MIB


def test_case_042_shuffled_slices(machine: MakeSite, url: str, network: FaultProxy, tmp_path: Path) -> None:
    """Processes that read pieces of one file in any order: no more requests than chunks, and no byte twice."""
    shuffled_slices(machine, url, network, tmp_path / "plain", 32, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_042_shuffled_slices_by_sixteen(
    machine: MakeSite, url: str, network: FaultProxy, tmp_path: Path
) -> None:
    """The same by 16 processes, of 512 MiB."""
    shuffled_slices(machine, url, network, tmp_path / "plain", 512, 16)
