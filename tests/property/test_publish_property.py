"""Random changes, publications and kills: what the remote holds is always the tree as it was when it was cut."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import partial
from pathlib import Path

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.errors import FileSystemError
from ckptfs.ids import ROOT_INODE, Inode
from ckptfs.remote.directory import DirectoryStore
from tests.support.faulty import FaultyStore, unavailable
from tests.support.publishing import CALLER, Machine, machine, restore, run

NAMES = ["a", "b", "checkpoint-1", "log.txt"]
paths = st.one_of(
    st.sampled_from(NAMES),
    st.tuples(st.sampled_from(NAMES[:3]), st.sampled_from(NAMES)).map("/".join),
    st.tuples(st.sampled_from(NAMES[:2]), st.sampled_from(NAMES[:2]), st.sampled_from(NAMES)).map("/".join),
)
contents = st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 700, 3000, 9000]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("mkdir"), paths),
        st.tuples(st.just("write"), paths, contents),
        st.tuples(st.just("patch"), paths, st.integers(0, 4000), contents),
        st.tuples(st.just("rename"), paths, paths),
        st.tuples(st.just("unlink"), paths),
        st.tuples(st.just("rmdir"), paths),
        st.tuples(st.just("link"), paths, paths),
        st.tuples(st.just("cut")),
        st.tuples(st.just("publish")),
        st.tuples(st.just("outage"), st.integers(1, 6)),
        st.tuples(st.just("kill")),
    ),
    min_size=5,
    max_size=40,
)


def made(content: tuple[int, int]) -> bytes:
    seed, size = content
    return bytes((i * (seed + 3) + i // 251) % 256 for i in range(size))


async def perform(here: Machine, step: tuple) -> None:
    """Do what a program would; what the file system refuses is no change."""
    try:
        match step:
            case ("mkdir", path):
                await here.mkdir(path)
            case ("write", path, content):
                await here.write(path, made(content))
            case ("patch", path, offset, content):
                fh = await here.open(path, os.O_RDWR)
                await here.fs.files.write(fh, offset, made(content))
                await here.fs.release(fh)
            case ("rename", old, new):
                await here.rename(old, new)
            case ("unlink", path):
                await here.unlink(path)
            case ("rmdir", path):
                await here.rmdir(path)
            case ("link", old, new):
                parent, name = await here._parent(new)
                await here.fs.link(await here.walk(old), parent, name)
            case ("cut",):
                here.settler.cut_now()
    except FileSystemError:
        pass


async def local(here: Machine) -> dict[str, bytes | None]:
    """The tree as a program sees it."""
    found: dict[str, bytes | None] = {}

    async def visit(directory: Inode, top: str) -> None:
        for name, ino in here.store.names.entries(directory):
            path = top + name.decode()
            row = here.store.names.inode(ino)
            if stat.S_ISDIR(row.mode):
                found[path] = None
                await visit(ino, path + "/")
            else:
                fh = await here.fs.open(ino, os.O_RDONLY, CALLER)
                found[path] = await here.fs.files.read(fh, 0, 1 << 20)
                await here.fs.release(fh)

    await visit(ROOT_INODE, "")
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_remote_is_the_tree_at_the_cut(program: list[tuple]) -> None:
    """After every publication, through outages and kills, the remote restores to exactly the local tree."""
    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder), program)


def _run(folder: Path, program: list[tuple]) -> None:
    remote = FaultyStore(DirectoryStore(str(folder / "remote")))
    restored = 0

    async def check(here: Machine) -> None:
        nonlocal restored
        await here.publish()
        restored += 1
        expected = await local(here)
        if here.heads.newest() is None:
            assert expected == {}
            return
        assert restore(folder / "remote", folder / f"out{restored}") == expected
        assert here.publisher is not None and here.publisher.progress().pending_files == 0

    async def part(steps: list[tuple], last: bool) -> None:
        async with machine(folder / "store", remote) as here:
            for step in steps:
                if step[0] == "publish":
                    await check(here)
                elif step[0] == "outage":
                    left = [step[1]]

                    def fault(operation: str, key: str, left: list[int] = left) -> Exception | None:
                        left[0] -= 1
                        return unavailable(key) if left[0] >= 0 else None

                    remote.fault = fault
                else:
                    await perform(here, step)
                    await trio.sleep(0)
            if last:
                await check(here)

    kills = [i for i, step in enumerate(program) if step[0] == "kill"]
    start = 0
    for end in [*kills, len(program)]:
        run(partial(part, program[start:end], end == len(program)))
        start = end + 1
