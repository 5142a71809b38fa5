"""The number of an inode that is gone is not given to another while anything remembers it."""

from __future__ import annotations

import stat
from pathlib import Path

from ckptfs.ids import ROOT_INODE, Inode, Stamp
from ckptfs.local.store import Store


def add(store: Store, mode: int, name: bytes) -> Inode:
    with store.catalog.transaction():
        ino = store.names.add_inode(mode=mode, uid=0, gid=0, now_ns=0, changed=Stamp(1))
        store.names.bind(ROOT_INODE, name, ino, Stamp(1))
    return ino


def remove(store: Store, ino: Inode, name: bytes) -> None:
    with store.catalog.transaction():
        store.names.unbind(ROOT_INODE, name, Stamp(2), tombstone=False)
        store.names.remove_inode(ino)


def test_numbers_are_not_given_again(tmp_path: Path) -> None:
    """Not while the store is open, and after that not those that a cut names.

    SQLite gives the highest number again. A directory that was removed while it was being published, and a file that
    got its number, ended with a tree for the file, and nothing could be published any more.
    """
    store = Store.open(tmp_path / "store")
    directory = add(store, stat.S_IFDIR | 0o755, b"directory")
    remove(store, directory, b"directory")
    file = add(store, stat.S_IFREG | 0o644, b"file")
    assert file > directory
    with store.catalog.transaction() as db:
        db.execute("INSERT INTO cut_dir (cut, dir, file_id) VALUES (1, ?, x'00')", (file,))
    remove(store, file, b"file")
    store.close()
    store = Store.open(tmp_path / "store")
    assert add(store, stat.S_IFREG | 0o644, b"later") > file
    store.close()
