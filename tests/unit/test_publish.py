"""Publishing over a real directory store: what is on the remote is what was there at the cut, whole and in order."""

from __future__ import annotations

import os
import random
from pathlib import Path

import trio

from ckptfs.encoding.head import open_head
from ckptfs.remote.directory import DirectoryStore
from tests.support.publishing import CALLER, machine, restore, run


def heads(remote: DirectoryStore) -> list:
    """All heads of the remote, newest first for each writer."""
    return [open_head(remote.get(each.key), each.key) for each in remote.list("heads/").objects]


def test_everything_arrives(tmp_path: Path) -> None:
    """Files of all sizes, directories and links come back byte for byte from the remote alone."""
    remote = DirectoryStore(str(tmp_path / "remote"))
    numbers = random.Random(1)
    files = {f"d{i % 3}/f{i}": numbers.randbytes(size) for i, size in enumerate([0, 1, 100, 5000, 20000, 40000] * 3)}

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            for i in range(3):
                await here.mkdir(f"d{i}")
            for path, data in files.items():
                await here.write(path, data)
            await here.fs.symlink(await here.walk("d0"), b"link", b"../d1", CALLER)
            await here.publish()
            assert here.publisher is not None and here.publisher.is_drained
            assert here.publisher.progress().pending_files == 0

    run(test)
    found = restore(tmp_path / "remote", tmp_path / "out")
    assert found == {"d0": None, "d1": None, "d2": None, "d0/link": "../d1", **files}
    (head,) = heads(remote)
    assert not head.incomplete


def test_second_publication_sends_only_what_changed(tmp_path: Path) -> None:
    """A second checkpoint that shares most bytes uploads only the rest, and the earlier head stays readable."""
    remote = DirectoryStore(str(tmp_path / "remote"))
    numbers = random.Random(2)
    frozen, moving = numbers.randbytes(30000), numbers.randbytes(2000)

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.write("a", frozen)
            await here.publish()
            first = here.publisher.counters.raw_bytes
            await here.write("b", frozen)
            await here.write("c", moving)
            await here.publish()
            assert here.publisher.counters.raw_bytes - first == len(moving)
            await here.publish()  # nothing new: no head
            assert here.heads.newest().seq == 2

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"a": frozen, "b": frozen, "c": moving}


def test_restart_goes_on(tmp_path: Path) -> None:
    """A store that is opened again publishes on top of what it published, with the next sequence."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def first() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.write("a", b"one" * 1000)
            await here.publish()
            await here.write("b", b"two" * 1000)

    async def second() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.publisher.drained()
            await here.publish()
            assert here.heads.newest().seq == 2

    run(first)
    run(second)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"a": b"one" * 1000, "b": b"two" * 1000}


def test_unfinished_file_is_left_out(tmp_path: Path) -> None:
    """Publishing at once leaves a new file that is being written out, keeps the old version of a rewritten one."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.write("old", b"first")
            await here.publish()
            new = await here.open("new", os.O_WRONLY | os.O_CREAT)
            old = await here.open("old", os.O_WRONLY | os.O_TRUNC)
            await here.fs.files.write(old, 0, b"sec")
            await here.write("other", b"x")
            await here.publish()
            assert restore(tmp_path / "remote", tmp_path / "out1") == {"old": b"first", "other": b"x"}
            assert max(heads(remote), key=lambda head: head.seq).incomplete
            await here.fs.release(new)
            await here.fs.files.write(old, 3, b"ond")
            await here.fs.release(old)
            while here.heads.newest().seq < 3:
                await trio.sleep(0.01)

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out2") == {"old": b"second", "new": b"", "other": b"x"}


def test_settles_by_itself(tmp_path: Path) -> None:
    """Without being asked, a changed directory is published once it is quiet."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.mkdir("d")
            await here.write("d/a", b"1")
            while here.heads.newest() is None:
                await trio.sleep(0.01)
            await here.rename("d", "e")
            await here.unlink("e/a")
            while here.heads.newest().seq < 2:
                await trio.sleep(0.01)

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"e": None}
