"""Room on the disk for what the remote has, and the memory that stands in for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptfs.ids import ChunkId
from ckptfs.local import room as module
from ckptfs.local.room import REFUSED_S, RESERVE_BYTES, Room
from ckptfs.replica.kept import KeptChunks

MIB = 1 << 20


class Disk:
    """Stands for os.statvfs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int, free: int) -> None:
        self.total, self.free = total, free
        self.saving = False
        self.now_s = 100.0
        monkeypatch.setattr(module.os, "statvfs", self._statvfs)
        self.room = Room(Path("/"), lambda: self.saving, now=lambda: self.now_s)

    def _statvfs(self, path: Path) -> os.statvfs_result:
        blocks, free = self.total // 4096, self.free // 4096
        return os.statvfs_result((4096, 4096, blocks, free, free, 0, 0, 0, 0, 255))


def test_the_reserve_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken counts until it is on the disk, and everything ends at the reserve."""
    disk = Disk(monkeypatch, total=1000 * MIB, free=RESERVE_BYTES + 10 * MIB)
    assert disk.room.free_bytes() == 10 * MIB
    assert disk.room.take(8 * MIB) and not disk.room.take(4 * MIB)
    disk.free -= 8 * MIB
    disk.room.landed(8 * MIB)
    assert disk.room.take(2 * MIB) and not disk.room.take(1)
    disk.free = RESERVE_BYTES // 2
    assert disk.room.free_bytes() == 0


def test_a_hundredth_of_a_large_disk_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, total=1000 << 30, free=11 << 30)
    assert disk.room.reserve_bytes() == 10 << 30 and disk.room.free_bytes() == 1 << 30


def test_a_save_has_half_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """While something is saved only what is free beyond a half is taken, but for what a program writes itself."""
    disk = Disk(monkeypatch, total=1000 * MIB, free=500 * MIB)
    disk.saving = True
    assert not disk.room.has(1) and not disk.room.take(1)
    assert disk.room.demand(MIB)
    disk.room.landed(MIB)
    disk.free = 501 * MIB
    assert disk.room.take(MIB) and not disk.room.take(MIB)
    disk.saving = False
    assert disk.room.take(MIB)


def test_a_disk_that_refuses_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota shows in no figure: after a refusal nothing is tried for some seconds, whatever seems free."""
    disk = Disk(monkeypatch, total=1000 * MIB, free=900 * MIB)
    disk.room.refused()
    assert not disk.room.take(1) and not disk.room.has(1)
    disk.now_s += REFUSED_S
    assert disk.room.take(1)


def chunk(number: int) -> ChunkId:
    return ChunkId(number.to_bytes(32, "big"))


def test_kept_chunks_are_bounded_and_what_was_read_goes_first() -> None:
    kept = KeptChunks(10, 6)
    kept.add(chunk(1), b"aaa", read=False)
    kept.add(chunk(2), b"bbb", read=True)
    kept.add(chunk(3), b"ccc", read=True)
    kept.add(chunk(4), b"ddd", read=True)
    assert kept.bytes == 9 and chunk(2) not in kept
    assert kept.read(chunk(1)) == b"aaa" and kept.read(chunk(2)) is None
    kept.add(chunk(5), b"eee" * 10, read=True)
    assert chunk(5) in kept, "one is kept however long"


def test_what_is_fetched_ahead_is_bounded_by_itself() -> None:
    """With what is on its way; what nobody read for a while no longer counts."""
    now_s = [0.0]
    kept = KeptChunks(90, 60, now=lambda: now_s[0])
    kept.coming_bytes = 20
    kept.add(chunk(1), bytes(30), read=False)
    assert kept.takes_ahead(10) and not kept.takes_ahead(11)
    kept.read(chunk(1))
    assert kept.takes_ahead(40)
    kept.add(chunk(2), bytes(30), read=False)
    now_s[0] = 11.0
    assert kept.takes_ahead(40) and chunk(2) in kept
