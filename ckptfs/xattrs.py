"""Extended attributes, and the privileges that a write takes from a file: capabilities are one of them."""

from __future__ import annotations

import time

from ckptfs.attributes import CAPABILITIES, SET_ID_BITS
from ckptfs.errors import AttributeMissing, InvalidArgument, NotSupported, ReadOnly
from ckptfs.handles import ChangeListener
from ckptfs.ids import Inode
from ckptfs.local.store import Store
from ckptfs.naming import NAME_MAX

NAMESPACES = (b"user.", b"trusted.", b"security.")
VALUE_MAX = 64 << 10


class ExtendedAttributes:
    """Those of every inode of *store*. All methods raise NameMissing where it is gone, NotSupported for a namespace."""

    def __init__(self, store: Store, listener: ChangeListener, *, read_only: bool) -> None:
        self._store = store
        self._names = store.names
        self._listener = listener
        self._read_only = read_only

    def get(self, ino: Inode, name: bytes) -> bytes:
        """Raises AttributeMissing."""
        _check_namespace(name)
        value = self._names.xattr(ino, name)
        if value is None:
            raise AttributeMissing(f"inode {ino} has no attribute {name!r}")
        return value

    def is_plain(self, ino: Inode) -> bool:
        """Whether it has no capabilities."""
        return self._names.xattr(ino, CAPABILITIES) is None

    def names(self, ino: Inode) -> list[bytes]:
        self._names.inode(ino)
        return list(self._names.xattrs(ino))

    def set(self, ino: Inode, name: bytes, value: bytes) -> None:
        """Raises InvalidArgument for a name or value that is too long, StoreFull, ReadOnly."""
        self._check(name)
        if len(name) > NAME_MAX or len(value) > VALUE_MAX or name in NAMESPACES:
            raise InvalidArgument(f"{name[:NAME_MAX]!r} with {len(value)} bytes is no attribute that can be kept")
        self._names.inode(ino)
        if self._names.xattr(ino, name) == value:
            return  # as on ext4, this is no change: ctime stays, and nothing is to be published
        self._store.check_room()
        with self._store.catalog.transaction():
            self._names.set_xattr(ino, name, value)
            self._changed(ino)
        self._listener.attributes_changed(ino)

    def remove(self, ino: Inode, name: bytes) -> None:
        """Raises AttributeMissing, ReadOnly."""
        self._check(name)
        self._names.inode(ino)
        with self._store.catalog.transaction():
            if not self._names.remove_xattr(ino, name):
                raise AttributeMissing(f"inode {ino} has no attribute {name!r}")
            self._changed(ino)
        self._listener.attributes_changed(ino)

    def _check(self, name: bytes) -> None:
        if self._read_only:
            raise ReadOnly("this mount is read-only")
        _check_namespace(name)

    def _changed(self, ino: Inode) -> None:
        self._names.update_inode(ino, ctime_ns=time.time_ns())
        self._names.state_changed(ino, self._store.clock.tick())


def drop_privileges(store: Store, ino: Inode, *, keeping_set_id: bool) -> None:
    """A write clears the file's capabilities, and S_ISUID and S_ISGID unless its writer is privileged."""
    row = store.names.inode(ino)
    mode = row.mode if keeping_set_id else row.mode & ~SET_ID_BITS
    capable = store.names.xattr(ino, CAPABILITIES) is not None
    if mode == row.mode and not capable:
        return
    with store.catalog.transaction():
        store.names.update_inode(ino, mode=mode)
        if capable:
            store.names.remove_xattr(ino, CAPABILITIES)
        store.names.state_changed(ino, store.clock.tick())


def _check_namespace(name: bytes) -> None:
    if not name.startswith(NAMESPACES):
        raise NotSupported(f"attributes like {name!r} are not kept")
