"""The store's disk fails: a program that saves is told, what was there before stays, and all heals when the fault ends.

The faults are made by a disk under the store (`tests.support.testdisk`), so that the daemon, SQLite and, with
passthrough, the kernel meet them where they do system calls.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.consistency import problems
from tests.support.damage import image_of
from tests.support.mounts import TINY, Site, until
from tests.support.publishing import restore
from tests.support.testdisk import Fault, TestDisk

IMAGE, LOG, DATABASE = "[0-9a-f]{16}", r"catalog\.db-wal", r"catalog\.db"
FOLDER = "[0-9a-f]{2}"
PLACES = [
    ("create", IMAGE),
    ("write", IMAGE),
    ("fsync", IMAGE),
    ("unlink", IMAGE),
    ("fsyncdir", FOLDER),
    ("write", LOG),
    ("fsync", LOG),
    ("change", f"{DATABASE}|{LOG}|{IMAGE}"),
    ("fsync", ".*"),
]
TUNING = {**TINY, "sync_every_s": 0.1}
OLD = b"old" * 20_000
LEAST = {"change": 20, "fsync": 4}
"""Requests that a save makes of the disk at the least."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[TestDisk]:
    with TestDisk(tmp_path) as made:
        yield made


@pytest.fixture
def site(tmp_path: Path, disk: TestDisk) -> Iterator[Site]:
    with Site(tmp_path) as made:
        made.store = disk.store(TUNING)
        yield made


