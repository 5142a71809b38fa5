"""Passthrough: the kernel reads, writes and maps images itself, from open to close. The kernel's rules are kept here.

Linux 6.9 and later can be handed a backing file when a file is opened; from then on no read, write or fault of that
file reaches us. What it demands, each seen here or in its source (fs/fuse/passthrough.c, iomode.c, backing.c):

- CAP_SYS_ADMIN in the initial user namespace, and a backing file that does not itself lie on a stacked file system:
  overlayfs is refused with ELOOP.
- One backing file per inode for all its opens, until the last close. A cached open after a passthrough one, or the
  other way round, fails with EIO. So the first open decides (`ckptfs.openfiles`).
- The writeback cache must be off, and HANDLE_KILLPRIV_V2 on, or every write() asks for security.capability, at 100 µs.
  With it, clearing S_ISUID and S_ISGID on writes, truncations and chown is ours.
- What is written is not told, maps do not end with the last close (`ckptfs.held`), and sizes and times of a file being
  written are only right when asked for anew: its attributes must not be cached.
- fsync comes to us; msync, syncfs and O_SYNC go to the image directly.

The file handle carries the id of the backing file in its upper half, where `_passthrough.c` finds it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Protocol

from ckptfs.errors import MountError
from ckptfs.local import leases
from ckptfs.local.mountinfo import mount_of

from .mountpoint import has_sys_admin
from .native import library, missing

log = logging.getLogger(__name__)

KERNEL = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
"""Major and minor version of the running kernel."""

_KERNEL_NEEDED = (6, 9)
_HANDLE_BITS = 32
_REFUSALS = {
    errno.EPERM: "the kernel asks for CAP_SYS_ADMIN in the initial user namespace",
    errno.ELOOP: "the store lies on a stacked file system",
}


class Passthrough:
    """What was decided about passthrough for one mount, and the kernel's side of `ckptfs.handles.Backing`.

    *mode* is 'auto', 'on' or 'off'. `prepare` comes before mounting, `check` once the kernel has greeted us.
    """

    def __init__(self, mode: str, images: Path) -> None:
        self._mode = mode
        self._images = images
        self._off: str | None = "not asked for" if mode == "off" else None
        self._ended = False

    def prepare(self) -> None:
        """Find out whether it can work, and tell the kernel at the mount. Raises MountError when it must and cannot."""
        if library is None:
            self._turn_off(f"the C module was not built ({missing})")
            return
        if self._off is None:
            reason = _obstacle(self._images)
            if reason is not None:
                self._turn_off(reason)
        wanted = library.KILLPRIV_V2 | library.DIRECT_IO_MMAP
        library.want(wanted if self._off else wanted | library.PASSTHROUGH)

    def check(self) -> None:
        """Try it on a file. Raises MountError when it must work and does not."""
        if self._off is None and not library.agreed() & library.PASSTHROUGH:
            self._turn_off("the kernel does not offer it")
        if self._off is None:
            with tempfile.TemporaryFile(dir=self._images) as file:
                backing = self.open(file.fileno())
                if backing is not None:
                    self.close(backing)
        log.info("passthrough: %s", self._off or "on")

    @property
    def on(self) -> bool:
        return self._off is None

    def describe(self) -> dict[str, str | None]:
        """For status: 'on' or 'off', and why."""
        return {"state": "on" if self.on else "off", "reason": self._off}

    def open(self, fd: int) -> int | None:
        """Hand the kernel the file of *fd*; None when it does not take it. See `ckptfs.handles.Backing`."""
        if self._off is not None or not library.agreed() & library.PASSTHROUGH:
            return None
        try:
            return int(library.open_backing(fd))
        except OSError as error:
            if error.errno in _REFUSALS:  # it will refuse them all
                self._turn_off(_REFUSALS[error.errno])
            else:
                log.warning("the kernel did not take a file for passthrough: %s", error)
            return None

    def close(self, backing: int) -> None:
        if not self._ended:
            library.close_backing(backing)

    def end(self) -> None:
        """The mount is gone, and what the kernel had of it."""
        self._ended = True

    def _turn_off(self, reason: str) -> None:
        self._off = reason
        if self._mode == "on":
            raise MountError(f"--passthrough=on: {reason}")


class Answers(Protocol):
    """Whom the C module asks about files that we serve, so that pyfuse3, which takes long for it, need not.

    What they leave to it, and what they raise, makes the request one like any other.
    """

    def seek(self, fh: int, offset: int, whence: int) -> int:
        """Where the next data, or hole, is; or -errno. (pyfuse3 does not know this request.)"""

    def is_plain(self, inode: int) -> bool:
        """Whether it has no capabilities, which the kernel wants to know of each file that it first sees written."""

    def is_sound(self, fh: int) -> bool:
        """Whether a handle can be closed without an error."""

    def to_read(self, fh: int, offset: int, size: int) -> int:
        """The descriptor of the image that has these bytes, which are read from there now; or -1."""

    def to_write(self, fh: int) -> int:
        """The descriptor of the image that is written now, at the same offset as the file; or -1."""

    def wrote(self, fh: int, offset: int, seconds: float) -> bool:
        """The bytes at *offset* were written into it, which took so long; whether that is all."""


def answer_with(answers: Answers) -> None:
    """Have requests answered without pyfuse3. Without the C module it gets them all, and files have no holes."""
    if library is not None:
        library.answer_with(answers)


def direct_maps() -> bool:
    """Whether files that are open without the page cache (direct_io) can be mapped."""
    return library is not None and bool(library.agreed() & library.DIRECT_IO_MMAP)


def kernel_handle(fh: int, backing: int | None) -> int:
    """The file handle as the kernel gets it: *fh*, with the backing file's id above it."""
    return fh if backing is None else backing << _HANDLE_BITS | fh


def directory_handle(fh: int, *, keep: bool) -> int:
    """An open directory's handle as the kernel gets it. With *keep* it lists the names it kept, if it kept them all.

    Without the C module the kernel keeps none.
    """
    return keep << _HANDLE_BITS | fh


def own_handle(fh: int) -> int:
    """The reverse of `kernel_handle` and `directory_handle`."""
    return fh & (1 << _HANDLE_BITS) - 1


def _obstacle(images: Path) -> str | None:
    """Why it cannot work, as far as can be told before mounting."""
    if KERNEL < _KERNEL_NEEDED:
        return f"Linux {os.uname().release} is older than {'.'.join(map(str, _KERNEL_NEEDED))}"
    if not has_sys_admin():
        return _REFUSALS[errno.EPERM]
    mount = mount_of(os.path.realpath(images))
    if mount is not None and mount.type == "overlay":
        return "the store lies on overlayfs"
    if not leases.work_in(images):
        return "the store's file system knows no leases, which tell whether a file is still being written"
    return None
