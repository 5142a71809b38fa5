"""What a change of names does to the catalog: checks, and then one transaction.

Nothing here awaits, so that a check still holds when its change is committed. When directories must be fetched first,
who is told, and what becomes of inodes without a name is `filesystem`'s work.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable

from ckptfs.attributes import Caller
from ckptfs.errors import (
    DirectoryNotEmpty,
    InvalidArgument,
    IsADirectory,
    NameExists,
    NameMissing,
    NameTooLong,
    NotDirectory,
    NotPermitted,
)
from ckptfs.ids import ImageId, Inode
from ckptfs.local.catalog.names import InodeRow
from ckptfs.local.store import Store

NAME_MAX = 255


class Naming:
    """Changes names of one store's tree; with *tombstones*, for other writers to see removals.

    *is_flushed* tells whether an image is whole on the disk: what is renamed over by one that is not is kept.
    """

    def __init__(self, store: Store, *, tombstones: bool, is_flushed: Callable[[ImageId], bool]) -> None:
        self._store = store
        self._names = store.names
        self._tombstones = tombstones
        self._is_flushed = is_flushed

    # Checks

    def check_parent(self, parent: Inode) -> InodeRow:
        """The directory, which can take a name. Raises NotDirectory, NameMissing."""
        directory = self._names.inode(parent)
        if not stat.S_ISDIR(directory.mode):
            raise NotDirectory(f"inode {parent} is not a directory")
        if directory.nlink == 0:
            raise NameMissing(f"directory {parent} was removed")
        return directory

    def check_new(self, parent: Inode, name: bytes) -> InodeRow:
        """The directory, in which *name* is free. Raises also NameExists, NameTooLong, OSError (the disk is full)."""
        directory = self.check_parent(parent)
        check_name(name)
        if name in (b".", b"..") or self._names.find(parent, name) is not None:
            raise NameExists(f"{name!r} exists")
        self._store.check_room()
        return directory

    def check_not_below(self, moved: Inode, new_parent: Inode) -> None:
        """Raises InvalidArgument when *new_parent* lies in *moved*."""
        if new_parent == moved or moved in self._names.ancestors(new_parent):
            raise InvalidArgument("a directory cannot move below itself")

    def check_replaceable(self, source: InodeRow, target: InodeRow) -> None:
        """Raises what rename(2) says when *source* may not take *target*'s name."""
        if stat.S_ISDIR(source.mode):
            if not stat.S_ISDIR(target.mode):
                raise NotDirectory("a directory cannot replace a file")
            if not self._names.is_empty(target.ino):
                raise DirectoryNotEmpty("the directory to be replaced is not empty")
        elif stat.S_ISDIR(target.mode):
            raise IsADirectory("a file cannot replace a directory")

    # Changes

    def add(
        self,
        directory: InodeRow,
        name: bytes,
        mode: int,
        caller: Caller,
        *,
        rdev: int = 0,
        size: int = 0,
        target: bytes | None = None,
        image: ImageId | None = None,
        dirty: int = 0,
    ) -> Inode:
        """A new inode called *name*. Joins the caller's transaction."""
        now_ns, stamp = time.time_ns(), self._store.clock.tick()
        ino = self._names.add_inode(
            mode=mode,
            uid=caller.uid,
            gid=directory.gid if directory.mode & stat.S_ISGID else caller.gid,
            now_ns=now_ns,
            changed=stamp,
            rdev=rdev,
            size=size,
            target=target,
            image=image,
            dirty=dirty,
        )
        self._names.bind(directory.ino, name, ino, stamp)
        self._names.touch_directory(directory.ino, now_ns, stamp)
        return ino

    def _unbind(self, parent: Inode, name: bytes, row: InodeRow, now_ns: int) -> None:
        self._names.unbind(parent, name, self._store.clock.tick(), tombstone=self._tombstones)
        if stat.S_ISDIR(row.mode):
            self._names.update_inode(row.ino, nlink=0, ctime_ns=now_ns)
            self._count_links(parent, -1)
        else:
            self._names.update_inode(row.ino, nlink=row.nlink - 1, ctime_ns=now_ns)
            if row.nlink > 1:
                self._names.state_changed(row.ino, self._store.clock.tick())

    def _count_links(self, directory: Inode, change: int) -> None:
        self._names.update_inode(directory, nlink=self._names.inode(directory).nlink + change)

    def move(
        self,
        parent: Inode,
        name: bytes,
        new_parent: Inode,
        new_name: bytes,
        source: InodeRow,
        target: InodeRow | None,
        *,
        exchange: bool,
    ) -> list[Inode]:
        """Let *new_name* mean *source* and *name* nothing, or with *exchange* what *new_name* meant.

        Returns inodes that were kept since they had been replaced, and are no longer.
        """
        now_ns, stamp = time.time_ns(), self._store.clock.tick()
        with self._store.catalog.transaction():
            dropped = self._replace(parent, name, new_parent, new_name, source, None if exchange else target)
            if target is not None and not exchange:
                self._unbind(new_parent, new_name, target, now_ns)
            self._names.bind(new_parent, new_name, source.ino, stamp)
            if target is not None and exchange:
                self._names.bind(parent, name, target.ino, stamp)
                self._names.update_inode(target.ino, ctime_ns=now_ns)
            else:
                self._names.unbind(parent, name, stamp, tombstone=self._tombstones)
            self._names.update_inode(source.ino, ctime_ns=now_ns)
            swapped = target if exchange else None
            for moved, here, there in ((source, parent, new_parent), (swapped, new_parent, parent)):
                if moved is not None and stat.S_ISDIR(moved.mode) and here != there:
                    self._count_links(here, -1)
                    self._count_links(there, +1)
            self._names.touch_directory(parent, now_ns, stamp)
            self._names.touch_directory(new_parent, now_ns, stamp)
        return dropped

    def _replace(
        self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, source: InodeRow, target: InodeRow | None
    ) -> list[Inode]:
        """Keep what is renamed over until *source* was flushed, where it is not. Returns what is kept no longer."""
        replaced = self._store.replaced
        dropped = replaced.name_gone(parent, name)
        image = source.image if source.manifest is None else None
        if target is None or image is None or self._is_flushed(image):
            return dropped + replaced.name_gone(new_parent, new_name)
        is_durable = target.manifest is not None or target.image is None or self._store.sync.was_flushed(target.image)
        return dropped + replaced.by_rename(new_parent, new_name, image, target.ino, is_durable=is_durable)

    def link(self, ino: Inode, parent: Inode, name: bytes) -> None:
        """Another name of *ino*."""
        self.check_new(parent, name)
        row = self._names.inode(ino)
        if stat.S_ISDIR(row.mode):
            raise NotPermitted("a directory cannot have a second name")
        if row.nlink == 0:
            raise NameMissing(f"inode {ino} has no name any more")
        now_ns, stamp = time.time_ns(), self._store.clock.tick()
        with self._store.catalog.transaction():
            self._names.bind(parent, name, ino, stamp)
            self._names.update_inode(ino, nlink=row.nlink + 1, ctime_ns=now_ns)
            self._names.state_changed(ino, stamp)
            self._names.touch_directory(parent, now_ns, stamp)

    def remove(self, parent: Inode, name: bytes, row: InodeRow) -> list[Inode]:
        """*name*, which is *row*'s, goes. Returns inodes that were kept, having been replaced, and are no longer."""
        now_ns, stamp = time.time_ns(), self._store.clock.tick()
        with self._store.catalog.transaction():
            dropped = self._store.replaced.name_gone(parent, name)
            self._unbind(parent, name, row, now_ns)
            self._names.touch_directory(parent, now_ns, stamp)
        return dropped


def check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise NameTooLong(f"names have at most {NAME_MAX} bytes, this one {len(name)}")
