"""The files in images/: create, open, copy, delete. What they mean is the catalog's to say.

An image holds one file version's bytes at their natural offsets. Its path is `images/xx/<id as 16 hex digits>`.
Functions here are plain and blocking; they touch files, never the catalog.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckptfs.ids import ImageId, new_image_id
from ckptfs.local.allocation import KEEP_SIZE, PUNCH_HOLE, fallocate
from ckptfs.spans import SpanSet

_COPY_BYTES = 64 << 20
_FOLDERS, _IN_A_ROW = 256, 1024
"""Folders, and images that go into one before the next: new images share a folder, which is flushed once for all."""


_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


@dataclass
class Image:
    """An open image. `present` is None when it is whole, else the spans whose bytes are in the file."""

    id: ImageId
    fd: int
    present: SpanSet | None = None
    unrecorded: list[tuple[bytes, int, int]] = field(default_factory=list)
    """(chunk, offset, length) that were written into the file but have no location row yet: not flushed."""
    unstored: bool = False
    """The disk had no room for a file in images/: this is all hole, in memory, and nothing is written into it."""

    @property
    def whole(self) -> bool:
        return self.present is None

    def missing(self, start: int, end: int) -> int:
        """How many bytes of [start, end) are not in the file."""
        return 0 if self.present is None else sum(b - a for a, b in self.present.missing(start, end))

    def exchange(self, fd: int) -> None:
        """Use another descriptor of the same file from now on."""
        os.close(self.fd)
        self.fd = fd

    def close(self) -> None:
        """Close `fd`; whoever works on it in the background has a duplicate."""
        os.close(self.fd)


class Images:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True, mode=0o700)
        self._root = os.fspath(directory)
        self._new_folders = True
        """Whether a folder may not have been flushed; an earlier process may have made some."""
        self._made = random.randrange(_FOLDERS) * _IN_A_ROW

    def path(self, image: ImageId) -> Path:
        return Path(self.file(image))

    def file(self, image: ImageId) -> str:
        """Its path; a string, since a Path costs more than the system call that takes it."""
        name = f"{image:016x}"
        return f"{self._root}/{name[-2:]}/{name}"

    def status(self, image: ImageId) -> os.stat_result:
        """Raises FileNotFoundError, also when something other than a file is in its place."""
        status = os.stat(self.file(image))
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no file is in the place of an image", self.file(image))
        return status

    def has(self, image: ImageId) -> bool:
        """Whether it has a file."""
        return os.path.isfile(self.file(image))

    def create(self) -> Image:
        """A new empty whole image, open for reading and writing."""
        self._made += 1
        folder = self._made // _IN_A_ROW % _FOLDERS
        while True:
            image = ImageId(new_image_id() // _FOLDERS * _FOLDERS + folder)
            try:
                return Image(image, os.open(self.file(image), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileNotFoundError:
                self.path(image).parent.mkdir(exist_ok=True, mode=0o700)
                self._new_folders = True
            except FileExistsError:
                continue

    def unstored(self, size: int) -> Image:
        """An image of *size* that takes nothing of the disk, and no bytes."""
        fd = os.memfd_create("ckptfs-unstored", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return Image(ImageId(new_image_id()), fd, unstored=True)

    def open(self, image: ImageId, *, writing: bool = False) -> int:
        """A descriptor, for reading only unless *writing*: one that may write counts as a writer (`leases`).

        Raises FileNotFoundError.
        """
        return os.open(self.file(image), (os.O_RDWR if writing else os.O_RDONLY) | os.O_CLOEXEC)

    def delete(self, image: ImageId) -> None:
        """Unlink it; no error when it is gone already. Only after its rows are durably gone (invariant 2)."""
        try:
            os.unlink(self.file(image))
        except FileNotFoundError:
            pass

    def sync_directories(self, images: Iterable[ImageId]) -> None:
        """Make the directory entries of new images survive a power cut, each directory once."""
        directories = {os.path.dirname(self.file(image)) for image in images}
        new_folders, self._new_folders = self._new_folders, False
        if new_folders:
            directories.add(self._root)
        try:
            for directory in directories:
                try:
                    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                except FileNotFoundError:  # nothing has a name there, and nobody else is to wait for it
                    continue
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except OSError:
            self._new_folders |= new_folders
            raise

    def ids(self) -> Iterator[ImageId]:
        """Every image file on disk. What else somebody put there is nothing to us."""
        for folder in sorted(self.directory.iterdir()):
            if folder.is_dir():
                for entry in sorted(os.scandir(folder), key=lambda each: each.name):
                    try:
                        if entry.is_file():
                            yield ImageId(int(entry.name, 16))
                    except ValueError:
                        continue


def copy_data(source: int, target: int) -> None:
    """Copy all of one descriptor to another, holes and times too. Shares extents where the disk can (FICLONE)."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    try:
        fcntl.ioctl(target, 0x40049409, source)  # FICLONE
    except OSError:
        for start, end in data_spans(source, size):
            _copy_range(source, target, start, end)
    status = os.fstat(source)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def punch(file: str, spans: Iterable[tuple[int, int]]) -> None:
    """Give the disk back what lies in *spans* of *file*, in whole blocks; zeros are read there. Raises OSError."""
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        for start, end in spans:
            fallocate(fd, PUNCH_HOLE | KEEP_SIZE, start, end - start)
    finally:
        os.close(fd)


def begin_writing_out(files: Iterable[str]) -> None:
    """Let the disk begin to write all of *files*, as far as they can be opened; waits for nothing.

    When many are flushed one by one afterwards, the first flush commits the journal for all.
    """
    for file in files:
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # gone; or whoever flushes it is told
            continue
        try:
            begin_writing_out_of(fd)
        finally:
            os.close(fd)


def begin_writing_out_of(fd: int) -> None:
    """The same for one open file."""
    _libc.sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def data_spans(fd: int, size: int) -> list[tuple[int, int]]:
    """Spans of [0, size) that the disk has allocated (SEEK_DATA/SEEK_HOLE); everything, where it cannot tell."""
    spans: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                break
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return [(0, size)]
            raise
        if start >= size:
            break
        at = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        spans.append((start, at))
    return spans


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        copied = os.copy_file_range(source, target, min(end - start, _COPY_BYTES), start, start)
        if copied == 0:
            raise OSError(errno.EIO, "image became shorter while it was copied")
        start += copied
