"""Which shards are fetched before anybody opens them, how much of them, and when not."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ckptfs.encoding.manifest import Chunk, Content
from ckptfs.errors import ContentUnavailable
from ckptfs.ids import ROOT_INODE, ChunkId, Inode, Stamp
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.images import Image
from ckptfs.local.store import Store
from ckptfs.openfiles import OpenFiles
from ckptfs.reading import SHARE, Reading
from ckptfs.siblings import Siblings

CHUNK = 1000
CHUNKS = 64
SIZE = CHUNK * CHUNKS


class FakeSource:
    """A remote whose bytes are zeros and come at once; remembers what was fetched for nobody."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.room = True
        self.busy = trio.Event()
        self.busy.set()
        self.down = False
        self.fetched: Counter[int] = Counter()
        """Bytes by manifest row, which is the shard's number."""

    async def content(self, manifest_row: int) -> Content:
        chunks = (Chunk(ChunkId(bytes([manifest_row, at]) * 16), CHUNK, None) for at in range(CHUNKS))
        return Content(SIZE, (), tuple(chunks))

    async def ensure(self, image: Image, content: Content, start: int, end: int) -> None:
        await trio.sleep(0.001)
        if self.down:
            raise ContentUnavailable("down")
        assert image.present is not None
        assert start % CHUNK == end % CHUNK == 0, "whole chunks"
        self.fetched[content.chunks[0].id[0]] += end - start
        image.present.add(start, end)

    async def read(self, image: Image, content: Content, start: int, end: int) -> bytes:
        if image.present is not None:
            image.present.add(start // CHUNK * CHUNK, -(-end // CHUNK) * CHUNK)
        return bytes(end - start)

    async def record(self, image: Image) -> None:
        if image.present is not None and image.present.covers(0, SIZE):
            self.contents.set_image_whole(image.id)
            image.present = None

    async def quiet(self) -> None:
        await self.busy.wait()

    def has_room(self, length: int) -> bool:
        return self.room

    def begin(self, image: Image, content: Content, start: int, end: int) -> None: ...
    def read_ahead(self, image: Image, content: Content, position: int, reading: Reading) -> None: ...
    async def room_for(self, image: Image, content: Content, start: int, end: int) -> None: ...


class World:
    """Shards in one directory, of which nothing is here; their numbers begin with 1."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self.store = Store.open(path / "store")
        self.source = FakeSource(self.store.contents)
        self.files = OpenFiles(self.store, NoListener(), self.source)
        self.siblings = Siblings(self.store, self.files, self.source)
        self.files.on_cold_read = self.siblings.read
        self.files.on_opened = self.siblings.opened
        self.files.on_idle = lambda image: image.close()
        self.inos = [self._add(name) for name in names]

    def _add(self, name: str) -> Inode:
        with self.store.catalog.transaction():
            ino = self.store.names.add_inode(
                mode=stat.S_IFREG | 0o644, uid=0, gid=0, now_ns=0, changed=Stamp(1), size=SIZE
            )
            self.store.names.bind(ROOT_INODE, name.encode(), ino, Stamp(1))
            manifest = self.store.contents.add_manifest(size=SIZE, body=b"")
            self.store.names.update_inode(ino, manifest=manifest)
        return ino

    async def read(self, shard: int, chunks: range) -> None:
        """Open shard number *shard*, read *chunks* one by one, close."""
        fh = await self.files.open(self.inos[shard - 1], os.O_RDONLY, privileged=True)
        for at in chunks:
            await self.files.read(fh, at * CHUNK, CHUNK)
            await trio.sleep(0.01)
        await self.files.release(fh)

    async def fetched(self) -> dict[int, int]:
        """Chunks that were fetched ahead, by shard, when there was time for that."""
        await trio.sleep(0.5)
        return {shard: length // CHUNK for shard, length in self.source.fetched.items()}


class NoListener:
    def entry_changed(self, parent: Inode, name: bytes, *, renamed: bool = False) -> None: ...
    def writing(self, ino: Inode, new: bool) -> None: ...
    def grew(self, ino: Inode) -> None: ...
    def closed(self, ino: Inode) -> None: ...
    def attributes_changed(self, ino: Inode) -> None: ...


SHARDS = [f"model-{at:05d}-of-00004.safetensors" for at in (1, 2, 3, 4)]


def run(tmp_path: Path, test: Callable[[World], Awaitable[None]], names: list[str] = SHARDS) -> None:
    @asynccontextmanager
    async def serving() -> AsyncIterator[World]:
        world = World(tmp_path, names)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.siblings.run)
            yield world
            nursery.cancel_scope.cancel()
        world.store.close()

    async def main() -> None:
        async with serving() as world:
            await test(world)

    trio.run(main, clock=MockClock(autojump_threshold=0.01))


@pytest.mark.parametrize("chunks", [range(0, 10), range(CHUNKS // 3, 2 * CHUNKS // 3), range(0, CHUNKS, 3)])
def test_who_reads_a_part_of_a_shard_pays_for_no_other(tmp_path: Path, chunks: range) -> None:
    """The beginning, the middle, here and there: less than a half of one shard fetches nothing of the others."""

    async def test(world: World) -> None:
        await world.read(1, chunks)
        assert await world.fetched() == {}

    run(tmp_path, test)


def test_one_shard_read_whole_begins_the_next(tmp_path: Path) -> None:
    """An eighth of what was read, of the next shard in order; not of those before it."""

    async def test(world: World) -> None:
        await world.read(2, range(CHUNKS))
        assert await world.fetched() == {3: CHUNKS // SHARE}

    run(tmp_path, test)


def test_two_shards_read_whole_bring_as_many_again(tmp_path: Path) -> None:
    """The third and the fourth come whole, in this order, before anybody opens them."""

    async def test(world: World) -> None:
        await world.read(1, range(CHUNKS))
        await world.read(2, range(CHUNKS))
        assert list(await world.fetched()) == [2, 3, 4]
        assert await world.fetched() == {2: CHUNKS // SHARE, 3: CHUNKS, 4: CHUNKS}
        assert world.files.files() == [], "nothing stays open"

    run(tmp_path, test)


def test_reading_stops_and_so_does_fetching(tmp_path: Path) -> None:
    """When nobody has read the set for a while, what is left of the allowance is not used."""

    async def test(world: World) -> None:
        await world.read(1, range(CHUNKS))
        fetched = await world.fetched()
        world.source.busy = trio.Event()
        await world.read(2, range(CHUNKS))
        await trio.sleep(10)
        world.source.busy.set()
        assert await world.fetched() == fetched
        await world.read(2, range(CHUNKS))
        assert (await world.fetched()).keys() == {2, 3, 4}, "it is read again"

    run(tmp_path, test)


def test_readers_who_wait_come_first(tmp_path: Path) -> None:
    """Nothing is fetched ahead while something is being fetched for a reader."""

    async def test(world: World) -> None:
        world.source.busy = trio.Event()
        await world.read(1, range(CHUNKS))
        assert await world.fetched() == {}
        world.source.busy.set()
        assert await world.fetched() == {2: CHUNKS // SHARE}

    run(tmp_path, test)


def test_the_last_room_of_the_disk_is_not_for_siblings(tmp_path: Path) -> None:
    """Without room nothing is fetched, and it is looked for again after a while."""

    async def test(world: World) -> None:
        world.source.room = False
        await world.read(1, range(CHUNKS))
        assert await world.fetched() == {}
        world.source.room = True
        await trio.sleep(11)
        await world.read(1, range(CHUNKS))
        assert await world.fetched() == {2: 2 * CHUNKS // SHARE}, "the shard was read twice"

    run(tmp_path, test)


def test_an_outage_costs_nothing_but_the_shards(tmp_path: Path) -> None:
    """When the remote does not deliver, readers go on, and fetching begins again later."""

    async def test(world: World) -> None:
        world.source.down = True
        await world.read(1, range(CHUNKS))
        assert await world.fetched() == {}
        world.source.down = False
        await trio.sleep(11)
        await world.read(1, range(CHUNKS))
        assert await world.fetched() == {2: 2 * CHUNKS // SHARE}, "the shard was read twice"

    run(tmp_path, test)


def test_a_set_of_many_shards_goes_on_while_they_are_opened_whole(tmp_path: Path) -> None:
    """The kernel reads whole shards by itself: opening one that was fetched counts as reading it."""

    async def test(world: World) -> None:
        await world.read(1, range(CHUNKS))
        await world.read(2, range(CHUNKS))
        assert (await world.fetched()).keys() == {2, 3, 4}
        await world.read(3, range(0))
        await world.read(4, range(0))
        assert (await world.fetched()).keys() == {2, 3, 4, 5, 6, 7, 8}

    run(tmp_path, test, [f"layer_{at:02d}-model_states.pt" for at in range(1, 9)])


def test_a_shard_that_was_fetched_ahead_is_given_back(tmp_path: Path) -> None:
    """Whoever removed its last name meanwhile left it to us to tell that nobody has it open any more."""

    async def test(world: World) -> None:
        freed: list[Inode] = []
        world.files.on_freed = freed.append
        await world.read(1, range(CHUNKS))
        await world.fetched()
        await trio.sleep(10)
        assert freed == [world.inos[1]]

    run(tmp_path, test)


def test_files_that_are_no_set_have_no_siblings(tmp_path: Path) -> None:
    """Other steps of a run lie beside each other too."""

    async def test(world: World) -> None:
        await world.read(1, range(CHUNKS))
        await world.read(2, range(CHUNKS))
        assert await world.fetched() == {}

    run(tmp_path, test, [f"step-{at}00.safetensors" for at in range(1, 5)])
