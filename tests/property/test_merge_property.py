"""Random concurrent changes by several writers, merged in any order and grouping."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.errors import FileSystemError
from tests.support.memory import MemoryStore
from tests.support.peers import Peer, content_id

NAMES = ("a", "b", "c")
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
OPERATION = st.one_of(
    st.tuples(st.just("write"), PATHS),
    st.tuples(st.just("write"), PATHS),
    st.tuples(st.just("mkdir"), PATHS),
    st.tuples(st.just("mkdir"), PATHS),
    st.tuples(st.just("remove"), PATHS),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("link"), PATHS, PATHS),
    st.tuples(st.just("publish")),
    st.tuples(st.just("publish")),
    st.tuples(st.just("follow")),
    st.tuples(st.just("follow")),
)
STEPS = st.lists(st.tuples(st.integers(0, 2), OPERATION), max_size=30)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


async def act(peer: Peer, operation: tuple[str, ...], number: int) -> bool:
    """Whether it was possible."""
    kind, *paths = operation
    try:
        if kind == "publish":
            peer.publish()
        elif kind == "follow":
            await peer.follow()
        elif kind == "write":
            await peer.write(paths[0], f"content {number}")
        else:
            await getattr(peer, kind)(*paths)
    except FileSystemError:
        return False
    return True


async def settle(peers: list[Peer]) -> None:
    """Publish and follow until everybody knows everything."""
    for _ in range(4):
        for peer in peers:
            await peer.follow()
            peer.publish()
    for peer in peers:
        await peer.follow()


def make_peers(folder: str, count: int) -> list[Peer]:
    remote = MemoryStore()
    ticks = itertools.count(1)
    return [Peer(Path(folder, f"{number}.db"), remote, now_ms=lambda: next(ticks)) for number in range(count)]


async def converge(steps: list[tuple[int, tuple[str, ...]]], folder: str) -> None:
    peers = make_peers(folder, 3)
    try:
        for number, (who, operation) in enumerate(steps):
            await act(peers[who], operation, number)
            peers[who].check()
        expected: dict[str, str] = {}
        for number, peer in enumerate(peers):
            folders = ["", *(path for path in await peer.view() if path.endswith("/"))]
            for index, path in enumerate(folders):
                await peer.write(f"{path}new-{number}-{index}", f"edit {number} {index}")
                expected[f"new-{number}-{index}"] = content_id(f"edit {number} {index}")
        await settle(peers)
        views = [await peer.view() for peer in peers]
        for peer in peers:
            peer.check()
            await peer.check_published()
        assert views[0] == views[1] == views[2]
        reader = Peer(Path(folder, "reader.db"), peers[0].remote, now_ms=lambda: 1)
        peers.append(reader)
        await reader.follow()
        assert await reader.view() == views[0]
        reader.check()
        found = {path.rsplit("/", 1)[-1]: content for path, content in views[0].items()}
        assert {name: found.get(name) for name in expected} == expected
    finally:
        for peer in peers:
            peer.close()


@settings(max_examples=50, deadline=None, suppress_health_check=SLOW)
@given(STEPS)
def test_all_converge_and_no_pending_edit_is_lost(steps: list[tuple[int, tuple[str, ...]]]) -> None:
    """Whatever three writers do, in any order of publishing and following, all end with the same tree, what was
    written last is in it, and a fresh reader sees the same."""
    with tempfile.TemporaryDirectory() as folder:
        trio.run(converge, steps, folder)


async def keep_everything(steps: list[tuple[int, tuple[str, ...]]], folder: str) -> None:
    peers = make_peers(folder, 3)
    try:
        written: set[str] = set()
        for number, (who, operation) in enumerate(steps):
            kind, *paths = operation
            if kind == "write":
                operation = ("write", f"{paths[0]}/file-{number}")
            if kind == "rename" and not (await peers[who].view()).keys() & {paths[0] + "/"}:
                continue
            if await act(peers[who], operation, number) and kind == "write":
                written.add(content_id(f"content {number}"))
        await settle(peers)
        views = [await peer.view() for peer in peers]
        assert views[0] == views[1] == views[2]
        assert {content for path, content in views[0].items() if not path.endswith("/")} == written
    finally:
        for peer in peers:
            peer.close()


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(
                st.tuples(st.just("write"), PATHS),
                st.tuples(st.just("mkdir"), PATHS),
                st.tuples(st.just("rename"), PATHS, PATHS),
                st.tuples(st.just("publish")),
                st.tuples(st.just("follow")),
            ),
        ),
        max_size=30,
    )
)
def test_without_removals_nothing_is_lost(steps: list[tuple[int, tuple[str, ...]]]) -> None:
    """While directories are made and moved about by everybody at once, no file in them is lost."""
    with tempfile.TemporaryDirectory() as folder:
        trio.run(keep_everything, steps, folder)


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(
                st.tuples(st.just("write"), PATHS),
                st.tuples(st.just("remove"), st.sampled_from([f"{a}/{b}" for a in NAMES for b in NAMES])),
                st.tuples(st.just("publish")),
                st.tuples(st.just("follow")),
            ),
        ),
        max_size=30,
    )
)
def test_nothing_deleted_revives(steps: list[tuple[int, tuple[str, ...]]]) -> None:
    """A file that was removed stays removed unless somebody changed or made it later."""

    async def run(folder: str) -> None:
        peers = make_peers(folder, 3)
        try:
            for name in NAMES:
                await peers[0].mkdir(name)
            peers[0].publish()
            for peer in peers[1:]:
                await peer.follow()
            last: dict[str, str] = {}
            for number, (who, operation) in enumerate(steps):
                if await act(peers[who], operation, number) and operation[0] in ("write", "remove"):
                    last[operation[1]] = operation[0]
            await settle(peers)
            view = await peers[0].view()
            for path, kind in last.items():
                assert (path in view) == (kind == "write"), path
        finally:
            for peer in peers:
                peer.close()

    with tempfile.TemporaryDirectory() as folder:
        trio.run(run, folder)
