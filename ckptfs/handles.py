"""What is known of an open file and of each handle on it, and whom open files and the file system talk to."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Protocol

import trio

from ckptfs.encoding.manifest import Content
from ckptfs.ids import Inode
from ckptfs.local.images import Image
from ckptfs.reading import Reading


class ChangeListener(Protocol):
    """Who wants to know of every change made here; called on the loop after the commit (settling does).

    *renamed*: the name went, and what it named has another one in the same directory.
    """

    def entry_changed(self, parent: Inode, name: bytes, *, renamed: bool = False) -> None: ...
    def writing(self, ino: Inode, new: bool) -> None: ...
    def grew(self, ino: Inode) -> None: ...
    def closed(self, ino: Inode) -> None: ...
    def attributes_changed(self, ino: Inode) -> None: ...


class ByteSource(Protocol):
    """Where bytes that are not in an image come from (the hydrator)."""

    async def content(self, manifest_row: int) -> Content: ...
    def begin(self, image: Image, content: Content, start: int, end: int) -> None: ...
    async def ensure(self, image: Image, content: Content, start: int, end: int) -> None: ...
    async def read(self, image: Image, content: Content, start: int, end: int) -> bytes: ...
    def read_ahead(self, image: Image, content: Content, position: int, reading: Reading) -> None: ...
    async def room_for(self, image: Image, content: Content, start: int, end: int) -> None: ...
    async def record(self, image: Image) -> None: ...


class Backing(Protocol):
    """The kernel, where it can read and write an image by itself while a file is open (passthrough)."""

    def open(self, fd: int) -> int | None:
        """An id for the image of *fd*, which stays open until the id is closed; None: serve it yourself."""

    def close(self, backing: int) -> None: ...


class TreeSource(Protocol):
    """Where directories that were not looked at yet come from, and news of other writers."""

    async def expand(self, directory: Inode) -> None: ...
    async def fresh(self, *, waiting: bool) -> None: ...
    def unknown(self) -> str | None: ...


class Space(Protocol):
    """Who makes room on the disk (the evictor)."""

    async def make_room(self) -> None: ...
    def used(self, ino: Inode) -> None: ...
    def shown(self, disk: os.statvfs_result) -> os.statvfs_result: ...


class NoListener:
    """For a mount without a remote."""

    def entry_changed(self, parent: Inode, name: bytes, *, renamed: bool = False) -> None: ...
    def writing(self, ino: Inode, new: bool) -> None: ...
    def grew(self, ino: Inode) -> None: ...
    def closed(self, ino: Inode) -> None: ...
    def attributes_changed(self, ino: Inode) -> None: ...


@dataclass
class OpenFile:
    """An inode that is open. `image` changes only under `lock`."""

    ino: Inode
    image: Image
    manifest: int | None
    content: Content | None = None
    readers: int = 0
    writers: int = 0
    modified: bool = False
    """Changed since the last writer count went up from 0; under passthrough, opened for writing since."""
    lowest_write: int | None = None
    """Smallest offset changed since a log's last seal; None when nothing was."""
    fsynced_at: float | None = None
    opened_for_write_at: float = 0.0
    new: bool = False
    """Created by the open that is going on: nothing of it was ever closed."""
    backing: int | None = None
    """The kernel's id of the image while it reads and writes it without us; None while we serve the bytes."""
    held: bool = False
    """Somebody can write the image although no descriptor that we know of is open; see `ckptfs.held`."""
    seen: tuple[int, int] | None = None
    """Size and ctime of the image when it was last looked at, where writes do not come through us."""
    flushed_as: tuple[int, int] | None = None
    """The same when the image was last known to be on the disk, as it was then."""
    detached: bool = False
    """Its names belong to another inode, with other content, by now."""
    created_by: int | None = None
    """The catalog's commit that created it; None for a file that was opened."""
    reading: Reading = field(default_factory=Reading)
    """What was read of it, where bytes were elsewhere when it was opened."""
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def unwatched(self) -> bool:
        """Whether it may be written without our being told."""
        return self.backing is not None or self.held

    @property
    def in_use(self) -> bool:
        """Whether its content is being changed: it is not whole yet, and nothing else may replace it."""
        return self.lock.locked() or (self.modified and (self.writers > 0 or self.held))


@dataclass
class Handle:
    """One open(), and what it may do."""

    file: OpenFile
    flags: int
    privileged: bool

    @property
    def writes(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def syncs(self) -> bool:
        """Whether each write is durable when it returns (O_SYNC, O_DSYNC)."""
        return self.writes and bool(self.flags & os.O_DSYNC)
