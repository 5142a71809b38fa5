"""A store that is too small for what is read: every byte all the same, and room for the catalog and for saves."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs.errors import StoreFull
from ckptfs.local.room import RESERVE_BYTES
from tests.support.disks import filled, free_bytes, small_disk
from tests.support.machines import Machines, census
from tests.support.mounts import Site, peak_bytes, run
from tests.support.trees import digest_bytes

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
SHARDS, SHARD_BYTES = 3, 20 * MIB


def name(shard: int) -> str:
    return f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"


def data(shard: int) -> bytes:
    return np.random.default_rng(shard).bytes(SHARD_BYTES)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """100 MiB, of which the reserve leaves less than a half of the set."""
    with small_disk(tmp_path, 100) as top:
        yield top


@pytest.fixture
def saved(machines: Machines) -> Path:
    """The set, on the remote, and on the machine that saved it."""
    here = machines.mount(machines.site("near", tuning={}))
    (here / "set").mkdir()
    for shard in range(SHARDS):
        (here / "set" / name(shard)).write_bytes(data(shard))
    assert ckptfs.wait(here, "replicated", 60)
    return here


BY_MAP = """
import hashlib, mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as shared:
    print(hashlib.blake2b(shared).hexdigest())
"""


def digest_by_map(path: Path) -> str:
    """In a process of its own, which a page that does not come would kill, and whose lock the proxy does not need."""
    done = run([sys.executable, "-c", BY_MAP, str(path)])
    assert done.status == 0, done.said
    return done.out.strip()


def test_a_set_larger_than_the_disk_is_read(disk: Path, machines: Machines, saved: Path) -> None:
    """Sequentially and by map: every byte, each fetched about once, and the reserve stays."""
    way = machines.proxy()
    far = machines.site("far", by=way, tuning={}, store=disk / "store")
    there = machines.mount(far)
    assert free_bytes(disk) - RESERVE_BYTES < SHARDS * SHARD_BYTES // 2, "the disk is small enough"
    way.reset()
    for shard in range(SHARDS):
        assert (there / "set" / name(shard)).read_bytes() == data(shard)
    assert free_bytes(disk) >= RESERVE_BYTES - MIB
    assert way.counts["GET"].bytes_down < 1.1 * SHARDS * SHARD_BYTES
    assert peak_bytes(far.pid()) <= 256 * MIB
    far.umount()
    machines.mount(far)  # the kernel has none of the pages any more
    for shard in range(SHARDS):
        assert digest_by_map(there / "set" / name(shard)) == digest_bytes(data(shard))
    assert free_bytes(disk) >= RESERVE_BYTES - MIB


def test_a_disk_without_any_room_serves_reads(disk: Path, machines: Machines, saved: Path) -> None:
    """Files that were never looked at, too; changing one is ENOSPC; with room again everything is as usual."""
    far = machines.site("far", tuning={}, store=disk / "store")
    there = machines.mount(far)
    with filled(disk):
        assert len(os.listdir(there / "set")) == SHARDS
        for shard in range(SHARDS):
            assert (there / "set" / name(shard)).read_bytes() == data(shard)
        with pytest.raises(OSError) as refused, open(there / "set" / name(0), "r+b", buffering=0) as file:
            file.write(b"changed")
        assert refused.value.errno == errno.ENOSPC
        assert (there / "set" / name(0)).read_bytes() == data(0)
    with open(there / "set" / name(0), "r+b", buffering=0) as file:
        file.write(b"changed")
    assert (there / "set" / name(0)).read_bytes() == b"changed" + data(0)[7:]


def test_a_change_that_does_not_fit_is_refused_at_once(disk: Path, machines: Machines, saved: Path) -> None:
    """Opening a file for writing that must come here first, and does not fit: ENOSPC before anything is fetched."""
    way = machines.proxy()
    far = machines.site("far", by=way, tuning={}, store=disk / "store")
    there = machines.mount(far)
    assert len(os.listdir(there / "set")) == SHARDS
    with filled(disk, leaving=RESERVE_BYTES + SHARD_BYTES // 2):
        way.reset()
        with pytest.raises(OSError) as refused, open(there / "set" / name(0), "r+b", buffering=0) as file:
            file.write(b"changed")
        assert refused.value.errno == errno.ENOSPC
        assert way.counts["GET"].bytes_down < MIB


def test_prefetch_says_that_it_does_not_fit(disk: Path, machines: Machines, saved: Path) -> None:
    """Before anything is fetched, with both numbers and what to do; a part that fits is fetched."""
    way = machines.proxy()
    far = machines.site("far", by=way, tuning={}, store=disk / "store")
    there = machines.mount(far)
    assert len(os.listdir(there / "set")) == SHARDS
    way.reset()
    done = far.run("prefetch", str(there / "set"))
    assert done.status == 1
    assert "this needs 60 MiB, and " in done.said and "Make room on that disk, or prefetch less" in done.said
    with pytest.raises(StoreFull):
        ckptfs.prefetch(there)
    assert way.counts["GET"].bytes_down < MIB
    ckptfs.prefetch(there / "set" / name(1))
    assert (there / "set" / name(1)).read_bytes() == data(1)


def test_prefetch_that_loses_its_room_says_so(disk: Path, machines: Machines, saved: Path) -> None:
    """Somebody else takes the disk meanwhile: an error that says how far it came."""
    far = machines.site("far", tuning={}, store=disk / "store")
    there = machines.mount(far)
    with filled(disk, leaving=RESERVE_BYTES + SHARD_BYTES + MIB):
        ckptfs.prefetch(there / "set" / name(0))
        with pytest.raises(StoreFull):
            ckptfs.prefetch(there / "set" / name(1))


def test_a_save_keeps_its_room_while_a_set_is_read(tmp_path: Path, machines: Machines, saved: Path) -> None:
    """A save that takes nearly all that is free, in two files, while another process reads a cold set."""
    with small_disk(tmp_path, 300) as disk:
        far = machines.site("far", tuning={}, store=disk / "store")
        there = machines.mount(far)
        assert len(os.listdir(there / "set")) == SHARDS
        save_bytes = 100 * MIB
        with filled(disk, leaving=save_bytes + 8 * MIB):
            save_beside_reading(far, save_bytes)


def save_beside_reading(far: Site, save_bytes: int) -> None:
    wrong: list[str] = []

    def read() -> None:
        for shard in range(SHARDS):
            if (far.mountpoint / "set" / name(shard)).read_bytes() != data(shard):
                wrong.append(name(shard))

    reader = threading.Thread(target=read)
    half = np.random.default_rng(9).bytes(save_bytes // 2)
    with open(far.mountpoint / "one", "wb", buffering=0) as file:
        reader.start()
        for at in range(0, len(half), MIB):
            assert file.write(half[at : at + MIB]) == min(MIB, len(half) - at)
        reader.join(60)
    (far.mountpoint / "two").write_bytes(half)
    assert not reader.is_alive() and not wrong
    assert (far.mountpoint / "one").read_bytes() == half
    assert census(far.mountpoint)["two"][1] == len(half)
