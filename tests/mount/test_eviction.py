"""A disk full of what the remote has: it makes way for saves, and for nothing else, and comes back when it is read."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs.local.room import RESERVE_BYTES, SLACK_PARTS
from tests.support.consistency import problems
from tests.support.disks import free_bytes, small_disk
from tests.support.machines import Machines, census
from tests.support.mounts import Site, until
from tests.support.proxy import FaultProxy, Faults

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
SHARDS, SHARD_BYTES = 12, 20 * MIB
SET_BYTES = SHARDS * SHARD_BYTES
KEPT_BYTES = RESERVE_BYTES - RESERVE_BYTES // SLACK_PARTS - MIB
DOUBT_S = 6.0
"""Longer than the evictor lets a remote rest that did not answer in time."""


def name(shard: int) -> str:
    return f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"


def data(shard: int, of: int = 0) -> bytes:
    return np.random.default_rng((of, shard)).bytes(SHARD_BYTES)


def save(directory: Path, of: int = 0, shards: int = SHARDS, *, tries: int = 1) -> None:
    """With more *tries* a shard that the disk had no room for is written again when the remote is asked again."""
    directory.mkdir()
    for shard in range(shards):
        for left in reversed(range(tries)):
            try:
                write(directory / name(shard), data(shard, of))
                break
            except OSError as error:
                if error.errno != errno.ENOSPC or not left:
                    raise
                time.sleep(DOUBT_S)


def write(path: Path, whole: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        at = 0
        while at < len(whole):  # a disk that becomes full takes a part, and says so at the next one
            at += file.write(whole[at : at + MIB])
        os.fsync(file.fileno())


def is_right(directory: Path, of: int = 0, shards: int = SHARDS) -> bool:
    return all((directory / name(shard)).read_bytes() == data(shard, of) for shard in range(shards))


def local_bytes(site: Site) -> int:
    """What images take of the site's disk."""
    found = 0
    for path in (site.store / "images").rglob("*"):
        try:
            found += path.stat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:
            continue
    return found


def fetched_bytes(way: FaultProxy) -> int:
    found = way.counts.get("GET")
    return found.bytes_down if found is not None else 0


