"""A machine that reads a part of a checkpoint fetches that part: at most 1.2 times the bytes that were touched.

Counted at the server's door, everything included: heads, trees, manifests, the kernel's own read-ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.conftest import QUICK, MakeSite
from tests.support.mounts import Site
from tests.support.proxy import FaultProxy, Faults

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
COLUMNS = 1024
SMALL, LARGE = 3072, 24576
"""Rows of the large tensors: 12 MiB in a test that takes seconds, 96 MiB as in a real model."""
EDGE = 3 * MIB
"""Where a range begins and ends the kernel reads ahead up to 1 MiB, and fetched are whole pieces of 1 MiB."""


@dataclass(frozen=True)
class Touched:
    """What a load looked at."""

    bytes: int
    ranges: int
    """Places that are far apart; one more, the head of the file, is always looked at."""


def tensor(seed: int, rows: int) -> Any:
    """Random bits, which no codec makes smaller."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (rows, COLUMNS), np.int32))


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00002.safetensors"


def state(rows: int) -> dict[str, Any]:
    """Three layers, small tensors among the large."""
    made: dict[str, Any] = {}
    for layer in range(3):
        made[f"layer.{layer}.norm"] = torch.full((COLUMNS,), layer)
        made[f"layer.{layer}.weight"] = tensor(layer, rows)
        made[f"layer.{layer}.projection"] = tensor(10 + layer, rows // 3)
    return made


def two_tensors(path: Path, rows: int) -> Touched:
    """get_tensor of two tensors of safetensors."""
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        for name, expected in (("layer.1.weight", tensor(1, rows)), ("layer.2.projection", tensor(12, rows // 3))):
            assert torch.equal(file.get_tensor(name), expected)
    return Touched((rows + rows // 3) * COLUMNS * 4, 2)


def most_of_a_shard(path: Path, rows: int) -> Touched:
    """Two layers of three: enough for the next shard to begin to come."""
    with safetensors.safe_open(path / "set" / shard(1), "pt") as file:
        for layer in range(2):
            assert torch.equal(file.get_tensor(f"layer.{layer}.weight"), tensor(layer, rows))
            assert torch.equal(file.get_tensor(f"layer.{layer}.projection"), tensor(10 + layer, rows // 3))
    time.sleep(1)  # for what comes unasked
    return Touched(2 * (rows + rows // 3) * COLUMNS * 4, 2)


def one_slice(path: Path, rows: int) -> Touched:
    """get_slice of most rows, in the middle. torch copies in several threads, and looks at the tensor's first page."""
    start, end = rows // 8, 7 * rows // 8
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_slice("layer.1.weight")[start:end], tensor(1, rows)[start:end])
    return Touched((end - start) * COLUMNS * 4, 2)


def rows_of_a_map(path: Path, rows: int) -> Touched:
    """Rows of np.load(mmap_mode="r"), from two places."""
    mapped = np.load(path / "array.npy", mmap_mode="r")
    expected = tensor(20, 2 * rows).numpy()
    part = rows // 3
    for start in (part, 4 * part):
        assert np.array_equal(mapped[start : start + part], expected[start : start + part])
    return Touched(2 * part * COLUMNS * 4, 2)


def mapped_torch(path: Path, rows: int) -> Touched:
    """torch.load(mmap=True), then two of its tensors; it also looks at the head of each of the nine."""
    loaded = torch.load(path / "model.pt", mmap=True, weights_only=True)
    for name, expected in (("layer.0.weight", tensor(0, rows)), ("layer.1.projection", tensor(11, rows // 3))):
        assert torch.equal(loaded[name], expected)
    return Touched((rows + rows // 3) * COLUMNS * 4, 6)


def one_of_an_npz(path: Path, rows: int) -> Touched:
    """One member of np.load of an npz; its directory is at the end."""
    with np.load(path / "model.npz") as found:
        assert np.array_equal(found["layer.1.weight"], tensor(1, rows).numpy())
    return Touched(rows * COLUMNS * 4, 2)


def the_header(path: Path, rows: int) -> Touched:
    """Names and shapes alone."""
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        assert file.get_slice("layer.2.weight").get_shape() == [rows, COLUMNS]
    return Touched(0, 0)


LOADS = [two_tensors, most_of_a_shard, one_slice, rows_of_a_map, mapped_torch, one_of_an_npz, the_header]
Load = Callable[[Path, int], Touched]


def save(site: Site, rows: int) -> None:
    made = state(rows)
    safetensors_torch.save_file(made, site.mountpoint / "model.safetensors")
    (site.mountpoint / "set").mkdir()
    for number in (1, 2):
        safetensors_torch.save_file(made, site.mountpoint / "set" / shard(number), {"shard": str(number)})
    torch.save(made, site.mountpoint / "model.pt")
    np.savez(site.mountpoint / "model.npz", **{name: each.numpy() for name, each in made.items()})
    np.save(site.mountpoint / "array.npy", tensor(20, 2 * rows).numpy())
    site.umount()


def fetched(site: Site, url: str, network: FaultProxy, process: ProcessPoolExecutor, load: Load, rows: int) -> Any:
    """(bytes that came for *load* on a fresh store, what it touched)."""
    network.reset()
    site.mount("--remote", url, "--read-only", *QUICK)
    touched = process.submit(load, site.mountpoint, rows).result(120)
    site.umount("--no-wait")
    return sum(count.bytes_down for count in network.counts.values()), touched


def test_partial_loads_fetch_what_they_touch(
    machine: MakeSite, url: str, network: FaultProxy, process: ProcessPoolExecutor
) -> None:
    """Each kind of partial load, on an empty store of its own: what it touches, an eighth, and the edges."""
    here = machine("here")
    here.mount("--remote", url, *QUICK)
    save(here, SMALL)
    found = {}
    for load in LOADS:
        site = machine(load.__name__, endpoint=network.endpoint)
        came, touched = fetched(site, url, network, process, load, SMALL)
        found[load.__name__] = (came / MIB, (touched.bytes * 9 / 8 + EDGE * (touched.ranges + 1)) / MIB)
    assert {name: each for name, each in found.items() if each[0] > each[1]} == {}, found


def first_tensor(path: Path, rows: int) -> float:
    """Seconds until the first tensor of a file is there."""
    started = time.monotonic()
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("layer.0.norm"), torch.full((COLUMNS,), 0))
    return time.monotonic() - started


def test_the_first_tensor_does_not_wait_for_the_file(
    machine: MakeSite, url: str, network: FaultProxy, process: ProcessPoolExecutor
) -> None:
    """On a line that takes 12 s for the file: manifest, header, tensor."""
    here, there = machine("here"), machine("there", endpoint=network.endpoint)
    here.mount("--remote", url, *QUICK)
    safetensors_torch.save_file(state(SMALL), here.mountpoint / "model.safetensors")
    here.umount()
    there.mount("--remote", url, "--read-only", *QUICK)
    network.faults = Faults(latency_s=0.05, down_bytes_per_s=4 * MIB)
    assert process.submit(first_tensor, there.mountpoint, SMALL).result(60) < 3.0
    network.heal()
    there.umount("--no-wait")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_partial_loads_of_a_real_size_fetch_a_fifth_more_at_most(
    machine: MakeSite, url: str, network: FaultProxy, process: ProcessPoolExecutor
) -> None:
    """With tensors of 96 MiB everything that a partial load fetches is at most 1.2 times what it touches."""
    here = machine("here")
    here.mount("--remote", url, *QUICK)
    save(here, LARGE)
    found = {}
    for load in LOADS:
        site = machine(load.__name__, endpoint=network.endpoint)
        came, touched = fetched(site, url, network, process, load, LARGE)
        if touched.bytes:
            found[load.__name__] = came / touched.bytes
    assert {name: share for name, share in found.items() if share > 1.2} == {}, found
