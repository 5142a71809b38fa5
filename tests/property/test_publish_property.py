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

from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.codec import decode
from ckptfs.encoding.head import Head, open_head
from ckptfs.encoding.keys import manifest_key, pack_key, tree_key
from ckptfs.encoding.manifest import decode_manifest
from ckptfs.encoding.tree import Tree, decode_tree, join_parts
from ckptfs.errors import FileSystemError
from ckptfs.ids import ROOT_INODE, Inode, ObjectId
from ckptfs.remote.base import ObjectStore
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


busy_steps = st.one_of(
    st.tuples(st.just("mkdir"), paths),
    st.tuples(st.just("write"), paths, contents),
    st.tuples(st.just("patch"), paths, st.integers(0, 4000), contents),
    st.tuples(st.just("open"), paths, st.booleans()),
    st.tuples(st.just("append"), contents),
    st.tuples(st.just("close")),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("unlink"), paths),
    st.tuples(st.just("cut")),
    st.tuples(st.just("pause"), st.integers(0, 20)),
    st.tuples(st.just("kill")),
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


def remote_state(remote: ObjectStore, head: Head) -> dict[str, bytes | None]:
    """What *head* reaches: path -> bytes of a file, None for a directory."""
    found: dict[str, bytes | None] = {}

    def read_tree(digest: ObjectId, body: bytes | None) -> Tree:
        def fetch(name: ObjectId) -> bytes:
            return open_object(remote.get(tree_key(name)), name)

        tree = decode_tree(body if body is not None else fetch(digest))
        return tree if isinstance(tree, Tree) else join_parts(tree, [decode_tree(fetch(each)) for each in tree.parts])

    def read_file(digest: ObjectId, body: bytes | None) -> bytes:
        manifest = decode_manifest(body if body is not None else open_object(remote.get(manifest_key(digest)), digest))
        data = bytearray(manifest.content.size)
        chunks = manifest.content.chunks
        for chunk, place, offset in zip(chunks, manifest.places, manifest.content.offsets(), strict=True):
            encoded = remote.get(pack_key(place.pack), place.offset, place.offset + place.length)
            data[offset : offset + chunk.length] = decode(place.codec, encoded, chunk.length)
        return bytes(data)

    def visit(tree: Tree, top: str) -> None:
        for entry in tree.entries:
            path = top + entry.name.decode()
            if entry.tree is not None:
                found[path] = None
                visit(read_tree(entry.tree, entry.tree_body), path + "/")
            elif entry.manifest is not None:
                found[path] = read_file(entry.manifest, entry.manifest_body)
                assert len(found[path] or b"") == entry.size

    visit(read_tree(*head.lanes[""]), "")
    return found


class Watched(Machine):
    """Remembers what the tree was at each cut."""

    states: dict[int, dict[str, bytes | set[bytes] | None]]
    versions: dict[Inode, set[bytes]]

    def watch(self, states: dict, versions: dict) -> None:
        self.states, self.versions = states, versions
        take = self.cuts.take

        def taken(**arguments: object):
            result = take(**arguments)
            states[arguments["taken_ns"]] = self.now()
            return result

        self.cuts.take = taken  # type: ignore[method-assign,assignment]

    def now(self) -> dict[str, bytes | set[bytes] | None]:
        """The tree; for an unfinished file the whole versions that it ever had."""
        found: dict[str, bytes | set[bytes] | None] = {}

        def visit(directory: Inode, top: str) -> None:
            for name, ino in self.store.names.entries(directory):
                path = top + name.decode()
                row = self.store.names.inode(ino)
                if stat.S_ISDIR(row.mode):
                    found[path] = None
                    visit(ino, path + "/")
                elif ino in self.settler._open:
                    found[path] = set(self.versions.get(ino, ()))
                else:
                    data = self.store.images.path(row.image).read_bytes()
                    self.versions.setdefault(ino, set()).add(data)
                    found[path] = data

        visit(ROOT_INODE, "")
        return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(busy_steps, min_size=5, max_size=40))
def test_every_head_is_a_state_that_was(program: list[tuple]) -> None:
    """Every head ever put, not only the last, has exactly the tree of the moment of its cut; unfinished files aside,
    and new directories that were removed before they were sent."""
    with tempfile.TemporaryDirectory() as folder:
        remote = FaultyStore(DirectoryStore(str(Path(folder) / "remote")))
        states: dict[int, dict[str, bytes | set[bytes] | None]] = {}
        versions: dict[Inode, set[bytes]] = {}

        async def part(steps: list[tuple]) -> None:
            async with machine(Path(folder) / "store", remote, kind=Watched) as here:
                assert isinstance(here, Watched)
                here.watch(states, versions)
                handles: dict[str, int] = {}
                for step in steps:
                    await act(here, step, handles)
                await here.publish()

        async def act(here: Watched, step: tuple, handles: dict[str, int]) -> None:
            if step[0] == "open" and step[1] not in handles:
                try:
                    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if step[2] else 0)
                    handles[step[1]] = await here.open(step[1], flags)
                except FileSystemError:
                    pass
            elif step[0] == "append" and handles:
                await here.append(sorted(handles.items())[0][1], made(step[1]))
            elif step[0] == "close" and handles:
                await here.fs.release(handles.pop(sorted(handles)[0]))
            elif step[0] == "pause":
                with trio.move_on_after(step[1] / 100):
                    await here.publisher.drained()
            else:
                await perform(here, step)

        kills = [i for i, step in enumerate(program) if step[0] == "kill"]
        start = 0
        for end in [*kills, len(program)]:
            run(partial(part, program[start:end]))
            start = end + 1
        for each in remote.list("heads/").objects:
            head = open_head(remote.get(each.key), each.key)
            expected = states[head.time_ns]
            found = remote_state(remote, head)
            gone = {path for path, data in expected.items() if data is None and path not in found}
            assert not gone or any(step[0] == "rename" for step in program)  # only what was replaced is left out, whole
            expected = {
                path: data
                for path, data in expected.items()
                if not any(path == each or path.startswith(f"{each}/") for each in gone)
            }
            for path, data in expected.items():
                if isinstance(data, set):
                    assert found.pop(path, None) in data | {None}
                else:
                    assert found.pop(path) == data
            assert found == {}


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
