"""Getting chunks' raw bytes into an image: from other images of this disk, else from packs on the remote.

Every chunk's digest is checked before its bytes go anywhere (invariant 6). Damage costs the one chunk: a local copy
that differs is forgotten and the remote asked; a pack that lacks it, or differs twice, makes way for one that has it.
What a delta is against comes from this disk too where it is here, else in the same turn as the delta.

Who calls: the event loop's thread. Range requests run in abandonable threads with the store's retries; what touches the
image's descriptor runs in threads that are always waited for, so that the caller may close it afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from ckptfs.config import Tuning
from ckptfs.encoding.codec import decode
from ckptfs.encoding.keys import pack_key
from ckptfs.encoding.manifest import Chunk, Content, Placed
from ckptfs.errors import ContentUnavailable, FormatError, RemoteError
from ckptfs.ids import ChunkId, ImageId, ObjectId, digest
from ckptfs.local.catalog.contents import Contents, Location
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.images import Images, begin_writing_out_of
from ckptfs.remote.base import ObjectStore
from ckptfs.replica.manifests import Manifests
from ckptfs.scratch import Scratch

log = logging.getLogger(__name__)

_COPIES_AT_ONCE = 2

_scratch = Scratch()
"""Each thread decodes one chunk after another into the same memory."""


@dataclass(frozen=True)
class Wanted:
    """A chunk that is to be written at *offset* of an image."""

    chunk: Chunk
    offset: int


@dataclass(frozen=True)
class Outcome:
    """What became of a wanted chunk: written (error None), read but not written (OSError, with `raw`), or not had."""

    wanted: Wanted
    error: Exception | None
    raw: bytes | bytearray | None = None


Deliver = Callable[[Outcome], None]


class ChunkFetcher:
    """Fetches chunks; `bytes_fetched` counts what was asked of the remote."""

    def __init__(
        self,
        contents: Contents,
        packs: Packs,
        images: Images,
        manifests: Manifests,
        remote: ObjectStore,
        tuning: Tuning,
        limiter: trio.CapacityLimiter,
        write: Callable[[int, memoryview, int], int],
    ) -> None:
        self._contents = contents
        self._packs = packs
        self._images = images
        self._manifests = manifests
        self._remote = remote
        self._tuning = tuning
        self._limiter = limiter
        self._copies = trio.CapacityLimiter(_COPIES_AT_ONCE)
        self._write = write
        self.bytes_fetched = 0
        self.requests = 0

    async def fetch(
        self, content: Content, wanted: Sequence[Wanted], image: ImageId | None, fd: int | None, deliver: Deliver
    ) -> None:
        """Get *wanted* chunks of *content* and write them to *fd* (or not at all); *deliver* gets one outcome for each.

        Copies are looked for in every image but *image* itself. Raises nothing but Cancelled.
        """
        async with trio.open_nursery() as nursery:
            remote = [each for each in wanted if not self._copy_soon(nursery, content, each, image, fd, deliver)]
            self._fetch_soon(nursery, content, remote, fd, deliver)

    async def raw(self, chunk: ChunkId, length: int) -> bytes | None:
        """The bytes of a chunk that is no delta; None when nobody has them. Raises RemoteError."""
        return (await self._bases(None, {chunk: length})).get(chunk)

    # This disk

    def _copy_soon(
        self,
        nursery: trio.Nursery,
        content: Content,
        wanted: Wanted,
        image: ImageId | None,
        fd: int | None,
        deliver: Deliver,
    ) -> bool:
        is_here = self._place(wanted, image, ()) is not None
        if is_here:
            nursery.start_soon(self._copy, nursery, content, wanted, image, fd, deliver)
        return is_here

    def _place(self, wanted: Wanted, image: ImageId | None, tried: Collection[Location]) -> Location | None:
        """Where else than in *image* a chunk is now, and was not looked for yet."""
        places = self._contents.locations(wanted.chunk.id)
        return next((each for each in places if each.image != image and each not in tried), None)

    async def _copy(
        self,
        nursery: trio.Nursery,
        content: Content,
        wanted: Wanted,
        image: ImageId | None,
        fd: int | None,
        deliver: Deliver,
    ) -> None:
        outcome = await self._from_disk(wanted, image, fd)
        if outcome is None:
            self._fetch_soon(nursery, content, [wanted], fd, deliver)
        else:
            deliver(outcome)

    async def _from_disk(self, wanted: Wanted, image: ImageId | None, fd: int | None) -> Outcome | None:
        """What became of copying a chunk from any image but *image*; None when none has it."""
        tried: list[Location] = []
        async with self._copies:  # its turn first, then the place: bytes move when files are written or give up copies
            while place := self._place(wanted, image, tried):
                tried.append(place)
                outcome = await trio.to_thread.run_sync(self._copy_blocking, wanted, place, fd)
                if not isinstance(outcome.error, FormatError):
                    return outcome
                if place in self._contents.locations(wanted.chunk.id):
                    log.error(
                        "chunk %s at %d of image %016x is not what was recorded; its row goes: %s",
                        wanted.chunk.id.hex(), place.offset, place.image, outcome.error,
                    )  # fmt: skip
                    self._contents.drop_location(wanted.chunk.id, place)
        return None

    def _copy_blocking(self, wanted: Wanted, place: Location, fd: int | None) -> Outcome:
        try:
            source = self._images.open(place.image)
        except FileNotFoundError as error:
            return Outcome(wanted, FormatError(f"the image is gone: {error}"))
        raw = _scratch.buffer(place.length)
        try:
            length = os.preadv(source, [raw], place.offset)
        except OSError as error:
            return Outcome(wanted, FormatError(f"the image cannot be read: {error}"))
        finally:
            os.close(source)
        return self._put(wanted, raw[:length], fd)

    # The remote

    def _fetch_soon(
        self, nursery: trio.Nursery, content: Content, wanted: list[Wanted], fd: int | None, deliver: Deliver
    ) -> None:
        if not wanted:
            return
        placed = self._packs.placed(each.chunk.id for each in wanted)
        there = [(each, placed[each.chunk.id]) for each in wanted if each.chunk.id in placed]
        for pack, run in self._runs(there):
            nursery.start_soon(self._fetch_run, nursery, content, pack, run, fd, deliver)
        lacking = [each for each in wanted if each.chunk.id not in placed]
        if lacking:
            nursery.start_soon(self._elsewhere, nursery, content, lacking, {}, None, fd, deliver)

    def _runs(self, placed: list[tuple[Wanted, Placed]]) -> list[tuple[ObjectId, list[tuple[Wanted, Placed]]]]:
        """Neighbours in one pack, joined into range requests."""
        runs: list[tuple[ObjectId, list[tuple[Wanted, Placed]]]] = []
        ordered = sorted(placed, key=lambda each: (each[1].pack, each[1].offset))
        start = end = bases_bytes = 0
        for wanted, at in ordered:
            bases_bytes += wanted.chunk.length if at.base is not None else 0
            joined = (
                bool(runs)
                and runs[-1][0] == at.pack
                and at.offset <= end + self._tuning.fetch_gap_bytes
                and at.offset + at.length <= start + self._tuning.fetch_bytes
                and bases_bytes <= self._tuning.fetch_bytes  # they are in memory while the run is decoded
            )
            if joined:
                runs[-1][1].append((wanted, at))
                end = max(end, at.offset + at.length)
            else:
                runs.append((at.pack, [(wanted, at)]))
                start, end = at.offset, at.offset + at.length
                bases_bytes = wanted.chunk.length if at.base is not None else 0
        order = {id(wanted): index for index, (wanted, _) in enumerate(placed)}
        # What the reader asked for first is requested first.
        return sorted(runs, key=lambda run: min(order[id(wanted)] for wanted, _ in run[1]))

    async def _fetch_run(
        self,
        nursery: trio.Nursery,
        content: Content,
        pack: ObjectId,
        run: list[tuple[Wanted, Placed]],
        fd: int | None,
        deliver: Deliver,
    ) -> None:
        key = pack_key(pack)
        try:
            async with self._limiter:
                outcomes = await self._get_run(content, pack, run, fd)
                damaged = {id(each.wanted) for each in outcomes if isinstance(each.error, FormatError)}
                if damaged:  # on their way, perhaps
                    outcomes = [each for each in outcomes if id(each.wanted) not in damaged]
                    again = [each for each in run if id(each[0]) in damaged]
                    outcomes += await self._get_run(content, pack, again, fd)
        except RemoteError as error:
            outcomes = [Outcome(wanted, error) for wanted, _ in run]
        bad = []
        for outcome in outcomes:
            lost = isinstance(outcome.error, FormatError | RemoteError)
            if lost and not (isinstance(outcome.error, RemoteError) and outcome.error.temporary):
                bad.append(outcome)
            else:
                deliver(outcome)
        if bad:
            log.error("%s does not give what it should hold: %s", key, bad[0].error)
            wanted = [outcome.wanted for outcome in bad]
            tried = {each.chunk.id: at for each, at in run}
            await self._elsewhere(nursery, content, wanted, tried, bad[0].error, fd, deliver)

    async def _get_run(
        self, content: Content | None, pack: ObjectId, run: list[tuple[Wanted, Placed]], fd: int | None
    ) -> list[Outcome]:
        """Raises RemoteError."""
        start = min(at.offset for _, at in run)
        end = max(at.offset + at.length for _, at in run)
        self.requests += 1
        data = await trio.to_thread.run_sync(
            partial(self._remote.get, pack_key(pack), start, end), abandon_on_cancel=True, limiter=_unlimited()
        )
        self.bytes_fetched += end - start
        bases = await self._bases(content, {at.base: each.chunk.length for each, at in run if at.base is not None})
        unpack = partial(self._unpack, memoryview(data), start, run, bases, fd)
        return await trio.to_thread.run_sync(unpack, limiter=_unlimited())

    async def _bases(self, content: Content | None, lengths: Mapping[ChunkId, int]) -> dict[ChunkId, bytes]:
        """The raw bytes of chunks that deltas are against; those that nobody has are left out. Raises RemoteError."""
        wanted = {base: Wanted(Chunk(base, length, None), 0) for base, length in lengths.items()}
        found: dict[ChunkId, bytes] = {}
        for base, each in wanted.items():
            outcome = await self._from_disk(each, None, None)
            if outcome is not None and outcome.raw is not None:
                found[base] = bytes(outcome.raw)
        lacking = wanted.keys() - found.keys()
        places = self._packs.placed(lacking)
        if content is not None and lacking - places.keys():
            places = dict(await self._manifests.places(content)) | places
        # One that is said to be a delta itself is nobody's base: who wrote that may also have written a circle.
        whole = [(wanted[base], places[base]) for base in lacking & places.keys() if places[base].base is None]
        for pack, run in self._runs(whole):
            try:
                outcomes = await self._get_run(None, pack, run, None)
            except RemoteError as error:
                if error.temporary:
                    raise
                log.error("%s cannot be had, and deltas are against chunks in it: %s", pack_key(pack), error)
                continue
            found |= {each.wanted.chunk.id: bytes(each.raw) for each in outcomes if each.raw is not None}
        return found

    async def _elsewhere(
        self,
        nursery: trio.Nursery,
        content: Content,
        wanted: list[Wanted],
        tried: Mapping[ChunkId, Placed],
        error: Exception | None,
        fd: int | None,
        deliver: Deliver,
    ) -> None:
        """Where the file's own manifest says that the chunks are, if that is not the place that was *tried*."""
        places = await self._manifests.places(content)
        again = []
        for each in wanted:
            at = places.get(each.chunk.id)
            if at is None or at == tried.get(each.chunk.id):
                deliver(Outcome(each, error or ContentUnavailable(f"no pack known holds chunk {each.chunk.id.hex()}")))
            else:
                again.append((each, at))
        for pack, run in self._runs(again):
            await self._fetch_run(nursery, content, pack, run, fd, deliver)

    def _unpack(
        self,
        data: memoryview,
        start: int,
        run: list[tuple[Wanted, Placed]],
        bases: Mapping[ChunkId, bytes],
        fd: int | None,
    ) -> list[Outcome]:
        outcomes = []
        for wanted, at in run:
            encoded = data[at.offset - start : at.offset - start + at.length]
            base = None if at.base is None else bases.get(at.base)
            try:
                raw = decode(at.codec, encoded, wanted.chunk.length, _scratch.buffer, base)
            except FormatError as error:
                outcomes.append(Outcome(wanted, error))
                continue
            outcomes.append(self._put(wanted, raw, fd))
        if fd is not None:  # the flush that must come before these are recorded finds little left to do
            begin_writing_out_of(fd)
        return outcomes

    def _put(self, wanted: Wanted, raw: memoryview, fd: int | None) -> Outcome:
        """*raw* is copied when it has to outlive this call."""
        chunk = wanted.chunk
        if len(raw) != chunk.length or digest(raw) != chunk.id:
            return Outcome(wanted, FormatError(f"the bytes are not chunk {chunk.id.hex()}"))
        if fd is None:
            return Outcome(wanted, None, bytes(raw))
        try:
            written = 0
            while written < len(raw):
                written += self._write(fd, raw[written:], wanted.offset + written)
        except OSError as error:
            return Outcome(wanted, error, bytes(raw))
        return Outcome(wanted, None)


def _unlimited() -> trio.CapacityLimiter:
    """The request slots above bound these threads already."""
    return trio.CapacityLimiter(1)
