"""A file that is worked on while nobody may open it."""

from __future__ import annotations

import os
from pathlib import Path

import trio
import trio.testing

from ckptfs.attributes import Caller
from ckptfs.engine import Engine
from ckptfs.ids import ROOT_INODE
from ckptfs.local.store import Store

ROOT = Caller(0, 0)


def test_who_opens_a_reserved_file_waits(tmp_path: Path) -> None:
    """Until it is free again; a file that is open is not reserved, and one that is reserved not twice."""

    async def main() -> None:
        store = Store.open(tmp_path / "store")
        filesystem = Engine(store, None).filesystem
        files = filesystem.files
        fh, attributes = await filesystem.create(ROOT_INODE, b"file", 0o644, os.O_WRONLY, ROOT)
        ino = attributes.ino
        with files.reserved(ino) as is_ours:
            assert not is_ours
        await filesystem.release(fh)
        opened = trio.Event()

        async def open_it() -> None:
            await filesystem.release(await filesystem.open(ino, os.O_RDONLY, ROOT))
            opened.set()

        async with trio.open_nursery() as nursery:
            with files.reserved(ino) as is_ours:
                assert is_ours
                with files.reserved(ino) as also_ours:
                    assert not also_ours
                nursery.start_soon(open_it)
                await trio.testing.wait_all_tasks_blocked()
                assert not opened.is_set()
            with trio.fail_after(5):
                await opened.wait()
        store.close()

    trio.run(main)
