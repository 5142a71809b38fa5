"""Looking while another machine's changes are merged: what was, or what is, never something in between."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyfuse3
import pytest
import trio

from ckptfs.attributes import Caller
from ckptfs.errors import NameMissing, Stale
from ckptfs.filesystem import FileSystem
from ckptfs.ids import ROOT_INODE, Inode
from ckptfs.local.catalog.sources import Sources
from ckptfs.local.store import Store
from ckptfs_mount.operations import MountOptions, Operations

ROOT = Caller(0, 0)
SHARDS = [b"shard-%d" % number for number in range(5)]


class Elsewhere:
    """Another machine, which removes the directory `step` when somebody looks for the *when*-th time."""

    def __init__(self, store: Store, when: int) -> None:
        self._store = store
        self._looks_left = when

    async def expand(self, directory: Inode) -> None: ...

    async def fresh(self, *, waiting: bool) -> None:
        self._looks_left -= 1
        if self._looks_left == 0:
            names = self._store.names
            step = names.child(ROOT_INODE, b"step").ino
            for name, _ in names.entries(step):
                remove_elsewhere(self._store, step, name)
            remove_elsewhere(self._store, ROOT_INODE, b"step")

    def unknown(self) -> str | None: ...


def remove_elsewhere(store: Store, parent: Inode, name: bytes) -> None:
    """As merging does it."""
    with store.catalog.transaction():
        store.names.update_inode(store.names.child(parent, name).ino, nlink=0)
        Sources(store.catalog).remove_row(parent, name)


@pytest.mark.parametrize("when", range(1, 8))
def test_a_directory_that_goes_is_never_seen_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """Listed in two requests, it is there as a whole or not at all, whenever in between it is removed elsewhere."""
    listed: list[bytes] = []
    rooms = [4, 100]

    def reply(token: object, name: bytes, attributes: object, next_id: int) -> bool:
        if len(listed) == rooms[0]:
            return False
        listed.append(name)
        return True

    async def main() -> None:
        store = Store.open(tmp_path / "store")
        filesystem = FileSystem(store, tree=Elsewhere(store, -1))
        step = (await filesystem.mkdir(ROOT_INODE, b"step", 0o755, ROOT)).ino
        for name in SHARDS:
            fh, _ = await filesystem.create(step, name, 0o600, os.O_CREAT | os.O_WRONLY, ROOT)
            await filesystem.release(fh)
        filesystem.pin(step)
        filesystem._tree = Elsewhere(store, when)
        operations = Operations(filesystem, MountOptions())
        fh = await operations.opendir(step, None)
        try:
            while rooms:
                await operations.readdir(fh, len(listed), None)
                del rooms[0]
        except pyfuse3.FUSEError as error:
            assert error.errno == errno.ENOENT
        else:
            assert listed == [b".", b"..", *SHARDS]
        store.close()

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    trio.run(main)


def test_a_file_that_was_replaced_elsewhere_is_not_opened_again(tmp_path: Path) -> None:
    """Also while somebody has it open: a marker must not name what went with it. Who has it open reads on."""

    async def main() -> None:
        store = Store.open(tmp_path / "store")
        filesystem = FileSystem(store)
        fh, marker = await filesystem.create(ROOT_INODE, b"latest", 0o600, os.O_CREAT | os.O_RDWR, ROOT)
        await filesystem.files.write(fh, 0, b"step-6")
        filesystem.pin(marker.ino)
        remove_elsewhere(store, ROOT_INODE, b"latest")
        with pytest.raises(Stale):
            await filesystem.open(marker.ino, os.O_RDONLY, ROOT)
        assert await filesystem.files.read(fh, 0, 10) == b"step-6"
        await filesystem.release(fh)

        fh, own = await filesystem.create(ROOT_INODE, b"own", 0o600, os.O_CREAT | os.O_RDWR, ROOT)
        filesystem.pin(own.ino)
        await filesystem.unlink(ROOT_INODE, b"own")
        again = await filesystem.open(own.ino, os.O_RDONLY, ROOT)  # /proc/self/fd, as everywhere
        for each in (again, fh):
            await filesystem.release(each)
        with pytest.raises(NameMissing):
            await filesystem.lookup(ROOT_INODE, b"own")
        store.close()

    trio.run(main)
