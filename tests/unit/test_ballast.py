"""The ballast on small real disks: what it gives up, when it takes it back, and the catalog that lives on it."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.local.ballast import ASLEEP_BYTES, BALLAST_BYTES, BALLAST_PARTS, Ballast
from ckptfs.local.catalog.catalog import SPARE_BYTES, Catalog
from ckptfs.local.store import Store
from tests.support.disks import filled, free_bytes, small_disk

MIB = 1 << 20
DISK_MIB = 64
FULL_BYTES = 2 * MIB
"""Nearly: the disk is a little smaller than its file."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, DISK_MIB) as top:
        yield top


@pytest.fixture
def ballast(disk: Path) -> Iterator[Ballast]:
    made = Ballast(disk / "ballast")
    made.take()
    yield made
    made.close()


def test_its_size(ballast: Ballast, tmp_path: Path) -> None:
    """It has the blocks that it shows; a small disk has a small one, a large one no more than the log can take."""
    assert FULL_BYTES * 3 // 4 < ballast.bytes == ballast.full_bytes <= DISK_MIB * MIB // BALLAST_PARTS
    assert os.stat(f"/proc/self/fd/{ballast._fd}").st_blocks * 512 >= ballast.bytes
    here = Ballast(tmp_path / "ballast")
    assert here.full_bytes <= BALLAST_BYTES
    here.close()


def test_it_gives_what_is_lacking_and_no_more(ballast: Ballast, disk: Path) -> None:
    """Nothing while there is room; down to what the asker must leave; it comes back when there is room, by halves."""
    full = ballast.bytes
    assert ballast.give(MIB) and ballast.bytes == full
    with filled(disk):
        assert ballast.give(256 << 10) and full - MIB < ballast.bytes < full
        assert free_bytes(disk) >= 256 << 10
        assert not ballast.give(full, keeping=0.5) and ballast.bytes >= full // 2 - 65536
        assert not ballast.is_full
        before, free = ballast.bytes, free_bytes(disk)
        ballast.take()
        assert ballast.bytes - before <= free // 2
        ballast.give(full)
        assert ballast.bytes == 0
    ballast.take()
    assert ballast.is_full


def test_it_allocates_for_one_file(ballast: Ballast, disk: Path) -> None:
    """What was allocated is that file's: written although the disk is full, and the file is no longer for it."""
    with filled(disk), open(disk / "file", "w+b", buffering=0) as file:
        assert ballast.allocate(file.fileno(), 0, 512 << 10)
        assert os.fstat(file.fileno()).st_size == 0
        assert file.write(b"x" * (512 << 10)) == 512 << 10
        os.fsync(file.fileno())
        assert not ballast.allocate(file.fileno(), MIB, 100 * MIB)


def test_a_store_that_nobody_has_mounted_keeps_little_of_a_roomy_disk(ballast: Ballast, disk: Path) -> None:
    """A small disk is never roomy: it keeps all."""
    ballast.sleep()
    assert ballast.is_full
    ballast.full_bytes = 256 << 10
    ballast.sleep()
    assert ballast.bytes == ASLEEP_BYTES


def test_the_catalog_goes_on_without_a_free_byte(ballast: Ballast, disk: Path) -> None:
    """Changes many times the size of the ballast, since the log begins anew; everything is there afterwards."""
    catalog = Catalog(disk / "catalog.db", ballast.allocate)
    with catalog.transaction() as db:
        db.executemany("INSERT INTO setting VALUES (?, ?)", [(f"key-{n}", b"x" * 1000) for n in range(200)])
    assert catalog.reserve() and os.stat(disk / "catalog.db-wal").st_blocks * 512 > SPARE_BYTES
    with filled(disk):
        for n in range(200):
            catalog.set_setting(f"key-{n}", b"y" * 1000)
            with catalog.transaction() as db:
                db.execute("UPDATE setting SET value = ? WHERE key < 'key-2'", (b"z" * 1000,))
        assert os.stat(disk / "catalog.db-wal").st_size < 8 * MIB
        catalog.grow()
        catalog.checkpoint()
        catalog.close()
    db = sqlite3.connect(disk / "catalog.db")
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert db.execute("SELECT count(*) FROM setting WHERE key LIKE 'key-%'").fetchone() == (200,)
    db.close()


def test_a_transaction_that_is_too_large_leaves_no_trace(ballast: Ballast, disk: Path) -> None:
    """It is ENOSPC as a whole, and the next one works."""
    catalog = Catalog(disk / "catalog.db", ballast.allocate)
    with filled(disk):
        with pytest.raises(OSError) as full, catalog.transaction() as db:
            db.executemany("INSERT INTO setting VALUES (?, ?)", [(f"n{n}", b"x" * 1000) for n in range(10_000)])
        assert full.value.errno == errno.ENOSPC
        catalog.set_setting("after", 1)
        assert catalog.get_setting("after") == 1 and catalog.get_setting("n1") is None
        catalog.close()


def test_a_store_opens_on_a_full_disk(disk: Path) -> None:
    """Again and again, however it was left; and a name can be made."""
    store = Store.open(disk / "store")
    store.close()
    with filled(disk):
        for _ in range(5):
            store = Store.open(disk / "store", create=False)
            store.check_room()
            image = store.new_image()
            assert os.write(image.fd, b"step-1") == 6
            os.fsync(image.fd)
            os.close(image.fd)
            store.images.delete(image.id)
            store.close()
