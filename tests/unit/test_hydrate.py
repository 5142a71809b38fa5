"""Hydrating: missing bytes come back, each once, checked, from wherever they are."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from ckptfs.config import Tuning
from ckptfs.encoding.canonical import object_id, seal_object
from ckptfs.encoding.codec import encode, encode_delta
from ckptfs.encoding.keys import manifest_key, pack_key
from ckptfs.encoding.manifest import Chunk, Content, Manifest, Placed, encode_manifest
from ckptfs.encoding.pack import PackBuilder
from ckptfs.errors import ContentUnavailable
from ckptfs.ids import ROOT_FILE_ID, ROOT_INODE, ChunkId, ImageId, digest
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.images import Image, Images
from ckptfs.local.room import Room
from ckptfs.reading import Reading
from ckptfs.replica.hydrate import Hydrator
from ckptfs.spans import SpanSet
from tests.support.memory import MemoryStore

PIECE = 1000
TUNING = Tuning(
    fetch_threads=3,
    fetch_bytes=4000,
    fetching_bytes=16000,
    fetch_gap_bytes=100,
    readahead_bytes=1 << 20,
    retry_first_s=0.01,
    retry_most_s=0.02,
)


class FixedRoom(Room):
    """Room as a test wants it; None is that of the real disk."""

    fixed: int | None = None
    image: Image | None = None
    """What is in it takes some of that."""

    def _look(self) -> tuple[int, int]:
        if self.fixed is None:
            return super()._look()
        taken = self.image.present.total if self.image and self.image.present is not None else 0
        free = self.fixed - taken - self._coming_bytes
        return free, free - 100 * PIECE


class Disk:
    """A store's catalog and images, and a remote with files in packs."""

    def __init__(self, path: Path, tuning: Tuning = TUNING, *, read_timeout_s: float = 2.0) -> None:
        self.catalog = Catalog(path / "catalog.db")
        self.contents = Contents(self.catalog)
        self.packs = Packs(self.catalog)
        self.images = Images(path / "images")
        self.remote = MemoryStore()
        self.full = False
        self.tried = 0
        """How often something was written to an image."""
        self.open: list[Image] = []
        self.saving = False
        self.room = FixedRoom(path, lambda: self.saving)
        self.hydrator = Hydrator(
            self.catalog,
            self.images,
            self.remote,
            tuning,
            self.room,
            read_timeout_s=read_timeout_s,
            write=self._write,
        )
        with self.catalog.transaction() as db:
            db.execute(
                "INSERT INTO inode (ino, file_id, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, changed)"
                " VALUES (?, ?, ?, 0, 0, 2, 0, 0, 0, 0)",
                (ROOT_INODE, ROOT_FILE_ID, 0o40755),
            )

    def _write(self, fd: int, data: bytes | bytearray, offset: int) -> int:
        self.tried += 1
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return os.pwrite(fd, data, offset)

    def publish(self, data: bytes, *, holes: tuple[tuple[int, int], ...] = (), chunks_per_pack: int = 1000) -> int:
        """A file on the remote, known here by its manifest's digest alone; returns the manifest row."""
        spans = SpanSet([(0, len(data))])
        for start, end in holes:
            spans.remove(start, end)
        pieces = [data[at : min(at + PIECE, end)] for start, end in spans for at in range(start, end, PIECE)]
        places: list[Placed] = []
        for first in range(0, len(pieces), chunks_per_pack):
            builder = PackBuilder()
            for raw in dict.fromkeys(pieces[first : first + chunks_per_pack]):
                codec, encoded = encode(raw, None)
                builder.add(ChunkId(digest(raw)), len(raw), codec, encoded)
            name, body, packed = builder.finish()
            self.remote.objects[pack_key(name)] = bytes(body)
            at = {each.id: each for each in packed}
            places += [
                Placed(name, at[c].offset, at[c].length, at[c].codec, at[c].base)
                for c in (ChunkId(digest(raw)) for raw in pieces[first : first + chunks_per_pack])
            ]
        chunks = tuple(Chunk(ChunkId(digest(raw)), len(raw), None) for raw in pieces)
        body = encode_manifest(Manifest(Content(len(data), holes, chunks), tuple(places)))
        name = object_id(body)
        self.remote.objects[manifest_key(name)] = seal_object(body)
        return self.contents.add_manifest(size=len(data), body=None, digest=name)

    def publish_delta(self, data: bytes, base: bytes, *, chain: bool = False) -> tuple[int, str, str]:
        """A file of one chunk, as its difference to *base*, which lies in another pack; with *chain* as a delta too.

        Gives the manifest row and the keys of the packs, that of the base last.
        """
        keys = []
        placed: list[Placed] = []
        for raw, against in ((base, bytes(len(base)) if chain else None), (data, base)):
            builder = PackBuilder()
            codec, encoded = encode(raw, "float32") if against is None else encode_delta(raw, against, "float32")
            builder.add(ChunkId(digest(raw)), len(raw), codec, encoded, ChunkId(digest(base)) if raw is data else None)
            name, body, (row,) = builder.finish()
            keys.append(pack_key(name))
            self.remote.objects[keys[-1]] = bytes(body)
            placed.append(Placed(name, row.offset, row.length, row.codec, row.base))
        content = Content(len(data), (), (Chunk(ChunkId(digest(data)), len(data), "float32"),))
        body = encode_manifest(Manifest(content, (placed[1],), {ChunkId(digest(base)): placed[0]}))
        name = object_id(body)
        self.remote.objects[manifest_key(name)] = seal_object(body)
        return self.contents.add_manifest(size=len(data), body=None, digest=name), keys[1], keys[0]

    async def sparse(self, manifest: int) -> tuple[Image, Content]:
        """An image of the file with none of its bytes."""
        content = await self.hydrator.content(manifest)
        image = self.images.create()
        os.ftruncate(image.fd, content.size)
        image.present = SpanSet(content.holes)
        self.contents.add_image(image.id, whole=False)
        self.open.append(image)
        return image, content

    def gets(self) -> list[tuple[str, int]]:
        return [(key, length) for key, length in self.remote.gets if key.startswith("packs/")]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.hydrator.run)
            yield
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        for image in self.open:
            os.close(image.fd)
        self.catalog.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.close()


