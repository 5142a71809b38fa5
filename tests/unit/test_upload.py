"""Uploading: which chunks share a pack, what is read and checked, and what a failure leaves."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio

from ckptfs.encoding.codec import decode
from ckptfs.encoding.keys import pack_key
from ckptfs.encoding.pack import read_index
from ckptfs.errors import RemoteError
from ckptfs.ids import ChunkId, digest
from ckptfs.local.catalog.keyframes import Keyframes
from ckptfs.remote.directory import DirectoryStore
from ckptfs.replica.bases import Bases
from ckptfs.replica.upload import DamagedContent, Needed, PackPlan, UploadCounters, Uploader
from tests.support.faulty import FaultyStore, unavailable
from tests.support.publishing import Machine, run, tuned


def chunk(number: int, length: int) -> Needed:
    return Needed(ChunkId(digest(b"%d" % number)), length, None, 1, 0)


def sizes(packs: list[list[Needed]]) -> list[list[int]]:
    return [[each.length for each in pack] for pack in packs]


def test_large_file_has_packs_of_its_own() -> None:
    """A file with more than a pack of new chunks fills packs of its own; its tail shares with small files."""
    plan = PackPlan(100)
    assert sizes(plan.add([chunk(0, 30)])) == []
    assert sizes(plan.add([chunk(i, 40) for i in range(1, 6)])) == [[40, 40], [40, 40]]
    assert sizes(plan.add([chunk(6, 20)])) == []
    assert sizes(plan.add([chunk(7, 20)])) == [[30, 40, 20]]
    assert sizes(plan.finish()) == [[20]] and plan.finish() == []


def test_small_files_share_packs_whole() -> None:
    """Small files share packs in order, and none is split between two."""
    plan = PackPlan(100)
    packs = [pack for i in range(5) for pack in plan.add([chunk(2 * i, 20), chunk(2 * i + 1, 20)])]
    assert sizes(packs + plan.finish()) == [[20] * 4, [20] * 4, [20] * 2]


def test_chunk_larger_than_a_pack() -> None:
    """A chunk that fills a pack alone gets one."""
    plan = PackPlan(100)
    assert sizes(plan.add([chunk(1, 150), chunk(2, 100)])) == [[150], [100]]
    assert plan.finish() == []


class Uploading(Machine):
    def __init__(self, path: Path, remote: FaultyStore, **changes: int) -> None:
        super().__init__(path, None, tuned(**changes))
        self.faulty = remote
        self.counters = UploadCounters()
        self.uploader = Uploader(
            contents=self.store.contents,
            cuts=self.cuts,
            packs=self.packs,
            bases=Bases(self.store.contents, self.packs, Keyframes(self.store.catalog)),
            images=self.store.images,
            remote=remote,
            tuning=self.store.settings.tuning,
            counters=self.counters,
        )

    async def sealed_cut(self) -> int:
        while not self.sealer.idle:
            await trio.sleep(0.01)
        self.settler.cut_now()
        return self.cuts.pending().id

    async def upload(self, cut: int) -> None:
        from ckptfs.replica.cuttrees import files_in_order

        await self.uploader.upload(files_in_order(self.cuts, cut), 0)


def uploading(path: Path, remote: FaultyStore, test, **changes: int) -> None:
    async def body() -> None:
        here = Uploading(path, remote, **changes)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.store.sync.run, 3600.0)
                nursery.start_soon(here.sealer.run)
                await test(here)
                nursery.cancel_scope.cancel()
        finally:
            here.close()

    run(body)


@pytest.fixture
def remote(tmp_path: Path) -> FaultyStore:
    return FaultyStore(DirectoryStore(str(tmp_path / "remote")))


def all_chunks(remote: FaultyStore) -> dict[ChunkId, bytes]:
    """Every chunk of every pack, decoded; each is checked against its name, and none may be there twice."""
    found: dict[ChunkId, bytes] = {}
    for each in remote.list("packs/").objects:
        data = remote.get(each.key)
        for packed in read_index(data, len(data)):
            raw = bytes(decode(packed.codec, data[packed.offset : packed.offset + packed.length], packed.raw_length))
            assert digest(raw) == packed.id and packed.id not in found
            found[packed.id] = raw
    return found


def test_every_new_chunk_once(tmp_path: Path, remote: FaultyStore) -> None:
    """Each distinct chunk is sent once, whatever files share it, and what is known is not sent again."""

    async def test(here: Uploading) -> None:
        data = random.Random(1).randbytes(20000)
        await here.write("a", data)
        await here.write("b", data)
        await here.write("c", data[:8192] + b"other" * 100)
        cut = await here.sealed_cut()
        await here.upload(cut)
        found = all_chunks(remote)
        assert sum(map(len, found.values())) == here.counters.raw_bytes < 25000
        packs = here.counters.packs
        await here.upload(cut)
        assert here.counters.packs == packs
        assert len(here.packs.unnamed()) == packs and here.packs.known(found) == set(found)

    uploading(tmp_path / "s", remote, test)


def test_same_tree_makes_same_packs(tmp_path: Path, remote: FaultyStore) -> None:
    """Two machines that upload the same files, in whatever order they wrote them, make the same packs."""
    numbers = random.Random(2)
    files = {f"f{i:02}": numbers.randbytes(numbers.choice([10, 500, 3000, 15000])) for i in range(30)}

    def test_in(order: list[str]):
        async def test(here: Uploading) -> None:
            for name in order:
                await here.write(name, files[name])
            await here.upload(await here.sealed_cut())

        return test

    uploading(tmp_path / "one", remote, test_in(sorted(files)))
    count = remote.requests["put", "packs"]
    uploading(tmp_path / "two", remote, test_in(sorted(files, reverse=True)))
    assert remote.requests["put", "packs"] == count > 5


def test_failure_keeps_what_was_acknowledged(tmp_path: Path, remote: FaultyStore) -> None:
    """After a failure in the middle only what was not acknowledged is sent, and nothing unsent has a row."""

    async def test(here: Uploading) -> None:
        data = random.Random(3).randbytes(60000)
        await here.write("a", data)
        cut = await here.sealed_cut()
        remote.fault = lambda operation, key: (
            unavailable(key) if operation == "put" and remote.requests["put", "packs"] >= 5 else None
        )
        with pytest.raises(RemoteError):
            await here.upload(cut)
        first = set(remote.put_keys)
        assert {pack_key(name) for name in here.packs.unnamed()} == first and len(first) >= 5
        remote.fault = lambda operation, key: None
        await here.upload(cut)
        assert len(remote.put_keys) == len(set(remote.put_keys)) > len(first)
        assert b"".join(all_chunks(remote)[each.id] for each in (await content(here, cut)).chunks) == data

    uploading(tmp_path / "s", remote, test)


async def content(here: Uploading, cut: int):
    ((_, _, file),) = here.cuts.files(cut, 1, b"")
    return await here.uploader.content(file.manifest)


def test_pack_that_is_there_already(tmp_path: Path, remote: FaultyStore) -> None:
    """A put whose answer was lost counts when the pack turns out to be there; a shorter object does not."""

    async def test(here: Uploading) -> None:
        await here.write("a", random.Random(4).randbytes(3000))
        cut = await here.sealed_cut()
        remote.after = lambda operation, key: unavailable(key) if operation == "put" else None
        with pytest.raises(RemoteError):
            await here.upload(cut)
        assert here.packs.unnamed() == []
        remote.after = lambda operation, key: None
        await here.upload(cut)
        assert len(here.packs.unnamed()) == 1
        (name,) = here.packs.unnamed()
        here.packs.forget(name)
        path = tmp_path / "remote" / pack_key(name)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(RemoteError, match="damaged"):
            await here.upload(cut)
        assert here.packs.unnamed() == []

    uploading(tmp_path / "s", remote, test)


def test_changed_bytes_are_refused(tmp_path: Path, remote: FaultyStore) -> None:
    """Bytes that changed behind our back are not packed; another image with the right ones serves instead."""

    async def test(here: Uploading) -> None:
        data = random.Random(5).randbytes(3000)
        await here.write("a", data)
        cut = await here.sealed_cut()
        ((_, _, file),) = here.cuts.files(cut, 1, b"")
        path = here.store.images.path(file.image)
        path.write_bytes(data[:100] + b"!" + data[101:])
        with pytest.raises(DamagedContent) as raised:
            await here.upload(cut)
        assert raised.value.manifests == {file.manifest} and here.packs.unnamed() == []
        await here.write("copy", data)
        while not here.sealer.idle:
            await trio.sleep(0.01)
        await here.upload(cut)
        assert b"".join(all_chunks(remote).values()) == data

    uploading(tmp_path / "s", remote, test)


def test_memory_and_descriptors_stay_bounded(tmp_path: Path, remote: FaultyStore) -> None:
    """However many small files share a pack, only few of their images are open at once."""

    async def test(here: Uploading) -> None:
        for i in range(300):
            await here.write(f"f{i:03}", b"%d" % i)
        cut = await here.sealed_cut()
        most = 0

        def look(operation: str, key: str) -> None:
            nonlocal most
            most = max(most, len(os.listdir("/proc/self/fd")))

        before = len(os.listdir("/proc/self/fd"))
        remote.fault = look
        await here.upload(cut)
        assert most < before + 80
        assert len(all_chunks(remote)) == 300 and here.counters.packs == 1

    uploading(tmp_path / "s", remote, test)