@pytest.fixture
def near(machines: Machines) -> Path:
    """A machine with a set that is on the remote."""
    here = machines.mount(machines.site("near", tuning={}))
    save(here / "set")
    assert ckptfs.wait(here, "replicated", 120)
    return here


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """1.3 times the set."""
    with small_disk(tmp_path, int(1.3 * SET_BYTES) // MIB) as top:
        yield top


@pytest.fixture
def way(machines: Machines) -> FaultProxy:
    """The way of `far` to the remote."""
    return machines.proxy()


@pytest.fixture
def far(machines: Machines, near: Path, disk: Path, way: FaultProxy) -> Site:
    """A machine on the small disk, which fetched as much of the set as it may."""
    site = machines.site("far", by=way, tuning={}, store=disk / "store")
    there = machines.mount(site)
    assert is_right(there / "set")
    until(lambda: free_bytes(disk) < RESERVE_BYTES + 2 * MIB, "the disk to be as full as it may")
    return site


def test_a_save_takes_the_room_of_what_was_fetched(far: Site, disk: Path, near: Path) -> None:
    """A set of the same size, while the fetched one is read: every byte of both, and the reserve is kept."""
    there = far.mountpoint
    before = census(there / "set")
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            for shard in range(SHARDS):
                if (there / "set" / name(shard)).read_bytes() != data(shard):
                    wrong.append(name(shard))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        save(there / "new", of=1)
    finally:
        stop.set()
        reader.join(60)
    assert not reader.is_alive() and not wrong
    assert is_right(there / "new", of=1) and is_right(there / "set")
    assert census(there / "set") == before, "sizes, times and modes are the same"
    assert ckptfs.wait(there, "replicated", 120)
    until(lambda: free_bytes(disk) >= KEPT_BYTES, "the reserve to be free")
    assert is_right(near / "new", of=1)


def times(top: Path) -> dict[str, tuple[int, int]]:
    """mtime and ctime of everything below *top*, directories and itself as well."""
    found = {str(path): path.stat() for path in (top, *top.rglob("*"))}
    return {path: (status.st_mtime_ns, status.st_ctime_ns) for path, status in found.items()}


def test_a_store_of_one_machine_is_compressed(tmp_path: Path) -> None:
    """With a bucket on the same disk, and what was not used for a second only there; the newest stays whole.

    No time of a file or a directory changes by that, nor by reading what was evicted.
    """
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    weights = [np.random.default_rng(number).standard_normal(MIB, dtype=np.float32) for number in range(6)]
    with Site(tmp_path, tuning={}) as site:
        site.mount("--remote", f"file://{bucket}", "--settle", "100ms", "--evict-after", "1s")
        for number, array in enumerate(weights):
            directory = site.mountpoint / f"step-{number}"
            directory.mkdir()
            np.save(directory / "model.npy", array)
        before = times(site.mountpoint)
        assert ckptfs.wait(site.mountpoint, "replicated", 60)
        until(lambda: local_bytes(site) < 1.5 * weights[0].nbytes, "all but the newest to be evicted", 60)
        assert local_bytes(site) >= weights[0].nbytes
        packs = sum(path.stat().st_size for path in bucket.rglob("*") if path.is_file())
        assert packs < 0.9 * sum(array.nbytes for array in weights)
        assert times(site.mountpoint) == before
        for number, array in enumerate(weights):
            path = site.mountpoint / f"step-{number}" / "model.npy"
            assert path.stat().st_blocks * 512 >= array.nbytes
            assert np.array_equal(np.load(path), array)
        assert times(site.mountpoint) == before
        site.umount()
        site.mount()
        assert times(site.mountpoint) == before
        assert all(
            np.array_equal(np.load(site.mountpoint / f"step-{number}" / "model.npy"), array)
            for number, array in enumerate(weights)
        )
        site.umount()


@pytest.mark.slow
def test_one_large_file_takes_the_room_of_what_was_fetched(far: Site, machines: Machines) -> None:
    """Faster than anybody looks, where the daemon writes: what does not fit waits until something made way."""
    there = far.mountpoint
    far.umount()
    machines.mount(far, "--passthrough", "off")
    large = np.random.default_rng(7).bytes(SET_BYTES * 3 // 4)
    with open(there / "large", "wb", buffering=0) as file:
        for at in range(0, len(large), 8 * MIB):
            assert file.write(large[at : at + 8 * MIB]) == min(8 * MIB, len(large) - at)
    assert (there / "large").read_bytes() == large
    assert is_right(there / "set")


@pytest.mark.slow
def test_nothing_is_evicted_without_need(far: Site, disk: Path) -> None:
    """A disk as full as fetched bytes may make it stays so while nothing is saved, however long; `df` knows better."""
    before = local_bytes(far)
    assert before > SHARD_BYTES
    seen_bytes = before - RESERVE_BYTES - 2 * MIB
    until(lambda: free_bytes(far.mountpoint) > free_bytes(disk) + seen_bytes, "df to count what can make way")
    assert local_bytes(far) == before


def open_what_is_here(there: Path, way: FaultProxy, wanted: int) -> dict[int, int]:
    """Shards of which every byte is on the disk, and descriptors of them; others made way while these came."""
    found: dict[int, int] = {}
    for shard in range(SHARDS):
        fd = os.open(there / "set" / name(shard), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        way.reset()
        if os.pread(fd, SHARD_BYTES, 0) == data(shard) and not fetched_bytes(way):
            found[shard] = fd
            if len(found) == wanted:
                break
        else:
            os.close(fd)
    assert len(found) == wanted
    return found


def test_what_is_in_use_stays(far: Site, way: FaultProxy, machines: Machines) -> None:
    """A mapped file and an open one are not evicted however much a save needs; others of the set are."""
    there, half = far.mountpoint, SHARDS // 2
    used = open_what_is_here(there, way, 2)
    to_map, opened = used.values()
    mapped = mmap.mmap(to_map, 0, access=mmap.ACCESS_READ)
    os.close(to_map)
    try:
        with mapped:
            save(there / "new", of=1, shards=half)
            assert "made way" in far.log()
            far.kill()  # the next mount's kernel has no pages of what it is to read
    finally:
        with suppress(OSError):  # nobody answers
            os.close(opened)
    machines.mount(far)
    way.reset()
    assert all((there / "set" / name(shard)).read_bytes() == data(shard) for shard in used)
    assert fetched_bytes(way) < SHARD_BYTES // 2, "they were still here"
    assert is_right(there / "set")
    assert fetched_bytes(way) > SHARD_BYTES, "others were not"
    assert is_right(there / "new", of=1, shards=half)


def test_what_is_not_published_stays(far: Site, way: FaultProxy) -> None:
    """What is still to be uploaded is not evicted for what is saved after it."""
    there, half = far.mountpoint, SHARDS // 2
    way.faults = Faults(methods=frozenset({"PUT"}), error_share=1.0)
    # Beside other tests the remote may be slow to answer; then it is in doubt for some seconds, and nothing makes way.
    save(there / "first", of=1, shards=half, tries=3)
    save(there / "second", of=2, shards=half - 1, tries=3)
    assert "made way" in far.log()
    way.faults = Faults(mode="refuse")
    assert is_right(there / "first", of=1, shards=half) and is_right(there / "second", of=2, shards=half - 1)
    way.heal()
    assert ckptfs.wait(there, "replicated", 120)


@pytest.mark.slow
def test_nothing_is_evicted_while_the_remote_does_not_answer(far: Site, way: FaultProxy) -> None:
    """Then what is here may be all there is. The save is as quick as ever, and gets ENOSPC where the disk ends."""
    there = far.mountpoint
    before = local_bytes(far)
    way.faults = Faults(mode="black_hole")
    started = time.monotonic()
    with pytest.raises(OSError) as refused:
        save(there / "new", of=1)
    assert refused.value.errno == errno.ENOSPC
    assert time.monotonic() - started < 15
    assert local_bytes(far) > before and "made way" not in far.log()
    way.heal()
    shutil.rmtree(there / "new")
    until(lambda: free_bytes(there) > SET_BYTES * 3 // 4, "df to count what can make way again")
    save(there / "again", of=2)
    assert is_right(there / "again", of=2) and is_right(there / "set")


@pytest.mark.slow
def test_old_checkpoints_of_our_own_make_way(tmp_path: Path, machines: Machines) -> None:
    """A disk that holds two sets takes five, one after the other: those that were published before make way."""
    with small_disk(tmp_path, 2 * SET_BYTES // MIB) as top:
        site = machines.site("only", tuning={}, store=top / "store")
        here = machines.mount(site)
        for step in range(5):
            save(here / f"step-{step}", of=step, shards=SHARDS // 2)
            assert ckptfs.wait(here, "replicated", 120)
        assert "made way" in site.log()
        blocks = [os.stat(here / f"step-{step}" / name(0)).st_blocks for step in range(5)]
        assert min(blocks) * 512 >= SHARD_BYTES, "programs take a file without blocks for a hole"
        for step in reversed(range(5)):
            assert is_right(here / f"step-{step}", of=step, shards=SHARDS // 2)


@pytest.mark.slow
def test_kills_during_eviction_lose_nothing(far: Site, disk: Path, machines: Machines) -> None:
    """The daemon is killed again and again while it makes room for a save; after each mount every byte is there."""
    there = far.mountpoint
    for round in range(3):
        before = local_bytes(far)

        def save_until_killed(step: int = round) -> None:
            with suppress(OSError):
                save(there / f"new-{step}", of=step + 1, shards=4)

        saver = threading.Thread(target=save_until_killed)
        saver.start()
        until(lambda least=before - SHARD_BYTES * round // 2: local_bytes(far) < least, "the eviction to begin")
        far.kill()
        saver.join(60)
        assert not saver.is_alive()
        machines.mount(far)
        assert is_right(there / "set")
        shutil.rmtree(there / f"new-{round}")
    far.umount()
    assert problems(far.store) == []