class Program:
    """Saves as a careful program does, and remembers what it was told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known = OLD
        """What `model` must be."""
        self.told: list[OSError] = []

    def save(self, data: bytes) -> None:
        """Write beside, fsync, close, rename over; gives up at the first error, as programs do."""
        self.told = []
        temporary = self.root / "model.tmp"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                written = 0
                while written < len(data):  # a write that fails halfway is short
                    written += os.write(fd, data[written : written + 50_000])
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, self.root / "model")
            self.known = data
        except OSError as error:
            self.told.append(error)

    def check(self) -> None:
        assert (self.root / "model").read_bytes() == self.known


def begin(site: Site, *options: str) -> Program:
    site.mount(*options)
    (site.mountpoint / "model").write_bytes(OLD)
    until(lambda: os.getxattr(site.mountpoint / "model", "user.ckptfs.state") == b"sealed", "the old version")
    return Program(site.mountpoint)


def heals(site: Site, program: Program, disk: TestDisk, what: str) -> None:
    """The fault is over: saves work again, nothing is lost, and everything is sealed in the end."""
    disk.heal()
    deadline = time.monotonic() + 15
    for attempt in itertools.count():
        program.save(b"%d %s" % (attempt, what.encode()) * 2000)
        if not program.told:
            break
        assert time.monotonic() < deadline, f"{what}: {program.told}"
        time.sleep(0.1)
    program.check()


def fails_and_heals(site: Site, disk: TestDisk, program: Program, fault: Fault) -> int:
    """Save while *fault* is there; how many requests failed."""
    disk.fail(fault)
    program.save(os.urandom(120_000))
    time.sleep(0.15)  # sealing, unasked flushes
    failed = disk.failed()
    with suppress(OSError):  # a name that cannot be looked up is told, and never a wrong answer
        assert (site.mountpoint / "model").read_bytes() == program.known
    assert site.daemon() is not None, site.log()
    heals(site, program, disk, str(fault))
    return failed


def ends_well(site: Site, program: Program) -> None:
    """Unmounted and mounted again everything is as it was promised, and the store is consistent."""
    with suppress(FileNotFoundError):
        (site.mountpoint / "model.tmp").unlink()
    until(lambda: site.status()["state"] in ("sealed", "replicated", "verified"), "everything to be sealed", 20)
    site.umount()
    assert problems(site.store) == []
    site.mount()
    program.check()
    site.umount()


@pytest.mark.timeout(120)
def test_case_016_a_failing_disk_is_told_and_survived(site: Site, disk: TestDisk) -> None:
    """EIO, ENOSPC and EROFS wherever a save touches the disk: told, or done; and over when the fault is."""
    program = begin(site)
    for (operation, names), error in itertools.product(PLACES, (errno.EIO, errno.ENOSPC, errno.EROFS)):
        if operation.startswith("fsync") and error != errno.EIO:
            continue
        failed = fails_and_heals(site, disk, program, Fault(operation, names, error))
        assert failed, f"no {operation} of {names} was made to fail"
    ends_well(site, program)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["umount", "kill"])
def test_a_failed_flush_is_never_forgotten(site: Site, disk: TestDisk, end: str) -> None:
    """Every later fsync and close fails, also when the disk works again; so does opening, also after a restart.

    It is never sealed. What the file had been before it was written anew comes back with the next mount.
    """
    program = begin(site)
    names = ("model", "fresh")
    disk.fail(Fault("fsync", IMAGE, errno.EIO))
    fds = [os.open(site.mountpoint / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for name in names]
    for fd in fds:
        os.write(fd, b"new" * 10_000)
        with pytest.raises(OSError):
            os.fsync(fd)
    disk.heal()
    for fd in fds:
        with pytest.raises(OSError):
            os.fsync(fd)
        with pytest.raises(OSError):
            os.close(fd)
    for name in names:
        with pytest.raises(OSError) as told:
            (site.mountpoint / name).read_bytes()
        assert told.value.errno == errno.EIO
    time.sleep(0.5)
    assert site.status()["state"] == "closed"
    if end == "umount":
        site.umount()
    else:
        site.kill()
    site.mount()
    program.check()
    with pytest.raises(OSError):
        (site.mountpoint / "fresh").read_bytes()
    (site.mountpoint / "fresh").write_bytes(b"again")
    assert (site.mountpoint / "fresh").read_bytes() == b"again"
    until(lambda: site.status()["state"] == "sealed", "everything to be sealed")
    site.umount()
    assert [each for each in problems(site.store) if "is in lost+found" not in each] == []


def cold(site: Site, name: str) -> str:
    """Nothing of the file is left in memory; the name of its image."""
    image = image_of(site.store, name)
    for path in (site.mountpoint / name, image):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return image.name


@pytest.mark.parametrize("passthrough", ["on", "off"])
def test_a_quota_is_a_full_disk(site: Site, disk: TestDisk, passthrough: str) -> None:
    """A save that it does not allow is told as that or as a full disk, and never done; what was there stays.

    The catalog's log has its blocks before it needs them.
    """
    program = begin(site, "--passthrough", passthrough)
    for after in range(3):
        disk.fail(*(Fault(operation, IMAGE, errno.EDQUOT, after=after) for operation in ("create", "write")))
        for _ in range(2):
            program.save(os.urandom(400_000))
            assert [each.errno in (errno.EDQUOT, errno.ENOSPC) for each in program.told] == [True], program.told
            program.check()
        assert disk.failed() and site.daemon() is not None
        heals(site, program, disk, "more is allowed")
    ends_well(site, program)


@pytest.mark.parametrize("operation", ["read", "open"])
def test_case_016_a_file_that_cannot_be_read(site: Site, disk: TestDisk, operation: str) -> None:
    """Its reader gets EIO, those of others their bytes; when the disk works again, so does it."""
    program = begin(site, "--passthrough", "off")
    other = os.urandom(60_000)
    (site.mountpoint / "other").write_bytes(other)
    cold(site, "other")
    disk.fail(Fault(operation, cold(site, "model"), errno.EIO))
    with pytest.raises(OSError) as told:
        (site.mountpoint / "model").read_bytes()
    assert told.value.errno == errno.EIO
    assert disk.failed() and (site.mountpoint / "other").read_bytes() == other
    disk.heal()
    program.check()
    ends_well(site, program)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("moment", ["sealing", "uploading"])
def test_case_016_a_file_that_cannot_be_sealed_or_sent(
    site: Site, disk: TestDisk, tmp_path: Path, moment: str
) -> None:
    """It is told, others are published meanwhile, it is not; and it is, unasked, when the disk works again."""
    remote = tmp_path / "remote"
    program = begin(site, "--remote", f"file://{remote}", "--settle", "2s" if moment == "uploading" else "100ms")
    path, data = site.mountpoint / "unread", os.urandom(60_000)
    with open(path, "wb") as file:
        fault = Fault("open", image_of(site.store, path.name).name, errno.EIO)
        if moment == "sealing":
            disk.fail(fault)
        file.write(data)
    if moment == "uploading":
        until(lambda: os.getxattr(path, "user.ckptfs.state") == b"sealed", "the seal")
        disk.fail(fault)
    told = {"sealing": "could not be sealed", "uploading": "cannot be read at"}[moment]
    until(lambda: told in site.log(), "it to be told")
    program.save(os.urandom(60_000))
    assert not program.told
    done = site.run("wait", str(site.mountpoint / "model"), "--timeout", "20s")
    assert done.status == 0, done.said
    assert restore(remote, tmp_path / "meanwhile") == {"model": program.known}
    status = site.status()
    assert not status["safe"] and status["state"] == "closed" and status["pending"]["files"] == 1
    disk.heal()
    until(lambda: site.status()["safe"], "it to be published")
    assert restore(remote, tmp_path / "restored") == {"model": program.known, "unread": data}
    ends_well(site, program)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("passthrough", ["on", "off"])
@pytest.mark.parametrize("operation", ["change", "fsync"])
def test_case_016_each_single_failure(site: Site, disk: TestDisk, operation: str, passthrough: str) -> None:
    """Every single request of a save, of its sealing and of the flushes behind it fails once, one after the other."""
    program = begin(site, "--passthrough", passthrough)
    names = f"{DATABASE}|{LOG}|{IMAGE}|{FOLDER}"
    for number in itertools.count():
        if not fails_and_heals(site, disk, program, Fault(operation, names, errno.EIO, after=number, times=1)):
            break  # nobody asked so often
    assert number >= LEAST[operation]
    ends_well(site, program)
