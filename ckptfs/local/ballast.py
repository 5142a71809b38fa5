"""Room that is kept in reserve for a full disk: a file that holds nothing, and is made smaller when its room is needed.

Deleting takes room too: the catalog's log grows before anything shrinks. What the log and the database file are about
to take is allocated in them (`allocate`), so that nobody else who writes to the disk takes what was just given up.

Who calls: the thread that owns the store; nothing here waits for the disk.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ckptfs.local.allocation import KEEP_SIZE, fallocate

BALLAST_BYTES = 32 << 20
"""As much as the catalog's log takes at most ..."""
BALLAST_PARTS = 32
"""... or one part in so many of a smaller disk."""

ASLEEP_BYTES, PLENTY = 1 << 20, 64
"""What a store that nobody has mounted keeps, to be mounted, where the disk has so many times a full ballast free."""

NAMES_LEAVE, LOG_LEAVES = 1 / 4, 1 / 8
"""The share of a full ballast that new names leave to deleting, and that the catalog's log leaves to the database."""

_STEP_BYTES = 64 << 10


class Ballast:
    """The file at *path*, on the disk that it is for."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        disk = os.fstatvfs(self._fd)
        self.full_bytes = _rounded(min(BALLAST_BYTES, disk.f_blocks * disk.f_frsize // BALLAST_PARTS))

    @property
    def is_full(self) -> bool:
        """False: the disk is full, or was a moment ago."""
        return self.bytes >= self.full_bytes

    @property
    def bytes(self) -> int:
        """What it holds now."""
        return os.fstat(self._fd).st_size

    def free_bytes(self) -> int:
        """What is free on the disk."""
        disk = os.fstatvfs(self._fd)
        return disk.f_bavail * disk.f_frsize

    def give(self, wanted_bytes: int, *, keeping: float = 0.0) -> bool:
        """Give up what it takes that *wanted_bytes* are free, but a share of it, *keeping*; whether they are free."""
        lacking = wanted_bytes - self.free_bytes()
        held, kept = self.bytes, int(self.full_bytes * keeping)
        if lacking > 0 and held > kept:
            os.ftruncate(self._fd, max(kept, held - _rounded(lacking + _STEP_BYTES)))
            lacking = wanted_bytes - self.free_bytes()
        return lacking <= 0

    def take(self) -> None:
        """Grow again, to the full size if that takes no more than half of what is free."""
        self._take(self.free_bytes() // 2)

    def sleep(self) -> None:
        """The store is being closed."""
        if self.free_bytes() > PLENTY * self.full_bytes:
            os.ftruncate(self._fd, min(self.bytes, ASLEEP_BYTES))
        else:  # what the catalog's log had is free now, and is ours
            self._take(self.free_bytes())

    def allocate(self, fd: int, start: int, length: int, *, keeping: float = 0.0) -> bool:
        """Allocate blocks of another file, also beyond its end, as `give` gives them up where the disk is full.

        Whether they are there; never where the file system does not offer that.
        """
        for _ in range(2):
            try:
                fallocate(fd, KEEP_SIZE, start, length)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    return False
            else:
                return True
            self.give(self.free_bytes() + length, keeping=keeping)
        return False

    def close(self) -> None:
        os.close(self._fd)

    def _take(self, most_bytes: int) -> None:
        held = self.bytes
        end = min(self.full_bytes, held + _rounded(most_bytes))
        if end - held < _STEP_BYTES:
            return
        try:
            os.posix_fallocate(self._fd, held, end - held)
        except OSError:  # somebody else was faster, or a quota ends before the disk
            os.ftruncate(self._fd, held)


def _rounded(length: int) -> int:
    return length // _STEP_BYTES * _STEP_BYTES
