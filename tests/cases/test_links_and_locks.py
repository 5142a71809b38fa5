"""Group E: locks, links, modes, names and free space."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptfs
from tests.support.disks import free_bytes, small_disk
from tests.support.machines import Machines
from tests.support.mounts import Site

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
_F_OFD_SETLK = 37

HOLD = """
import fcntl, os, struct, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
if sys.argv[2] == "flock":
    fcntl.flock(fd, fcntl.LOCK_EX)
else:
    kind = fcntl.F_SETLK if sys.argv[2] == "POSIX" else 37
    fcntl.fcntl(fd, kind, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
print("held", flush=True)
time.sleep(600)
"""

FILE_LOCK = """
import filelock, sys
try:
    with filelock.FileLock(sys.argv[1], timeout=0):
        print("got it")
except filelock.Timeout:
    print("excluded")
"""

H5PY = """
import h5py, sys
try:
    h5py.File(sys.argv[1], "r+").close()
    print("got it")
except OSError:
    print("excluded")
"""


def _flock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _posix(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))


def _ofd(fd: int) -> None:
    fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))


LOCKS: list[tuple[str, Callable[[int], None]]] = [("flock", _flock), ("POSIX", _posix), ("OFD", _ofd)]


@pytest.mark.parametrize(("kind", "take"), LOCKS, ids=[kind for kind, _ in LOCKS])
def test_case_035_locks_exclude(top: Path, kind: str, take: Callable[[int], None]) -> None:
    """Who comes second is told EAGAIN, and has the lock as soon as the first one was killed."""
    path = top / "file"
    path.touch()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path), kind], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with open(path, "r+b") as file:
                with pytest.raises(OSError) as refusal:
                    take(file.fileno())
                assert refusal.value.errno in (errno.EAGAIN, errno.EACCES)
                holder.send_signal(signal.SIGKILL)
                holder.wait(30)
                take(file.fileno())
        finally:
            holder.kill()


def test_case_035_libraries_that_lock(top: Path) -> None:
    """filelock and h5py, in their usual settings, exclude another process, and only while they hold the file."""
    filelock, h5py = pytest.importorskip("filelock"), pytest.importorskip("h5py")

    def other(code: str, path: Path) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    with filelock.FileLock(top / "lock", timeout=0):
        assert other(FILE_LOCK, top / "lock") == "excluded\n"
    assert other(FILE_LOCK, top / "lock") == "got it\n"
    with h5py.File(top / "data.h5", "w") as file:
        file["x"] = range(100)
        file.flush()
        assert other(H5PY, top / "data.h5") == "excluded\n"
    assert other(H5PY, top / "data.h5") == "got it\n"


def test_case_036_hard_links(machines: Machines) -> None:
    """As timm keeps `last`: one inode, replaced without touching the other name, uploaded once, kept over a remount."""
    way = machines.proxy()
    site = machines.site("here", by=way, tuning=None)
    here = machines.mount(site)
    one, two = os.urandom(4 * MIB), os.urandom(MIB)
    (here / "last").write_bytes(one)
    os.link(here / "last", here / "checkpoint-1")
    for name in ("last", "checkpoint-1"):
        assert (here / name).stat().st_nlink == 2
    assert (here / "last").stat().st_ino == (here / "checkpoint-1").stat().st_ino
    os.link(here / "last", here / "best")
    (here / "best").unlink()
    assert ckptfs.wait(here, "replicated", 60)
    assert way.counts["PUT"].bytes_up < 1.2 * len(one)
    (here / "new").write_bytes(two)
    os.replace(here / "new", here / "last")
    assert ckptfs.wait(here, "replicated", 60)
    there = machines.mount(machines.site("there", tuning=None))
    site.umount()
    machines.mount(site)
    for top in (here, there):
        assert (top / "last").read_bytes() == two and (top / "checkpoint-1").read_bytes() == one
        assert [(top / name).stat().st_nlink for name in ("last", "checkpoint-1")] == [1, 1]


def test_case_037_symbolic_links(machines: Machines) -> None:
    """Relative, absolute and dangling ones; `latest` is replaced atomically; the same after a remount and elsewhere."""
    site = machines.site("here")
    here = machines.mount(site)
    targets = {"relative": "run-1/file", "absolute": "/etc/hostname", "dangling": "no/where", "odd": "ü\n x"}
    (here / "run-1").mkdir()
    (here / "run-1" / "file").write_bytes(b"content")
    for name, target in targets.items():
        (here / name).symlink_to(target)
    missing, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            try:
                os.readlink(here / "latest")
            except OSError as error:
                missing.append(error)

    (here / "latest").symlink_to("run-0")
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for step in range(1, 101):
            (here / "next").symlink_to(f"run-{step}")
            os.replace(here / "next", here / "latest")
    finally:
        stop.set()
        watcher.join(60)
    assert missing == []
    targets["latest"] = "run-100"
    assert ckptfs.wait(here, "replicated", 60)
    there = machines.mount(machines.site("there"))
    site.umount()
    machines.mount(site)
    for top in (here, there):
        assert {name: os.readlink(top / name) for name in targets} == targets
        assert (top / "relative").read_bytes() == b"content"
        assert not (top / "dangling").exists() and (top / "dangling").is_symlink()
        assert sorted(os.listdir(top)) == sorted([*targets, "run-1"])


def test_case_038_modes_times_and_attributes(tmp_path: Path) -> None:
    """What copy2, chmod, utime, chown to oneself, setxattr, umask and mkstemp set is there, and after a remount."""
    source = tmp_path / "source"
    source.write_bytes(b"x" * 1000)
    source.chmod(0o640)
    os.setxattr(source, "user.origin", b"value")
    os.utime(source, ns=(1_234_567_890_123_456_789, 1_234_567_891_987_654_321))
    with Site(tmp_path) as site:
        site.mount()
        top = site.mountpoint
        shutil.copy2(source, top / "copy")
        os.chown(top / "copy", os.getuid(), os.getgid())
        mask = os.umask(0o027)
        try:
            (top / "masked").touch()
            (top / "masked directory").mkdir()
        finally:
            os.umask(mask)
        fd, temporary = tempfile.mkstemp(dir=top)
        os.write(fd, b"secret")
        os.close(fd)
        os.rename(temporary, top / "renamed")

        def look() -> dict[str, tuple[int, int]]:
            return {path.name: (stat.S_IMODE(path.stat().st_mode), path.stat().st_mtime_ns) for path in top.iterdir()}

        seen = look()
        modes = {name: mode for name, (mode, _) in seen.items()}
        assert modes == {"copy": 0o640, "masked": 0o640, "masked directory": 0o750, "renamed": 0o600}
        for _ in range(2):
            assert look() == seen
            assert seen["copy"][1] == source.stat().st_mtime_ns
            assert os.getxattr(top / "copy", "user.origin") == b"value"
            assert os.access(top / "copy", os.W_OK) and os.access(top / "renamed", os.R_OK)
            site.umount()
            site.mount()


def test_case_039_free_space(tmp_path: Path) -> None:
    """`df` shows room that is there: some, no more than the disk has, less as it fills, and none at ENOSPC."""
    with small_disk(tmp_path, 200) as disk, Site(disk) as site:
        site.mountpoint = tmp_path / "mnt"
        site.mount()
        top = site.mountpoint
        before = shutil.disk_usage(top).free
        assert 0 < before <= free_bytes(disk)
        assert os.statvfs(top).f_namemax == 255
        (top / "half").write_bytes(os.urandom(before // 2))
        assert shutil.disk_usage(top).free <= before // 2 + MIB
        written = before // 2
        with open(top / "rest", "wb", buffering=0) as file, pytest.raises(OSError) as refusal:
            while True:
                written += file.write(bytes(MIB))
        assert refusal.value.errno == errno.ENOSPC
        assert before - 4 * MIB <= written <= before + 4 * MIB
        assert shutil.disk_usage(top).free < 4 * MIB
        (top / "rest").unlink()
        (top / "half").unlink()
        assert site.run("status", str(top)).status == 0
