"""Whether anybody can still write, or read, a file that the kernel let others open, asked by means of a lease.

Under passthrough the kernel's RELEASE says nothing about memory maps: a map holds the image, not the file of the mount.
And a program that survives a killed daemon goes on writing. The image's own inode counts them all: a read lease is
granted only while nobody has it open for writing, map or descriptor (fcntl(2), F_SETLEASE), a write lease only while
nobody has it open at all but by the one descriptor that asks. Seen to be correct on ext4,
xfs, btrfs and tmpfs; overlayfs grants it while the file is mapped, but offers no passthrough either.

The lease is given back at once. Who opens the file in between waits for just that long, and the holder is sent a
signal: not SIGIO, which ends a process that does not expect it, but one that is ignored if nobody asked for it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
from pathlib import Path


def nobody_writes(fd: int) -> bool:
    """Whether no descriptor and no map exists through which the file of *fd* can be written.

    *fd* was opened read-only, or counts as a writer itself. Raises OSError where the file system knows no leases.
    """
    return _granted(fd, fcntl.F_RDLCK)


def nobody_else_uses(fd: int) -> bool:
    """Whether no other descriptor and no map of the file of *fd* exists, in any process.

    Raises OSError where the file system knows no leases.
    """
    return _granted(fd, fcntl.F_WRLCK)


def is_unused(file: str) -> bool:
    """Whether *file* exists, and no program has it open or mapped. Where there are no leases none can have, but us."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return nobody_else_uses(fd)
    except OSError:
        return True
    finally:
        os.close(fd)


def work_in(directory: Path) -> bool:
    """Whether leases are to be had on files in *directory*, and tell who writes them."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        fd = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            seen = not nobody_writes(fd)
            file.close()
            return seen and nobody_writes(fd)
        except OSError:
            return False
        finally:
            os.close(fd)


def _granted(fd: int, kind: int) -> bool:
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
