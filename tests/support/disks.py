"""Small real disks: file systems in files, mounted through loop devices, always unmounted again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_COMMAND_S = 30.0


@contextmanager
def small_disk(directory: Path, size_mib: int, *, journal: bool = False, kind: str = "ext4") -> Iterator[Path]:
    """The mountpoint of an empty ext4 (or xfs) of *size_mib* below *directory*; skips where that cannot be made.

    With a *journal*, as usual, what was freed can be used again only after the next commit of it.

    The loop device goes with the mount (autoclear). What still uses the disk at the end is detached from it.
    """
    if os.geteuid() != 0 or shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"a loop-mounted disk takes root and mkfs.{kind}")
    file, top = directory / f"disk.{kind}", directory / "disk"
    top.mkdir()
    with open(file, "wb") as disk:
        disk.truncate(size_mib << 20)
    try:
        features = ("-F", "-m", "0", "-O", "has_journal" if journal else "^has_journal") if kind == "ext4" else ()
        _run(f"mkfs.{kind}", "-q", *features, str(file))
        done = _run("mount", "-o", "loop", str(file), str(top), check=False)
        if done.returncode:
            pytest.skip(f"a loop device cannot be mounted here: {done.stderr.strip()}")
        try:
            yield top
        finally:
            _unmount(top)
    finally:
        file.unlink()


def free_bytes(top: Path) -> int:
    disk = os.statvfs(top)
    return disk.f_bavail * disk.f_frsize


@contextmanager
def filled(top: Path, leaving: int = 0) -> Iterator[None]:
    """Meanwhile *leaving* bytes are free on the disk of *top*, no more."""
    filler = top / "filler"
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1)
        while (left := free_bytes(top) - leaving) >= 4096:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, min(left, 16 << 20))
    try:
        yield
    finally:
        filler.unlink()


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=check)


@dataclass(frozen=True)
class ReflinkedDisk:
    """An ext4 that lies as a file on an xfs, which can copy it at one instant."""

    top: Path
    _file: Path
    _copies: Path

    @contextmanager
    def cut(self) -> Iterator[Path]:
        """The mountpoint of what a power cut leaves of it now; writable, and gone afterwards."""
        copy, top = self._file.with_name("copy.ext4"), self._copies
        _run("cp", "--reflink=always", str(self._file), str(copy))
        top.mkdir()
        try:
            _run("mount", "-o", "loop", str(copy), str(top))
            try:
                yield top
            finally:
                _run("umount", str(top))
        finally:
            top.rmdir()
            copy.unlink()


@contextmanager
def reflinked_disk(directory: Path, size_mib: int) -> Iterator[ReflinkedDisk]:
    """A disk of *size_mib* below *directory*; skips the test where it cannot be made."""
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("loop-mounted disks take root, mkfs.ext4 and mkfs.xfs (apt-get install xfsprogs)")
    outer, below, top = directory / "below.xfs", directory / "below", directory / "disk"
    for each in (below, top):
        each.mkdir()
    with open(outer, "wb") as disk:
        disk.truncate(2 * size_mib << 20)
    with ExitStack() as undo:
        undo.callback(outer.unlink)
        _run("mkfs.xfs", "-q", "-m", "reflink=1", str(outer))
        _mount(undo, outer, below)
        inner = below / "disk.ext4"
        with open(inner, "wb") as disk:
            disk.truncate(size_mib << 20)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(inner))
        _mount(undo, inner, top)
        yield ReflinkedDisk(top, inner, directory / "copy")


def _mount(undo: ExitStack, file: Path, top: Path) -> None:
    done = _run("mount", "-o", "loop", str(file), str(top), check=False)
    if done.returncode:
        pytest.skip(f"a loop device cannot be mounted here: {done.stderr.strip()}")
    undo.callback(_unmount, top)


def _unmount(top: Path) -> None:
    if _run("umount", str(top), check=False).returncode:
        _run("umount", "--lazy", str(top))
