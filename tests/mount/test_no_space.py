"""A disk without a free byte, filled by somebody else: deleting, renaming, pointers and mounting work all the same."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptfs
from ckptfs.local.ballast import BALLAST_PARTS
from tests.support.consistency import problems
from tests.support.disks import filled, free_bytes, small_disk
from tests.support.machines import QUICK, Machines, same_soon
from tests.support.mounts import TINY, Site, until

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
DISK_MIB = 100
FULL_BYTES = DISK_MIB * MIB // BALLAST_PARTS


@pytest.fixture(params=[False, True], ids=["plain", "journal"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with small_disk(tmp_path, DISK_MIB, journal=request.param) as top:
        yield top


@pytest.fixture
def local(tmp_path: Path, disk: Path) -> Iterator[Site]:
    """A local mount whose store is on the small disk, with files and a full ballast."""
    with Site(tmp_path) as site:
        site.store = disk / "store"
        site.mount()
        (site.mountpoint / "tree").mkdir()
        for number in range(200):
            (site.mountpoint / "tree" / f"{number}").write_bytes(b"x" * 1000)
        (site.mountpoint / "latest").write_text("step-1")
        (site.mountpoint / "saved").write_bytes(b"saved" * MIB)
        assert ballast(site) > FULL_BYTES // 2
        yield site


def test_what_is_removed_makes_room_for_the_next_save(tmp_path: Path, disk: Path) -> None:
    """At once, as on a local disk: a loop that drops the oldest checkpoint and saves the next on a disk for three."""
    with Site(tmp_path) as site:
        site.store = disk / "store"
        site.mount()
        size = free_bytes(disk) * 3 // 10
        for step in range(9):
            if step >= 3:
                until(lambda: site.status()["state"] == "sealed", "everything to be sealed")
                (site.mountpoint / f"step-{step - 3}").unlink()
            with open(site.mountpoint / f"step-{step}", "wb", buffering=0) as file:
                left = size
                while left:
                    left -= file.write(os.urandom(min(left, MIB)))
        assert len(os.listdir(site.mountpoint)) == 3


def ballast(site: Site) -> int:
    return (site.store / "ballast").stat().st_size


def test_case_018_deleting_renaming_and_pointers_work(local: Site, disk: Path) -> None:
    """And a large write is ENOSPC, which leaves the version before as it was; room that came back is used again."""
    top = local.mountpoint
    with filled(disk):
        assert free_bytes(disk) < 4096
        with pytest.raises(OSError) as full, open(top / "saved.tmp", "wb", buffering=0) as file:
            for _ in range(20):
                file.write(b"y" * MIB)
        assert full.value.errno == errno.ENOSPC
        assert (top / "saved").read_bytes() == b"saved" * MIB
        for step in range(5):
            (top / "latest.tmp").write_text(f"step-{step}")
            (top / "latest.tmp").rename(top / "latest")
            assert (top / "latest").read_text() == f"step-{step}"
            (top / "latest").write_text("in place")
            assert (top / "latest").read_text() == "in place"
        (top / "tree" / "0").rename(top / "tree" / "renamed")
        (top / "tree" / "1").unlink()
        shutil.rmtree(top / "tree")
        (top / "saved.tmp").unlink()
        assert sorted(os.listdir(top)) == ["latest", "saved"]
    until(lambda: ballast(local) > FULL_BYTES // 2, "the ballast to be taken back")
    (top / "after").write_bytes(b"a" * 10 * MIB)
    assert (top / "after").read_bytes() == b"a" * 10 * MIB
    local.umount()
    assert problems(local.store) == []


def test_mounting_works(local: Site, disk: Path) -> None:
    """After a clean stop and after a kill; what is there can be read and deleted."""
    top = local.mountpoint
    local.umount()
    for stop in ("umount", "kill"):
        with filled(disk):
            assert free_bytes(disk) < 4096
            local.mount()
            assert (top / "saved").read_bytes() == b"saved" * MIB
            (top / "latest").write_text(stop)
            if stop == "umount":
                shutil.rmtree(top / "tree")
                local.umount()
            else:
                local.kill()
                local.mount()
                assert (top / "latest").read_text() == stop
                (top / "saved").unlink()
                until(lambda: free_bytes(disk) > 2 * MIB, "the space to come back")
                local.umount()
    assert problems(local.store) == []


def test_deleting_goes_on_while_others_write(local: Site, disk: Path) -> None:
    """Programs that take whatever becomes free do not keep a large tree from being removed."""
    top, stop = local.mountpoint, threading.Event()

    def write() -> None:
        while not stop.is_set():
            try:
                with open(disk / "hog", "ab", buffering=0) as file:
                    file.write(b"h" * 65536)
            except OSError:
                pass

    with filled(disk):
        hog = threading.Thread(target=write)
        hog.start()
        try:
            shutil.rmtree(top / "tree")
            (top / "saved").unlink()
            (top / "latest").rename(top / "newest")
        finally:
            stop.set()
            hog.join(30)
        assert os.listdir(top) == ["newest"]
        (disk / "hog").unlink()
    local.umount()
    assert problems(local.store) == []


def test_many_names_end_before_deleting_does(local: Site, disk: Path) -> None:
    """Names are refused in the end; all of them can be removed again, although nothing else becomes free."""
    top = local.mountpoint
    with filled(disk):
        made = []
        with pytest.raises(OSError) as full:
            for number in range(100_000):
                os.symlink("x" * 1000, top / f"link-{number}")
                made.append(top / f"link-{number}")
        assert full.value.errno == errno.ENOSPC and made
        for link in made:
            link.unlink()
        assert sorted(os.listdir(top)) == ["latest", "saved", "tree"]
        assert (top / "saved").read_bytes() == b"saved" * MIB


def test_a_replicated_store_goes_on(machines: Machines, disk: Path) -> None:
    """What was saved before the disk became full is uploaded while it is, and deletions too."""
    site = machines.site("full", tuning={}, store=disk / "store")
    top = machines.mount(site)
    other = machines.mount(machines.site("other"))
    (top / "old").write_bytes(os.urandom(MIB))
    with filled(disk):
        (top / "latest").write_text("old")
        until(lambda: (other / "latest").exists(), "the pointer to be seen")
        (top / "old").unlink()
        until(lambda: not (other / "old").exists(), "the deletion to be seen")


def test_a_remote_without_room(tmp_path: Path) -> None:
    """Saves go on, status says why nothing arrives, and what is there is read; once there is room all is uploaded."""
    with (
        small_disk(tmp_path, 40) as disk,
        Site(tmp_path, name="here", tuning=TINY) as here,
        Site(tmp_path, name="there", tuning=TINY) as there,
    ):
        for site in (here, there):
            site.mount("--remote", f"file://{disk}/remote", *QUICK)
        (here.mountpoint / "early").write_bytes(os.urandom(MIB))
        assert ckptfs.wait(here.mountpoint, "replicated", 60)
        with filled(disk):
            for step in range(5):
                began = time.monotonic()
                (here.mountpoint / f"step-{step}").write_bytes(os.urandom(MIB))
                assert time.monotonic() - began < 5
            until(lambda: "No space left" in (ckptfs.status(here.mountpoint)["last_error"] or ""), "status to say why")
            assert not ckptfs.status(here.mountpoint)["safe"]
            assert (there.mountpoint / "early").read_bytes() == (here.mountpoint / "early").read_bytes()
            assert os.listdir(there.mountpoint) == ["early"]
        until(lambda: ckptfs.status(here.mountpoint)["safe"], "everything to be replicated, unaided", 60)
        same_soon(here.mountpoint, there.mountpoint)
        assert ckptfs.status(here.mountpoint)["last_error"] is None
        assert os.listdir(disk / "remote" / ".tmp") == []
        for site in (here, there):
            site.umount()
