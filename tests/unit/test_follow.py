"""Following other writers: when the remote is asked, which heads are merged, and what a failure does."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ckptfs.encoding.canonical import seal_object
from ckptfs.encoding.head import Head, encode_head, head_key
from ckptfs.ids import Clock, Stamp, new_writer_id
from tests.support.memory import MemoryStore
from tests.support.peers import Peer


class World:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.remote = MemoryStore()
        ticks = itertools.count(1)
        self.now_ms: Callable[[], int] = lambda: next(ticks)
        self.peers: list[Peer] = []

    def peer(self, name: str) -> Peer:
        peer = Peer(self.path / f"{name}.db", self.remote, now_ms=self.now_ms)
        self.peers.append(peer)
        return peer


def run(tmp_path: Path, test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World(tmp_path)
        try:
            await test(world)
        finally:
            for peer in world.peers:
                peer.close()

    trio.run(main, clock=MockClock(autojump_threshold=0.02))


@asynccontextmanager
async def serving(peer: Peer) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(peer.follower.run)
        yield
        nursery.cancel_scope.cancel()


def test_nobody_looks_nobody_asks(tmp_path: Path) -> None:
    """A mount that nobody reads makes no request; looks within the lag share one LIST."""

    async def test(world: World) -> None:
        peer = world.peer("a")
        async with serving(peer):
            await trio.sleep(100)
            assert world.remote.lists == 0
            for _ in range(5):
                await peer.follower.fresh(waiting=True)
            assert world.remote.lists == 1
            await trio.sleep(3)
            await peer.follower.fresh(waiting=True)
            assert world.remote.lists == 2

    run(tmp_path, test)


def test_a_look_sees_what_was_published(tmp_path: Path) -> None:
    """A look that waits sees another writer's file; one that does not wait makes the next look see it."""

    async def test(world: World) -> None:
        a, b = world.peer("a"), world.peer("b")
        async with serving(b):
            await a.write("x", "1")
            a.publish()
            await b.follower.fresh(waiting=True)
            assert set(await b.view()) == {"x"}
            await a.write("y", "2")
            a.publish()
            await trio.sleep(3)
            await b.follower.fresh(waiting=False)
            await trio.sleep(1)
            assert set(await b.view()) == {"x", "y"}

    run(tmp_path, test)


def test_many_heads_are_listed_by_writer(tmp_path: Path) -> None:
    """When one LIST does not hold all heads, each writer's newest is found through its folder."""

    async def test(world: World) -> None:
        writers = [world.peer(name) for name in "abc"]
        for peer in writers:
            for number in range(4):
                await peer.write(f"{id(peer)}-{number}", "1")
                peer.publish()
        reader = world.peer("reader")
        world.remote.largest_listing = 3
        await reader.follow()
        assert len(await reader.view()) == 12

    run(tmp_path, test)


def test_a_head_waits_for_what_it_covers(tmp_path: Path) -> None:
    """A head whose vector names a head that is not there yet is not merged before that one is."""

    async def test(world: World) -> None:
        a, b, reader = world.peer("a"), world.peer("b"), world.peer("reader")
        await a.write("first", "1")
        a.publish()
        await reader.follow()
        await a.write("shard", "1")
        hidden = a.publish()
        await b.follow()
        await b.write("marker", "1")
        b.publish()
        key = head_key(a.writer, hidden.seq)
        late = world.remote.objects.pop(key)
        await reader.follow()
        assert set(await reader.view()) == {"first"}
        world.remote.objects[key] = late
        await reader.follow()
        assert set(await reader.view()) == {"first", "shard", "marker"}

    run(tmp_path, test)


def test_a_fresh_reader_skips_covered_heads(tmp_path: Path) -> None:
    """Of many writers that each resumed from the last, a new reader merges the newest alone and counts all as had."""

    async def test(world: World) -> None:
        previous = None
        for number in range(6):
            peer = world.peer(str(number))
            await peer.follow()
            for shard in range(10):
                await peer.write(f"{number}-{shard}", str(number))
            if previous is not None:
                await peer.remove(f"{number - 1}-3")
            peer.publish()
            previous = peer
        reader = world.peer("reader")
        await reader.follow()
        assert len(await reader.view()) == 55
        assert len(reader.sources.of(await reader.resolve(""))) == 1
        assert len(reader.followed.newest()) == 6

    run(tmp_path, test)


def test_sequences_never_go_back(tmp_path: Path) -> None:
    """An older head that a stale listing shows again changes nothing."""

    async def test(world: World) -> None:
        a, b = world.peer("a"), world.peer("b")
        await a.write("x", "1")
        a.publish()
        await a.remove("x")
        newest = a.publish()
        await b.follow()
        del world.remote.objects[head_key(a.writer, newest.seq)]
        await b.follow()
        assert await b.view() == {}
        assert b.followed.newest() == {a.writer: 2}

    run(tmp_path, test)


def test_a_failing_remote_is_never_the_lookers_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the remote fails, looks return at once without an error; it is told, once, and heals unaided."""

    async def test(world: World) -> None:
        a, b = world.peer("a"), world.peer("b")
        await a.write("x", "1")
        a.publish()
        world.remote.failing = True
        async with serving(b):
            await b.follower.fresh(waiting=True)
            assert b.follower.failing and b.follower.last_error is not None
            for _ in range(3):
                await trio.sleep(3)
                before = trio.current_time()
                await b.follower.fresh(waiting=True)
                assert trio.current_time() == before
            world.remote.failing = False
            assert await b.follower.catch_up()
            assert set(await b.view()) == {"x"} and b.follower.last_error is None

    with caplog.at_level(logging.WARNING):
        run(tmp_path, test)
    assert caplog.text.count("cannot follow other writers") == 1


def test_an_outage_that_changes_its_reason_is_told_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each reason is logged once, and again after the remote answered."""

    async def test(world: World) -> None:
        b = world.peer("b")
        for reasons in (["no answer", "no answer", "refused", "refused"], [None, "refused"]):
            for reason in reasons:
                world.remote.failing = reason is not None
                world.remote.reason = reason or ""
                await b.follower.check()
                assert (b.follower.last_error is None) == (reason is None)

    with caplog.at_level(logging.WARNING):
        run(tmp_path, test)
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert said == ["no answer", "refused", "refused"]


def test_a_damaged_head_hides_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A head that does not decode is logged once and left out; others are followed."""

    async def test(world: World) -> None:
        a, b = world.peer("a"), world.peer("b")
        await a.write("x", "1")
        a.publish()
        world.remote.objects[head_key(new_writer_id(), 1)] = b"nonsense"
        for _ in range(3):
            await b.follower.check()
        assert set(await b.view()) == {"x"}
        assert b.follower.last_error is not None

    with caplog.at_level(logging.ERROR):
        run(tmp_path, test)
    assert caplog.text.count("is left out") == 1


def test_a_clock_ahead_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A writer whose stamps are more than 15 minutes ahead is named once, and our clock goes past them."""

    async def test(world: World) -> None:
        b = world.peer("b")
        source = world.peer("a")
        root = source.publish().lanes[""]
        writer = new_writer_id()
        stamp = Stamp((int(time.time()) + 3600) * 1000 << Clock.COUNTER_BITS)
        for seq in (1, 2):
            head = Head(writer, seq, {"": root}, stamp=stamp)
            world.remote.objects[head_key(writer, seq)] = seal_object(encode_head(head))
            await b.follow()
        assert b.clock.tick() > stamp

    with caplog.at_level(logging.WARNING):
        run(tmp_path, test)
    assert caplog.text.count("ahead of ours") == 1
