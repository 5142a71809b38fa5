"""What was there before an unmount is there after the next mount, to the nanosecond."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.posix import test_differential_attributes, test_differential_files, test_differential_names
from tests.posix.sides import Side, snapshot
from tests.support.mounts import TINY, Site, is_alive, until

OPTIONS = ("--owner", "stored", "--allow-other")
SLOW = {
    "a_huge_directory_and_positions_in_it",
    "deletion_while_listing",
    "open_with_every_combination_of_flags",
    "rename_of_everything_onto_everything",
    "what_stays_is_listed_once_whatever_happens_meanwhile",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    mask = os.umask(0o022)
    with Site(tmp_path, tuning=TINY) as made:
        made.mount(*OPTIONS)
        yield made
        made.umount()
        assert "Traceback" not in made.log(), made.log()
    os.umask(mask)


def test_everything_is_the_same_after_a_remount(site: Site) -> None:
    """All that the differential cases leave behind keeps its bytes, modes, links, times and attributes; twice."""
    modules = (test_differential_files, test_differential_names, test_differential_attributes)
    for case in (case for module in modules for case in module.CASES if case.__name__ not in SLOW):
        root = site.mountpoint / f"{case.__name__} {case.__module__}"
        root.mkdir()
        root.chmod(0o777)
        side = Side(root, mount=True)
        try:
            case(side)
        finally:
            side.close_all()
    before = snapshot(site.mountpoint, times=True)
    assert len(before) > 300
    for _ in range(2):
        site.umount()
        site.mount(*OPTIONS)
        assert snapshot(site.mountpoint, times=True) == before


def test_a_remount_right_after_the_last_write(site: Site) -> None:
    """Unmounting does not wait for sealing; the next mount seals, and nothing of it shows."""
    for number in range(50):
        (site.mountpoint / f"{number}").write_bytes(os.urandom(1000 * number))
        os.utime(site.mountpoint / f"{number}", ns=(1, number))
    before = snapshot(site.mountpoint, times=True)
    site.umount()
    site.mount(*OPTIONS)
    assert snapshot(site.mountpoint, times=True) == before
    until(lambda: site.status()["state"] == "sealed", "everything to be sealed")
    assert snapshot(site.mountpoint, times=True) == before


def test_what_a_writer_left_open_at_sigterm_is_kept(site: Site) -> None:
    """SIGTERM while a file is open for writing: what was written is there after the next mount."""
    site.umount()
    site.mount(*OPTIONS, "--stop-timeout", "0.1")
    fd = os.open(site.mountpoint / "open", os.O_CREAT | os.O_WRONLY)
    try:
        os.write(fd, b"written" * 1000)
        pid = site.pid()
        os.kill(pid, signal.SIGTERM)
        until(lambda: not is_alive(pid), "the daemon to end")
    finally:
        try:
            os.close(fd)
        except OSError:
            pass  # the mount is gone
    site.mount(*OPTIONS)
    assert (site.mountpoint / "open").read_bytes() == b"written" * 1000


def test_an_unlinked_open_file_is_gone_after_a_remount(site: Site) -> None:
    """Space of files that had no name any more is given back, whatever way the mount ended."""
    fd = os.open(site.mountpoint / "nameless", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"x" * 1_000_000)
    os.unlink(site.mountpoint / "nameless")
    site.kill()
    for last in (lambda: os.write(fd, b"y"), lambda: os.close(fd)):
        try:
            last()
        except OSError:
            pass  # the mount is gone; under passthrough the image is not, for who has it open
    site.mount(*OPTIONS)
    until(lambda: not list((site.store / "images").glob("*/*")), "the image to be deleted")
    assert not list((site.store / "lost+found").iterdir())


def test_a_read_only_mount_changes_nothing(site: Site) -> None:
    """Every change is EROFS on a read-only mount; reading works."""
    (site.mountpoint / "file").write_bytes(b"content")
    (site.mountpoint / "directory").mkdir()
    before = snapshot(site.mountpoint, times=True)
    site.umount()
    site.mount(*OPTIONS, "--read-only")
    file, directory = site.mountpoint / "file", site.mountpoint / "directory"
    changes = [
        lambda: file.write_bytes(b"x"), lambda: (site.mountpoint / "new").touch(), lambda: file.unlink(),
        lambda: directory.rmdir(), lambda: os.mkdir(site.mountpoint / "d2"), lambda: file.rename(directory / "f"),
        lambda: os.link(file, site.mountpoint / "l"), lambda: os.symlink("x", site.mountpoint / "s"),
        lambda: file.chmod(0o600), lambda: os.utime(file), lambda: os.setxattr(file, "user.a", b"b"),
        lambda: os.truncate(file, 1), lambda: os.mkfifo(site.mountpoint / "fifo"), lambda: os.chown(file, 1, 1),
        lambda: os.open(file, os.O_RDWR),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(OSError, match="Read-only"):
            change()
    assert snapshot(site.mountpoint, times=True) == before
    site.umount()
    site.mount(*OPTIONS)


def test_the_disk_is_full(tmp_path: Path) -> None:
    """Writes and creations say ENOSPC, what was there stays, and after a deletion everything works again."""
    if os.geteuid() != 0:
        pytest.skip("needs a disk of its own")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True, timeout=10)
    try:
        with Site(disk, tuning=TINY) as site:
            site.mount(*OPTIONS)
            kept, large = site.mountpoint / "kept", site.mountpoint / "large"
            kept.write_bytes(b"kept" * 1000)
            (site.mountpoint / "directory").mkdir()
            with pytest.raises(OSError, match="No space left"), open(large, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            names = []
            with pytest.raises(OSError, match="No space left"):
                for number in range(100_000):
                    os.symlink("x" * 1000, site.mountpoint / f"{number}")
                    names.append(site.mountpoint / f"{number}")
            assert kept.read_bytes() == b"kept" * 1000
            assert large.stat().st_size > 1 << 20
            assert {path.name for path in site.mountpoint.iterdir()} == {
                "kept", "large", "directory", *(path.name for path in names)
            }  # fmt: skip
            large.unlink()
            for name in names:
                name.unlink()
            until(lambda: os.statvfs(site.mountpoint).f_bavail > 2000, "the space to come back")
            (site.mountpoint / "small").write_bytes(b"small" * 1000)
            site.umount()
            site.mount(*OPTIONS)
            assert (site.mountpoint / "small").read_bytes() == b"small" * 1000
            assert kept.read_bytes() == b"kept" * 1000
            site.umount()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False, timeout=10)
