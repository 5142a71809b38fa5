"""Reading from the remote on a fresh store: how soon it begins, what is fetched once, and what comes unasked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from tests.support.machines import Machines
from tests.support.mounts import Site, until
from tests.support.proxy import FaultProxy, Faults
from tests.support.trees import digest_bytes

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
ROUND_TRIP_S = 0.5


def name(shard: int, shards: int) -> str:
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"


def saved(machines: Machines, shards: int, size: int) -> list[bytes]:
    """A set in run/step-1, on the remote; its shards' bytes."""
    here = machines.mount(machines.site("near", tuning={}))
    directory = here / "run" / "step-1"
    directory.mkdir(parents=True)
    data = [np.random.default_rng(shard).bytes(size) for shard in range(shards)]
    for shard, each in enumerate(data):
        (directory / name(shard, shards)).write_bytes(each)
    assert ckptfs.wait(here, "replicated", 60)
    return data


def cold(machines: Machines, *, by: FaultProxy | None = None) -> tuple[Site, Path]:
    """A machine that has nothing yet, and where it shows the set."""
    site = machines.site("far", by=by, tuning={}, settings={"read_timeout_s": 20.0})
    machines.mount(site, "--lag", "60s")
    return site, site.mountpoint / "run" / "step-1"


def test_reading_begins_within_four_round_trips(machines: Machines) -> None:
    """Two directories, the manifest, one range: a large file's first byte does not wait for its others."""
    data = saved(machines, 1, 40 * MIB)
    way = machines.proxy()
    _, there = cold(machines, by=way)
    way.faults = Faults(latency_s=ROUND_TRIP_S, down_bytes_per_s=32 * MIB)
    started = time.monotonic()
    with open(there / name(0, 1), "rb", buffering=0) as file:
        assert file.read(1) == data[0][:1]
        took_s = time.monotonic() - started
    assert took_s < 5 * ROUND_TRIP_S
    way.heal()


READER = """
import hashlib, mmap, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as shared:
        print(hashlib.blake2b(shared).hexdigest())
"""


def test_eight_processes_that_map_one_set_fetch_it_once(machines: Machines) -> None:
    """All at the same time, half of them in the other order: every byte for each, over the line once."""
    data = saved(machines, 2, 12 * MIB)
    way = machines.proxy()
    _, there = cold(machines, by=way)
    assert len(os.listdir(there)) == 2
    way.reset()
    paths = [str(there / name(shard, 2)) for shard in range(2)]
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, *(paths if number % 2 else reversed(paths))],
            stdout=subprocess.PIPE, text=True,
        )
        for number in range(8)
    ]  # fmt: skip
    try:
        said = [reader.communicate(timeout=60)[0].split() for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait(30)
    expected = [digest_bytes(each) for each in data]
    assert said == [expected if number % 2 else expected[::-1] for number in range(8)]
    assert way.counts["GET"].bytes_down <= 1.03 * sum(map(len, data))


def test_shards_come_before_they_are_opened(machines: Machines) -> None:
    """Who reads the first two of four shards whole reads the others without the remote."""
    data = saved(machines, 4, 4 * MIB)
    way = machines.proxy()
    far, there = cold(machines, by=way)
    for shard in (0, 1):
        assert (there / name(shard, 4)).read_bytes() == data[shard]
    whole = 4 * 4 * MIB
    images = far.store / "images"
    until(lambda: sum(each.stat().st_blocks * 512 for each in images.glob("*/*")) >= whole, "the other shards", 20)
    way.faults = Faults("refuse")
    for shard in (2, 3):
        assert (there / name(shard, 4)).read_bytes() == data[shard]


def test_a_file_that_is_opened_again_is_not_fetched_again(machines: Machines) -> None:
    """As loaders do that look at a header first: the rest of the same piece, right after it was closed."""
    here = machines.mount(machines.site("near", tuning={}))
    array = np.random.default_rng(1).integers(0, 1 << 31, MIB // 2)
    np.save(here / "array.npy", array)
    assert ckptfs.wait(here, "replicated", 60)
    way = machines.proxy()
    _, run = cold(machines, by=way)
    path = run.parent.parent / "array.npy"
    size = path.stat().st_size
    for offset in (40_000, 120_000, 240_000):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            assert os.pread(file.fileno(), 8, offset + 128) == array.tobytes()[offset : offset + 8]
        if offset == 40_000:
            way.reset()
    assert size > MIB and way.counts.get("GET") is None