def run(disk: Disk, test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            async with disk.running():
                await test()

    trio.run(main)


def noise(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def test_a_part_fetches_only_the_chunks_it_touches(disk: Disk) -> None:
    """A read of a few bytes asks the remote for the chunks around them, and a second read for nothing."""
    data = noise(50 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        assert await disk.hydrator.read(image, content, 20_500, 21_500) == data[20_500:21_500]
        assert len(disk.gets()) == 1 and disk.gets()[0][1] <= 2 * PIECE + 100
        assert await disk.hydrator.read(image, content, 20_000, 22_000) == data[20_000:22_000]
        assert len(disk.gets()) == 1
        assert not image.whole

    run(disk, test)


def test_neighbours_share_a_request_and_the_whole_file_comes_back(disk: Disk) -> None:
    """Many neighbouring chunks are fetched with few range requests; holes are not; then the image is whole."""
    data = noise(20 * PIECE) + bytes(5000) + noise(10 * PIECE, 2)
    row = disk.publish(data, holes=((20 * PIECE, 20 * PIECE + 5000),))

    async def test() -> None:
        image, content = await disk.sparse(row)
        await disk.hydrator.ensure(image, content, 0, content.size)
        assert os.pread(image.fd, len(data), 0) == data
        assert len(disk.gets()) <= 12
        await disk.hydrator.record(image)
        assert image.whole and disk.contents.image_is_whole(image.id)
        assert len(disk.contents.locations_in(image.id)) == 30

    run(disk, test)


def test_what_was_written_meanwhile_is_not_recorded(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that is being recorded when it is un-sealed through another opening: its bytes are others by then."""
    row = disk.publish(noise(3 * PIECE))
    flushing, written = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        flushing.set()
        assert written.wait(30)

    async def test() -> None:
        image, content = await disk.sparse(row)
        await disk.hydrator.ensure(image, content, 0, content.size)
        monkeypatch.setattr(os, "fdatasync", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.hydrator.record, image)
            await trio.to_thread.run_sync(flushing.wait, 30)
            disk.contents.drop_locations(image.id)
            disk.contents.set_image_whole(image.id)
            os.pwrite(image.fd, b"new", 0)
            written.set()
        assert disk.contents.locations_in(image.id) == []

    run(disk, test)


def test_what_a_manifest_says_of_packs_is_remembered(disk: Disk) -> None:
    """Fetching another writer's manifest tells where its chunks lie, so that they are not uploaded again."""
    row = disk.publish(noise(3 * PIECE))

    async def test() -> None:
        content = await disk.hydrator.content(row)
        assert disk.packs.known(chunk.id for chunk in content.chunks) == {chunk.id for chunk in content.chunks}
        assert disk.contents.manifest(row).body is not None
        assert await disk.hydrator.content(row) is content

    run(disk, test)


def test_waiters_share_a_fetch_that_survives_one_of_them(disk: Disk) -> None:
    """Two readers of one chunk cause one request, and the second gets it although the first was cancelled."""
    data = noise(2 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        before = len(disk.gets())
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def first() -> None:
                with scope:
                    await disk.hydrator.ensure(image, content, 0, 100)

            async def second() -> None:
                assert await disk.hydrator.read(image, content, 50, 150) == data[50:150]

            nursery.start_soon(first)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            nursery.start_soon(second)
            scope.cancel()
        assert len(disk.gets()) == before + 1

    run(disk, test)


def test_another_image_gives_its_bytes(disk: Disk) -> None:
    """A chunk that another image of this disk holds is copied from there, and the remote is not asked."""
    data = noise(4 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        await disk.hydrator.ensure(image, content, 0, content.size)
        await disk.hydrator.record(image)
        gets = len(disk.gets())
        other, content = await disk.sparse(row)
        assert await disk.hydrator.read(other, content, 0, content.size) == data
        assert len(disk.gets()) == gets

    run(disk, test)


def test_a_damaged_local_copy_is_forgotten(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """A local copy whose bytes changed is not believed: its row goes and the remote is asked."""
    data = noise(PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        await disk.hydrator.ensure(image, content, 0, content.size)
        await disk.hydrator.record(image)
        os.pwrite(image.fd, b"damage", 10)
        other, content = await disk.sparse(row)
        assert await disk.hydrator.read(other, content, 0, content.size) == data
        assert disk.contents.locations(content.chunks[0].id) == []

    with caplog.at_level(logging.ERROR):
        run(disk, test)
    assert "is not what was recorded" in caplog.text


def test_a_copy_that_moves_is_followed(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image that has a chunk is written anew while we are about to read it; its bytes are in another by then."""
    data = noise(PIECE)
    row = disk.publish(data)
    images = [disk.images.create() for _ in range(2)]
    disk.open += images
    for image, content in zip(images, (noise(PIECE, 9), data), strict=True):
        os.pwrite(image.fd, content, 0)
        disk.contents.add_image(image.id, whole=True)
    disk.contents.add_locations(images[0].id, [(digest(data), 0, PIECE)])
    opened = disk.images.open

    def opens(image: ImageId) -> int:
        if image == images[0].id:
            trio.from_thread.run_sync(disk.contents.add_locations, images[1].id, [(digest(data), 0, PIECE)])
        return opened(image)

    monkeypatch.setattr(disk.images, "open", opens)

    async def test() -> None:
        image, content = await disk.sparse(row)
        assert await disk.hydrator.read(image, content, 0, PIECE) == data
        assert disk.gets() == []

    run(disk, test)


def test_damage_on_the_remote_costs_the_chunk_alone(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged chunk is an error that names the pack, at once; its neighbours are read."""
    data = noise(3 * PIECE)
    row = disk.publish(data)
    key = next(key for key in disk.remote.objects if key.startswith("packs/"))
    body = bytearray(disk.remote.objects[key])
    body[PIECE + 100] ^= 1
    disk.remote.objects[key] = bytes(body)

    async def test() -> None:
        image, content = await disk.sparse(row)
        with pytest.raises(ContentUnavailable):
            await disk.hydrator.ensure(image, content, 0, content.size)
        assert await disk.hydrator.read(image, content, 0, PIECE) == data[:PIECE]
        assert await disk.hydrator.read(image, content, 2 * PIECE, 3 * PIECE) == data[2 * PIECE :]
        started = trio.current_time()
        with pytest.raises(ContentUnavailable):
            await disk.hydrator.read(image, content, PIECE, PIECE + 1)
        assert trio.current_time() - started < 1.0

    with caplog.at_level(logging.ERROR):
        run(disk, test)
    assert key in caplog.text


def test_bytes_that_changed_on_their_way_are_asked_for_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: of a pack only what is damaged, and manifests too."""
    data = noise(3 * PIECE)
    row = disk.publish(data)
    get, seen = disk.remote.get, set[str]()

    def flip_at_first(key: str, start: int = 0, end: int | None = None) -> bytes:
        body = bytearray(get(key, start, end))
        if key not in seen:
            seen.add(key)
            body[len(body) // 2] ^= 1
        return bytes(body)

    monkeypatch.setattr(disk.remote, "get", flip_at_first)

    async def test() -> None:
        image, content = await disk.sparse(row)
        await disk.hydrator.ensure(image, content, 0, content.size)
        assert os.pread(image.fd, content.size, 0) == data

    run(disk, test)
    assert [length for key, length in disk.remote.gets if key.startswith("packs/")] == [3 * PIECE, PIECE]
    assert len([key for key, _ in disk.remote.gets if key.startswith("manifests/")]) == 2


def test_another_pack_makes_up_for_a_missing_one(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """When the pack that is known for a chunk is gone, the place in the file's own manifest is tried."""
    data = noise(2 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        with disk.catalog.transaction() as db:
            db.execute("INSERT INTO pack (id, name, state, head) VALUES (99, ?, 1, 0)", (digest(b"gone"),))
            db.execute("UPDATE packed SET pack = 99")
        assert await disk.hydrator.read(image, content, 0, content.size) == data

    with caplog.at_level(logging.ERROR):
        run(disk, test)
    assert pack_key(digest(b"gone")) in caplog.text  # type: ignore[arg-type]


def test_a_delta_comes_with_its_base(disk: Disk) -> None:
    """In two requests at once, without anybody's knowing of the base before; from this disk when it is there."""
    base = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    data = (base * np.float32(1.001)).tobytes()
    row, key, base_key = disk.publish_delta(data, base.tobytes())

    async def test() -> None:
        image, content = await disk.sparse(row)
        await disk.hydrator.ensure(image, content, 0, content.size)
        assert os.pread(image.fd, len(data), 0) == data
        assert {each for each, _ in disk.gets()} == {key, base_key} and len(disk.gets()) == 2
        donor = disk.images.create()
        disk.open.append(donor)
        os.pwrite(donor.fd, base.tobytes(), 0)
        disk.contents.add_image(donor.id, whole=True)
        disk.contents.add_locations(donor.id, [(digest(base.tobytes()), 0, base.nbytes)])
        again, _ = await disk.sparse(row)
        assert await disk.hydrator.read(again, content, 0, content.size) == data
        assert [each for each, _ in disk.gets()[2:]] == [key]

    run(disk, test)


@pytest.mark.parametrize("fault", ["base gone", "base damaged", "delta damaged", "chain", "circle"])
def test_a_delta_without_its_base_is_an_error(disk: Disk, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    """At once, and never other bytes; the pack whose damage it is is named, and no other."""
    base = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    data = (base * np.float32(1.001)).tobytes()
    row, key, base_key = disk.publish_delta(data, base.tobytes(), chain=fault == "chain")
    if fault == "base gone":
        del disk.remote.objects[base_key]
    elif fault.endswith("damaged"):
        which = base_key if fault == "base damaged" else key
        body = bytearray(disk.remote.objects[which])
        body[200] ^= 1
        disk.remote.objects[which] = bytes(body)

    async def test() -> None:
        image, content = await disk.sparse(row)
        if fault == "circle":  # as another writer's index may say
            with disk.catalog.transaction() as db:
                db.execute("UPDATE packed SET base = ? WHERE base IS NULL", (digest(data),))
        started = trio.current_time()
        with pytest.raises(ContentUnavailable) as raised:
            await disk.hydrator.read(image, content, 0, content.size)
        assert trio.current_time() - started < 1.0
        blamed = {"delta damaged": key, "circle": None}.get(fault, base_key)
        assert [pack_key(each) for each in disk.packs.doubted()] == ([] if blamed is None else [blamed])
        assert (blamed or "told as differences to") in str(raised.value)

    with caplog.at_level(logging.ERROR):
        run(disk, test)
    if fault == "delta damaged":
        assert key in caplog.text and base_key not in caplog.text
    elif fault != "circle":
        assert base_key in caplog.text and key not in caplog.text


def test_a_pack_in_doubt(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """One that is gone is logged once, nothing goes from this disk for its sake, and why its bytes do not come is not
    forgotten when others do."""
    data, other = noise(4 * PIECE), noise(PIECE, 7)
    row = disk.publish(data)
    lost = next(key for key in disk.remote.objects if key.startswith("packs/"))
    other_row = disk.publish(other)
    chunks = {ChunkId(digest(data[at : at + PIECE])) for at in range(0, len(data), PIECE)}
    of_other = {ChunkId(digest(other))}

    async def test() -> None:
        image, content = await disk.sparse(row)
        another, of_another = await disk.sparse(other_row)
        await disk.hydrator.ensure(image, content, 0, PIECE)
        assert disk.packs.reached(chunks | of_other) == chunks | of_other
        del disk.remote.objects[lost]
        for at in range(PIECE, len(data), PIECE):
            with pytest.raises(ContentUnavailable):
                await disk.hydrator.read(image, content, at, at + PIECE)
        assert await disk.hydrator.read(another, of_another, 0, PIECE) == other
        assert lost in (disk.hydrator.last_error or "")
        told = disk.hydrator.fetcher.doubts.told()
        assert [(each["object"], each["here"]) for each in told] == [(lost, False)]
        await disk.hydrator.record(image)
        assert disk.hydrator.fetcher.doubts.told()[0]["here"]
        assert disk.packs.reached(chunks | of_other) == of_other and disk.packs.doubtful(chunks) == chunks
        (name,) = disk.packs.doubted()
        disk.packs.verified(name)
        assert disk.packs.reached(chunks) == chunks and disk.hydrator.fetcher.doubts.told() == []

    with caplog.at_level(logging.WARNING):
        run(disk, test)
    assert [record.levelname for record in caplog.records if lost in record.message] == ["ERROR"]


def test_a_reader_waits_while_fetching_begins_anew(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way when fetching failed, and what is asked for before it goes on, is delivered after all."""
    data = noise(2 * PIECE)
    row = disk.publish(data)
    get, release, held = disk.remote.get, threading.Event(), threading.Event()

    def late(key: str, start: int = 0, end: int | None = None) -> bytes:
        if key.startswith("packs/") and not release.is_set():
            held.set()
            release.wait(10)
        return get(key, start, end)

    monkeypatch.setattr(disk.remote, "get", late)

    async def main() -> None:
        found: list[bytes] = []

        async def read(image: Image, content: Content, at: int) -> None:
            found.append(await disk.hydrator.read(image, content, at, at + PIECE))

        with trio.fail_after(10):
            async with trio.open_nursery() as readers:
                async with disk.running():
                    image, content = await disk.sparse(row)
                    readers.start_soon(read, image, content, 0)
                    await trio.to_thread.run_sync(held.wait)
                readers.start_soon(read, image, content, PIECE)
                await trio.testing.wait_all_tasks_blocked()
                assert found == []
                release.set()
                async with disk.running():
                    while len(found) < 2:
                        await trio.sleep(0.01)
        assert sorted(found) == sorted([data[:PIECE], data[PIECE:]])

    trio.run(main)


def test_requests_that_never_return_do_not_stop_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a NAS that hangs: their readers are told in time, their places go to others, and they do not pile up."""
    disk = Disk(tmp_path, read_timeout_s=0.3)
    rows = [disk.publish(noise(PIECE, seed)) for seed in range(20)]
    stuck = sorted(key for key in disk.remote.objects if key.startswith("packs/"))
    fine = disk.publish(noise(PIECE, 99))
    get, release, held = disk.remote.get, threading.Event(), threading.Semaphore(0)

    def hang(key: str, start: int = 0, end: int | None = None) -> bytes:
        if key in stuck and not release.is_set():
            held.release()
            release.wait(20)
        return get(key, start, end)

    monkeypatch.setattr(disk.remote, "get", hang)

    async def read(row: int) -> bytes:
        image, content = await disk.sparse(row)
        return await disk.hydrator.read(image, content, 0, PIECE)

    async def fails(row: int) -> None:
        began = trio.current_time()
        with pytest.raises(ContentUnavailable):
            await read(row)
        assert trio.current_time() - began < 2.0

    async def test() -> None:
        try:
            async with trio.open_nursery() as nursery:
                for row in rows[:TUNING.fetch_threads]:
                    nursery.start_soon(fails, row)
            await trio.sleep(1.0)  # the slots are free again
            assert await read(fine) == noise(PIECE, 99)
            for _ in range(3):
                async with trio.open_nursery() as nursery:
                    for row in rows:
                        nursery.start_soon(fails, row)
            threads = sum(held.acquire(blocking=False) for _ in range(100))
            assert threads <= 4 * TUNING.fetch_threads
        finally:
            release.set()
        with trio.fail_after(5):
            while True:
                try:
                    assert await read(rows[0]) == noise(PIECE, 0)
                    return
                except ContentUnavailable:
                    await trio.sleep(0.1)

    run(disk, test)
    disk.close()


def test_a_missing_object_is_told_at_once(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """A pack or manifest that is gone is an error without waiting for the read timeout."""
    row, other = disk.publish(noise(PIECE)), disk.publish(noise(PIECE, 7))
    for key in [key for key in disk.remote.objects if key.startswith("packs/")]:
        del disk.remote.objects[key]
    del disk.remote.objects[manifest_key(disk.contents.manifest(other).digest)]  # type: ignore[arg-type]

    async def test() -> None:
        image, content = await disk.sparse(row)
        started = trio.current_time()
        with pytest.raises(ContentUnavailable):
            await disk.hydrator.read(image, content, 0, 1)
        with pytest.raises(ContentUnavailable):
            await disk.hydrator.content(other)
        assert trio.current_time() - started < 1.0

    with caplog.at_level(logging.ERROR):
        run(disk, test)


def test_an_outage_is_waited_out_up_to_the_timeout(tmp_path: Path) -> None:
    """While the remote is down a read waits; when it comes back in time the read succeeds, else it fails in time."""
    disk = Disk(tmp_path, read_timeout_s=0.6)
    data = noise(PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.remote.failing, disk.remote.reason = True, "the credentials are refused"
        started = trio.current_time()
        with pytest.raises(ContentUnavailable, match="credentials are refused"):
            await disk.hydrator.read(image, content, 0, PIECE)
        assert 0.3 < trio.current_time() - started < 5
        async with trio.open_nursery() as nursery:

            async def heal() -> None:
                await trio.sleep(0.1)
                disk.remote.failing = False

            nursery.start_soon(heal)
            assert await disk.hydrator.read(image, content, 0, PIECE) == data

    run(disk, test)
    disk.close()


def test_a_disk_that_takes_nothing_still_serves_reads(disk: Disk) -> None:
    """When the image cannot be written, `read` gives the bytes anyway and fetches a chunk once for many reads.

    The disk is not tried for each of them.
    """
    data = noise(4 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.full = True
        with pytest.raises(OSError, match="no space"):
            await disk.hydrator.ensure(image, content, 0, 1)
        for start in range(0, 4 * PIECE, 250):
            assert await disk.hydrator.read(image, content, start, start + 250) == data[start : start + 250]
        assert image.unrecorded == [] and image.present is not None and not image.present.total
        assert len(disk.gets()) <= 5 and disk.tried == 1
        disk.full = False
        await disk.hydrator.ensure(image, content, 0, content.size)
        await disk.hydrator.record(image)
        assert image.whole

    run(disk, test)


def read_to(position: int) -> Reading:
    """Who read a file from its start."""
    reading = Reading()
    reading.was_read(0, position, cold=True)
    return reading


def test_reading_ahead_fetches_before_it_is_asked(disk: Disk) -> None:
    """A sequential reader finds the next bytes there."""
    data = noise(30 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.hydrator.read_ahead(image, content, 15 * PIECE, read_to(15 * PIECE))
        with trio.fail_after(5):
            while image.present is not None and not image.present.covers(15 * PIECE, content.size):
                await trio.sleep(0.005)
        gets = len(disk.gets())
        assert await disk.hydrator.read(image, content, 15 * PIECE, content.size) == data[15 * PIECE :]
        assert len(disk.gets()) == gets

    run(disk, test)


def test_closing_the_image_does_not_misdirect_a_fetch(disk: Disk) -> None:
    """A fetch that goes on after the image was closed writes to that image, not to what got its descriptor."""
    data = noise(20 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.hydrator.read_ahead(image, content, 10 * PIECE, read_to(10 * PIECE))
        disk.open.remove(image)
        os.close(image.fd)
        other = disk.images.create()
        disk.open.append(other)
        with trio.fail_after(5):
            while image.present is not None and not image.present.covers(10 * PIECE, content.size):
                await trio.sleep(0.005)
        assert os.fstat(other.fd).st_size == 0
        assert disk.images.path(image.id).read_bytes()[10 * PIECE :] == data[10 * PIECE :]

    run(disk, test)


def test_what_does_not_fit_is_served_from_memory(disk: Disk) -> None:
    """Reading fills the disk up to its room, and goes on past it: every chunk is fetched about once."""
    data = noise(60 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.room.fixed, disk.room.image = 20 * PIECE, image
        for start in range(0, len(data), 250):
            disk.hydrator.read_ahead(image, content, start, read_to(start))
            assert await disk.hydrator.read(image, content, start, start + 250) == data[start : start + 250]
        assert image.present is not None and 15 * PIECE <= image.present.total <= 20 * PIECE
        assert sum(length for _, length in disk.gets()) <= 1.1 * len(data)
        disk.room.fixed = 100 * PIECE
        await disk.hydrator.ensure(image, content, 0, len(data))
        await disk.hydrator.record(image)
        assert image.whole and os.pread(image.fd, len(data), 0) == data

    run(disk, test)


def test_readers_share_what_comes_into_memory(disk: Disk) -> None:
    """Eight readers at once, without any room: each chunk is fetched once."""
    data = noise(20 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.room.fixed = 0

        async def read() -> None:
            for start in range(0, len(data), 500):
                assert await disk.hydrator.read(image, content, start, start + 500) == data[start : start + 500]

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(read)
        assert len(disk.gets()) == 20

    run(disk, test)


def test_what_must_be_stored_is_refused_before_it_is_fetched(disk: Disk) -> None:
    """`ensure` of more than fits is ENOSPC at once; what a reader has in memory is fetched again when it fits."""
    data = noise(10 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.room.fixed = 9 * PIECE
        with pytest.raises(OSError) as refused:
            await disk.hydrator.ensure(image, content, 0, len(data))
        assert refused.value.errno == errno.ENOSPC and disk.gets() == []
        disk.room.fixed = 0
        assert await disk.hydrator.read(image, content, 0, len(data)) == data
        disk.room.fixed = 10 * PIECE
        await disk.hydrator.ensure(image, content, 0, len(data))
        assert os.pread(image.fd, len(data), 0) == data

    run(disk, test)


def test_while_something_is_saved_the_disk_is_left_to_it(disk: Disk) -> None:
    """Reads are served from memory; a writer's own file comes to the disk; who fetches for later waits for the end."""
    data = noise(10 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.room.fixed, disk.saving = 50 * PIECE, True
        assert await disk.hydrator.read(image, content, 0, 5 * PIECE) == data[: 5 * PIECE]
        assert image.present is not None and image.present.total == 0
        await disk.hydrator.ensure(image, content, 0, PIECE)
        assert image.present.total == PIECE
        with trio.move_on_after(0.05) as waiting:
            await disk.hydrator.room_for(image, content, 0, 2 * PIECE)
        assert waiting.cancelled_caught
        disk.saving = False
        with trio.fail_after(5):
            await disk.hydrator.room_for(image, content, 0, 2 * PIECE)
        disk.room.fixed = 8 * PIECE
        with pytest.raises(OSError, match="No space left"):
            await disk.hydrator.room_for(image, content, 0, len(data))

    run(disk, test)


def test_what_is_on_its_way_is_not_asked_room_for_again(disk: Disk) -> None:
    """A file that just fits is fetched part by part, each begun before it is waited for."""
    data = noise(10 * PIECE)
    row = disk.publish(data)

    async def test() -> None:
        image, content = await disk.sparse(row)
        disk.room.fixed, disk.room.image = 10 * PIECE, image
        for start in (0, 5 * PIECE):
            await disk.hydrator.room_for(image, content, start, len(data))
            disk.hydrator.begin(image, content, start + 5 * PIECE, len(data))
            disk.hydrator.begin(image, content, start, start + 5 * PIECE)
            await disk.hydrator.room_for(image, content, start, len(data))
            await disk.hydrator.ensure(image, content, start, start + 5 * PIECE)
        assert os.pread(image.fd, len(data), 0) == data

    run(disk, test)


def test_an_image_that_could_not_be_made_is_read(disk: Disk) -> None:
    """Its bytes come from memory whatever room there is by now, and nothing is written into it."""
    data = noise(5 * PIECE) + bytes(3000) + noise(PIECE, 2)
    row = disk.publish(data, holes=((5 * PIECE, 5 * PIECE + 3000),))

    async def test() -> None:
        content = await disk.hydrator.content(row)
        image = disk.images.unstored(content.size)
        image.present = SpanSet(content.holes)
        disk.open.append(image)
        assert await disk.hydrator.read(image, content, 0, len(data)) == data
        with pytest.raises(OSError, match="No space left"):
            await disk.hydrator.ensure(image, content, 0, 1)
        assert os.fstat(image.fd).st_blocks == 0

    run(disk, test)
