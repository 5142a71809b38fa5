"""Eviction: which images make way, in which order, and which never do."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import trio

from ckptfs.config import NEVER_S
from ckptfs.encoding.manifest import Content, decode_content
from ckptfs.errors import RemoteError
from ckptfs.ids import ImageId, Inode
from ckptfs.local.images import Image
from ckptfs.local.room import Room
from ckptfs.local.store import Store
from ckptfs.replica.bound import BoundStore
from ckptfs.replica.evict import Evictor
from ckptfs.replica.hydrate import Hydrator
from ckptfs.replica.recording import Recorder
from tests.support.consistency import problems
from tests.support.memory import MemoryStore
from tests.support.publishing import CALLER, Machine, machine, run

SIZE = 64 << 10


class Remote:
    """Stands for the bound remote."""

    url = "memory:"
    error: RemoteError | None = None
    gone = False

    def size(self, key: str) -> int | None:
        if self.error is not None:
            raise self.error
        return None if self.gone else 1

    def recognise(self, age_s: float = 0.0) -> None:
        if self.error is not None:
            raise self.error


class FakeRoom(Room):
    """Lacks what a test says, less what was deleted since."""

    def __init__(self, made: Machine) -> None:
        super().__init__(made.store.path)
        self._made = made
        self._until_bytes = float("inf")

    def lack(self, length: int) -> None:
        self._until_bytes = self._bytes() - length

    def lacking_bytes(self, *, saving: bool = False) -> int:
        return int(max(0, self._bytes() - self._until_bytes))

    def _bytes(self) -> int:
        store = self._made.store
        return sum(store.images.status(image).st_blocks * 512 for image in store.images.ids())


class Evicting:
    """A machine with published files, and its evictor."""

    def __init__(self, made: Machine, after_s: float) -> None:
        self.made, self.room, self.remote = made, FakeRoom(made), Remote()
        self.recorder = Recorder(cast(Hydrator, None), list)
        self.held: set[ImageId] = set()
        self.missed: list[str] = []
        self.newest: set[Inode] = set()
        self.evictor = Evictor(
            made.store,
            cast(BoundStore, self.remote),
            self.room,
            content=self._content,
            is_open=made.fs.is_open,
            holds=lambda image: image in self.held,
            let_go=lambda image: self.recorder.let_go(image),
            missed=lambda pack, error: self.missed.append(str(error)),
            newest_set=lambda: self.newest,
            after_s=after_s,
        )

    async def _content(self, manifest: int) -> Content:
        body = self.made.store.contents.manifest(manifest).body
        assert body is not None
        return decode_content(body)

    async def write(self, *names: str) -> None:
        for name in names:
            await self.made.write(name, random.Random(name).randbytes(SIZE))

    async def image(self, name: str) -> ImageId | None:
        return self.made.store.names.inode(await self.made.walk(name)).image

    async def here(self, *names: str) -> list[str]:
        return [name for name in names if await self.image(name) is not None]

    async def need(self, length: int) -> None:
        """Let a program that saves wait for *length* bytes."""
        self.room.lack(length)
        await self.evictor.make_room()
        self.room.lack(0)


@asynccontextmanager
async def evicting(path: Path, after_s: float = NEVER_S) -> AsyncIterator[Evicting]:
    async with machine(path, MemoryStore()) as made, trio.open_nursery() as nursery:
        found = Evicting(made, after_s)
        nursery.start_soon(found.evictor.run)
        yield found
        nursery.cancel_scope.cancel()


def test_the_least_recently_used_goes_first_and_the_newest_set_last(tmp_path: Path) -> None:
    """As many as are needed, no more; what another machine saved before what was saved here."""

    async def main() -> None:
        async with evicting(tmp_path / "store") as it:
            await it.write("a", "b", "c", "d", "e")
            await it.made.publish()
            inos = {name: await it.made.walk(name) for name in "abcde"}
            with it.made.store.catalog.transaction() as db:
                other = it.made.store.catalog.writer_row(type(it.made.store.writer)(bytes(16)))
                db.execute("UPDATE dirent SET origin_writer = ? WHERE ino = ?", (other, inos["d"]))
            it.newest = {inos["a"]}
            for name in "adceb":
                it.evictor.used(inos[name])
            await it.need(0)
            assert await it.here(*"abcde") == [*"abcde"], "nothing without need"
            for left in ("abce", "abe", "ab", "a", ""):
                await it.need(1)
                assert await it.here(*"abcde") == [*left]
            status = it.made.fs.attributes(it.made.store.names.inode(inos["a"]))
            assert (status.size, status.blocks * 512) == (SIZE, SIZE)

    run(main)


def test_what_lies_in_a_pack_that_is_gone_stays(tmp_path: Path) -> None:
    """The remote is asked for each pack before the bytes of it go from here; one that it lacks is told."""

    async def main() -> None:
        async with evicting(tmp_path / "store") as it:
            await it.write("a")
            await it.made.publish()
            it.remote.gone = True
            await it.need(1)
            assert await it.here("a") == ["a"] and it.missed and "is gone" in it.missed[0]
            it.remote.gone = False
            await trio.sleep(1.0)  # nothing is tried for a while after nothing could make way
            await it.need(1)
            assert await it.here("a") == []

    run(main)


def test_what_nobody_used_for_long_goes_without_need(tmp_path: Path) -> None:
    """But not the newest set, what is open, or needed by work of ours; nothing while the remote is in doubt."""

    async def main() -> None:
        async with evicting(tmp_path / "store", after_s=1.0) as it:
            names = ["new", "held", "open", "used", "free"]
            await it.write(*names)
            await it.made.publish()
            it.newest = {await it.made.walk("new")}
            fh = await it.made.fs.open(await it.made.walk("open"), os.O_RDONLY, CALLER)
            held = await it.image("held")
            assert held is not None
            it.held.add(held)
            it.remote.error = RemoteError("there is another bucket")
            await trio.sleep(2)
            assert await it.here(*names) == names
            it.remote.error = None
            with trio.fail_after(20):
                while await it.here("free"):
                    it.evictor.used(await it.made.walk("used"))
                    await trio.sleep(0.1)
            assert await it.here(*names) == ["new", "held", "open", "used"]
            await it.made.fs.release(fh)
            with trio.fail_after(20):
                while await it.here("open", "used"):
                    await trio.sleep(0.1)
            assert await it.here(*names) == ["new", "held"]

    run(main)


def test_what_is_open_only_to_be_recorded_makes_way(tmp_path: Path) -> None:
    """A save that comes right behind a restore finds the room of what was fetched, recorded or not."""

    async def main() -> None:
        async with evicting(tmp_path / "store") as it:
            await it.write("fetched")
            await it.made.publish()
            image = await it.image("fetched")
            assert image is not None
            opened = Image(image, it.made.store.images.open(image))
            it.recorder.idle(opened)
            await it.need(1)
            assert await it.here("fetched") == [] and not it.recorder.holds(image)
            with pytest.raises(OSError):
                os.fstat(opened.fd)

    run(main)


def test_what_somebody_needs_stays(tmp_path: Path) -> None:
    """What is not published as it is, in a cut, open, opened by others, held, or in a pack that no head reaches."""

    async def main() -> None:
        async with evicting(tmp_path / "store") as it:
            names = ["changed", "cut", "open", "opened", "held", "unreached", "free"]
            await it.write(*names)
            await it.made.publish()
            store, files = it.made.store, it.made.fs
            await it.made.chmod("changed", 0o600)
            image = await it.image("held")
            assert image is not None
            it.held.add(image)
            fh = await files.open(await it.made.walk("open"), os.O_RDONLY, CALLER)
            opened = await it.image("opened")
            assert opened is not None
            fd = os.open(store.images.file(opened), os.O_RDONLY)
            with store.catalog.transaction() as db:
                row = db.execute("SELECT ino, image, manifest FROM inode WHERE ino = ?", (await it.made.walk("cut"),))
                db.execute(
                    "INSERT INTO cut_entry (cut, dir, name, ino, image, manifest, stamp, changed, kept)"
                    " VALUES (99, 99, x'00', ?, ?, ?, 0, 0, 0)",
                    row.fetchone(),
                )
                db.execute(
                    "UPDATE pack SET head = NULL WHERE id IN (SELECT pack FROM packed JOIN location USING (chunk)"
                    " WHERE image = ?)",
                    (await it.image("unreached"),),
                )
            await it.need(100 * SIZE)
            assert await it.here(*names) == names[:-1]
            os.close(fd)
            await files.release(fh)
            await it.made.publish()
            await trio.sleep(0.6)  # it rests after it found nothing
            await it.need(100 * SIZE)
            assert await it.here(*names) == ["cut", "held"], "the others are published, and nobody has them open"

    run(main)


def test_nothing_makes_way_while_the_remote_is_in_doubt(tmp_path: Path) -> None:
    """And nobody waits for that a second time."""

    async def main() -> None:
        async with evicting(tmp_path / "store") as it:
            await it.write("a")
            await it.made.publish()
            it.remote.error = RemoteError("there is another bucket")
            await it.need(1)
            assert await it.here("a") == ["a"]
            it.remote.error = None
            it.room.lack(1)
            started = trio.current_time()
            await it.evictor.make_room()
            assert trio.current_time() - started < 0.5
            assert await it.here("a") == ["a"]

    run(main)


def test_a_kill_before_the_file_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are gone and the file is not: the next opening deletes it, and the file is one that is elsewhere."""
    path = tmp_path / "store"

    async def main() -> None:
        async with evicting(path) as it:
            await it.write("a", "b")
            await it.made.publish()
            monkeypatch.setattr(it.made.store.sync, "delete_later", lambda image: None)
            await it.need(1)
            assert await it.here("a", "b") == []

    run(main)
    store = Store.open(path)
    try:
        assert len(list(store.images.ids())) == 2, "as it was left"
        trio.run(store.sync.flush)
        assert not list(store.images.ids())
    finally:
        store.close()
    assert problems(path) == []


def test_a_disk_looks_as_free_as_it_can_become(tmp_path: Path) -> None:
    """Without a query for each look; what was evicted is free already, and the reserve never is."""

    async def main() -> None:
        async with evicting(tmp_path / "store") as it:
            await it.write("a", "b")
            await it.made.publish()
            disk = os.statvfs_result((4096, 4096, 1 << 20, 1 << 16, 1 << 16, 0, 0, 0, 0, 255))
            reserve = it.room.reserve_bytes() // 4096
            assert it.evictor.shown(disk).f_bavail == max(0, (1 << 16) - reserve)
            it.evictor._looked_at_s = float("-inf")
            with trio.fail_after(5):
                while it.evictor.shown(disk).f_bfree != (1 << 16) + 2 * SIZE // 4096:
                    await trio.sleep(0.01)
            await it.need(1)
            assert it.evictor.shown(disk).f_bfree == (1 << 16) + SIZE // 4096

    run(main)
