"""Saving over what is there: readers keep what they have, the new is whole, the old costs nothing."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs
from tests.frameworks.conftest import QUICK, MakeSite
from tests.frameworks.places import disk_bytes, remote_objects, sha256
from tests.support.mounts import Site, until
from tests.support.proxy import FaultProxy, Faults

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20

HOLD = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    first = mapped[:]
    print("holding", flush=True)
    sys.stdin.readline()
    file.seek(0)
    print("kept" if mapped[:] == first and file.read() == first else "changed", flush=True)
"""


def numbers(seed: int, size_bytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1 << 32, size_bytes // 4, dtype=np.uint32).view(np.float32)


def by_rename(path: Path, seed: int, size: int) -> None:
    """As safetensors does it: a temporary beside it, chmod, rename over."""
    safetensors_torch.save_file({"weight": torch.from_numpy(numbers(seed, size).view(np.int32))}, path)


def by_truncation(path: Path, seed: int, size: int) -> None:
    """As torch does it: O_TRUNC and write."""
    torch.save({"weight": torch.from_numpy(numbers(seed, size).view(np.int32))}, path)


def in_place(path: Path, seed: int, size: int) -> None:
    """Over the old bytes, no byte longer or shorter."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        numbers(seed, size).tofile(file)


SAVES = [by_rename, by_truncation, in_place]
Save = Callable[[Path, int, int], None]


@pytest.mark.parametrize("megabytes", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_case_001_a_held_file_is_replaced_and_its_holder_keeps_the_old_bytes(
    machine: MakeSite, url: str, tmp_path: Path, megabytes: int
) -> None:
    """safetensors over a file that another process has open and mapped: new bytes by name, old ones for the holder."""
    here, there = machine("here"), machine("there")
    here.mount("--remote", url, *QUICK)
    path = here.mountpoint / "model.safetensors"
    by_rename(path, 1, megabytes * MIB)
    assert ckptfs.wait(path, "sealed", 30)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        by_rename(path, 2, megabytes * MIB)
        assert ckptfs.wait(path, "replicated", 60)
        assert holder.communicate("\n", timeout=30)[0] == "kept\n"
    assert os.listdir(here.mountpoint) == ["model.safetensors"]
    there.mount("--remote", url, *QUICK)
    plain = tmp_path / "plain.safetensors"
    by_rename(plain, 2, 1000)
    for place in (path, there.mountpoint / "model.safetensors"):
        loaded = safetensors_torch.load_file(place)
        assert np.array_equal(loaded["weight"].numpy(), numbers(2, megabytes * MIB).view(np.int32))
        assert place.stat().st_mode == plain.stat().st_mode


def test_case_002_a_mapped_file_may_be_truncated_and_rewritten(site: Site) -> None:
    """O_TRUNC and rewriting under a map: the last write is what is stored, the daemon lives (the map as on ext4)."""
    path = site.mountpoint / "file"
    path.write_bytes(b"1" * MIB)
    assert ckptfs.wait(path, "sealed", 30)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:3] == b"111"
        path.write_bytes(b"2" * MIB)
        assert mapped[:] == b"2" * MIB
        os.replace(shadow(path, b"3" * MIB), path)
        assert mapped[:] == b"2" * MIB
        assert path.read_bytes() == b"3" * MIB
    site.umount()
    site.mount()
    assert path.read_bytes() == b"3" * MIB


def test_case_002_a_file_is_saved_from_its_own_map(site: Site) -> None:
    """safetensors: what was loaded, and is still mapped, is saved to the same path."""
    path = site.mountpoint / "model.safetensors"
    by_rename(path, 5, 3 * MIB)
    for _ in range(3):
        loaded = safetensors_torch.load_file(path)
        safetensors_torch.save_file(loaded, path)
        saved = safetensors_torch.load_file(path)["weight"].numpy()
        assert np.array_equal(saved, numbers(5, 3 * MIB).view(np.int32))
    assert os.listdir(site.mountpoint) == ["model.safetensors"]


def shadow(path: Path, data: bytes) -> Path:
    """A new file beside *path*."""
    other = path.with_name(path.name + ".tmp")
    other.write_bytes(data)
    return other


def test_case_004_a_file_may_be_renamed_while_it_is_being_written(machine: MakeSite, url: str) -> None:
    """Rename of an open temporary, then more writes by the same descriptor: all has the new name."""
    here, there = machine("here"), machine("there")
    here.mount("--remote", url, *QUICK)
    with open(here.mountpoint / "tmp", "wb") as file:
        file.write(b"1" * MIB)
        file.flush()
        os.rename(here.mountpoint / "tmp", here.mountpoint / "final")
        file.write(b"2" * MIB)
        file.flush()
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_ino == (here.mountpoint / "final").stat().st_ino
    assert ckptfs.wait(here.mountpoint, "replicated", 60)
    there.mount("--remote", url, *QUICK)
    for mountpoint in (here.mountpoint, there.mountpoint):
        assert os.listdir(mountpoint) == ["final"]
        assert (mountpoint / "final").read_bytes() == b"1" * MIB + b"2" * MIB


def test_case_006_a_pointer_renamed_a_hundred_times_always_reads_whole(machine: MakeSite, url: str) -> None:
    """TensorFlow's `checkpoint`: a hundred renames over it; another machine always reads one of them, whole."""
    here, there = machine("here"), machine("there")
    here.mount("--remote", url, *QUICK)
    pointer = here.mountpoint / "checkpoint"
    os.rename(shadow(pointer, b"model-0\n"), pointer)
    assert ckptfs.wait(pointer, "replicated", 60)
    there.mount("--remote", url, *QUICK)
    seen = []
    for number in range(1, 101):
        os.rename(shadow(pointer, f"model-{number}\n".encode()), pointer)
        seen.append(int((there.mountpoint / "checkpoint").read_text().removeprefix("model-")))
        assert seen[-1] <= number
    assert seen == sorted(seen)
    last = there.mountpoint / "checkpoint"
    until(lambda: last.read_text() == "model-100\n", "the last pointer to show")
    assert os.listdir(there.mountpoint) == os.listdir(here.mountpoint) == ["checkpoint"]


@pytest.mark.parametrize("save", SAVES, ids=lambda save: save.__name__)
def test_ten_saves_cost_the_disk_one(site: Site, save: Save) -> None:
    """Ten saves to one path, then sealed: the store takes at most 1.1 times what one takes."""
    path = site.mountpoint / "model"
    for seed in range(10):
        save(path, seed, 4 * MIB)
        if seed % 3 == 0:
            assert ckptfs.wait(path, "sealed", 30)
    assert ckptfs.wait(path, "sealed", 30)
    until(lambda: disk_bytes(site.store / "images") <= 1.1 * path.stat().st_size, "old versions to be given up")
    assert site.status()["bytes"]["stored"] <= 1.1 * path.stat().st_size


@pytest.mark.parametrize("save", SAVES, ids=lambda save: save.__name__)
def test_superseded_saves_are_not_sent(machine: MakeSite, url: str, network: FaultProxy, save: Save) -> None:
    """Ten saves while the remote does not answer: then only what was on its way, and the last, are sent; the disk has
    one."""
    here, there = machine("here", endpoint=network.endpoint), machine("there")
    here.mount("--remote", url, *QUICK)
    path = here.mountpoint / "model"
    save(path, 100, 4 * MIB)
    assert ckptfs.wait(path, "replicated", 60)
    network.reset()
    network.faults = Faults(mode="black_hole")
    for seed in range(10):
        save(path, seed, 4 * MIB)
        assert ckptfs.wait(path, "sealed", 30)
    network.heal()
    assert ckptfs.wait(path, "replicated", 60)
    size = path.stat().st_size
    assert network.counts["PUT"].bytes_up <= 2.1 * size
    until(lambda: disk_bytes(here.store / "images") <= 1.1 * size, "old versions to be given up")
    there.mount("--remote", url, *QUICK)
    assert sha256(there.mountpoint / "model") == sha256(path)


def test_what_is_removed_before_it_is_sent_is_never_sent(
    machine: MakeSite, url: str, network: FaultProxy
) -> None:
    """Rotation under an outage: of five checkpoints of which four are gone, one is sent."""
    here = machine("here", endpoint=network.endpoint)
    here.mount("--remote", url, *QUICK)
    network.faults = Faults(mode="black_hole")
    for step in range(5):
        (here.mountpoint / f"checkpoint-{step}").mkdir()
        by_rename(here.mountpoint / f"checkpoint-{step}" / "model.safetensors", step, 2 * MIB)
        assert ckptfs.wait(here.mountpoint, "sealed", 30)
        if step:
            (here.mountpoint / f"checkpoint-{step - 1}" / "model.safetensors").unlink()
            (here.mountpoint / f"checkpoint-{step - 1}").rmdir()
    network.heal()
    assert ckptfs.wait(here.mountpoint, "replicated", 60)
    assert sum(remote_objects(url, here.environment).values()) <= 2.1 * 2 * MIB
