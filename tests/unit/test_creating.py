"""A file is created where meanwhile a name has come to be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import trio

from ckptfs.attributes import Caller
from ckptfs.engine import Engine
from ckptfs.errors import NameExists, Stale
from ckptfs.ids import ROOT_INODE
from ckptfs.local.store import Store
from ckptfs_mount.errnos import errno_of

ROOT = Caller(0, 0)


def test_a_name_that_another_machine_took_is_looked_up_again(tmp_path: Path) -> None:
    """The kernel creates what it did not find; only with O_EXCL, or mknod, a program may hear that it exists now."""

    async def main() -> None:
        store = Store.open(tmp_path / "store")
        filesystem = Engine(store, None).filesystem
        fh, _ = await filesystem.create(ROOT_INODE, b"file", 0o600, os.O_CREAT | os.O_WRONLY, ROOT)
        await filesystem.release(fh)
        for flags in (os.O_CREAT | os.O_WRONLY, os.O_CREAT | os.O_RDWR | os.O_TRUNC):
            with pytest.raises(Stale, match="look it up again") as refusal:
                await filesystem.create(ROOT_INODE, b"file", 0o644, flags, ROOT)
            assert errno_of(refusal.value) == errno.ESTALE
        with pytest.raises(NameExists):
            await filesystem.create(ROOT_INODE, b"file", 0o644, os.O_CREAT | os.O_EXCL | os.O_WRONLY, ROOT)
        with pytest.raises(NameExists):
            await filesystem.mknod(ROOT_INODE, b"file", stat.S_IFREG | 0o644, 0, ROOT)
        assert [name for name, _ in await filesystem.entries(ROOT_INODE)] == [b"file"]
        store.close()

    trio.run(main)
