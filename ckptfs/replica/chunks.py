"""Getting chunks' raw bytes into an image: from other images of this disk, else from packs on the remote.

Every chunk's digest is checked before its bytes go anywhere (invariant 6). Damage costs the one chunk: a local copy
that differs is forgotten and the remote asked; a pack that lacks it, or differs twice, makes way for one that has it.
What a delta is against comes from this disk too where it is here, else at the same time as the delta.

Who calls: the event loop's thread. Range requests run in abandonable threads with the store's retries; what touches the
image's descriptor runs in threads that are always waited for, so that the caller may close it afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ckptfs.replica.doubts import Doubts
from ckptfs.replica.manifests import Manifests
from ckptfs.replica.slots import Slots
from ckptfs.scratch import Scratch

log = logging.getLogger(__name__)

_COPIES_AT_ONCE = 2
_RANGES_AT_ONCE = 4
"""Of one run, whose bases may be anywhere."""
_SLOWEST_BYTES_S = 64 << 10
"""A request whose bytes come slower than this is given up."""

_scratch, _base_scratch = Scratch(), Scratch()
"""Each thread decodes one chunk after another into the same memory, and what it is against into other memory."""


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
    pack: ObjectId | None = None
    """The one that does not give it: its own, or that of what it is a difference to."""


Deliver = Callable[[Outcome], None]


@dataclass
class Run:
    """Chunks that lie near each other in one pack: one range request gets them."""

    pack: ObjectId
    parts: list[tuple[Wanted, Placed]]
    """At least one, by offset in the pack."""
    base_bytes: int = 0
    """How much of what deltas among them are against has to come with them."""

    @property
    def size_bytes(self) -> int:
        """What is in memory while they are fetched."""
        return self.end - self.start + self.base_bytes

    @property
    def start(self) -> int:
        return self.parts[0][1].offset

    @property
    def end(self) -> int:
        return max(at.offset + at.length for _, at in self.parts)

    def cut(self, data: bytes) -> Iterator[tuple[Wanted, Placed, memoryview]]:
        """The parts, each with its encoded bytes; *data* is what the pack holds between start and end."""
        view, start = memoryview(data), self.start
        for wanted, at in self.parts:
            yield wanted, at, view[at.offset - start : at.offset - start + at.length]


class _Bases:
    """What the deltas of a run are against."""

    def __init__(self) -> None:
        self.raw: dict[ChunkId, bytes | bytearray] = {}
        """From this disk."""
        self.encoded: dict[ChunkId, tuple[Placed, memoryview]] = {}
        """From packs."""
        self.missed: dict[ChunkId, tuple[ObjectId, RemoteError]] = {}
        """Why packs do not give them."""

    def decoded(self, base: ChunkId, length: int) -> bytes | bytearray | memoryview | None:
        """The bytes of *base* until the thread asks again, if it is here. Raises FormatError.

        They may be others: whoever decodes a delta with them compares its digest.
        """
        if base not in self.encoded:
            return self.raw.get(base)
        at, encoded = self.encoded[base]
        return decode(at.codec, encoded, length, _base_scratch.buffer)

    def fault(self, base: ChunkId, length: int) -> tuple[ObjectId | None, Exception] | None:
        """Where and why *base* cannot be had; None when it is here and right."""
        if base in self.raw:
            return None
        if base in self.missed:
            return self.missed[base]
        if base not in self.encoded:
            return None, FormatError(f"no pack known holds chunk {base.hex()}, which others are told as differences to")
        at, encoded = self.encoded[base]
        try:
            if digest(decode(at.codec, encoded, length, _base_scratch.buffer)) == base:
                return None
            why = FormatError(f"the bytes are not chunk {base.hex()}, which others are told as differences to")
        except FormatError as error:
            why = error
        return at.pack, FormatError(f"{pack_key(at.pack)} is damaged: {why}")


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
        read_timeout_s: float,
        write: Callable[[int, memoryview, int], int],
    ) -> None:
        """A request takes twice *read_timeout_s* (its repetitions, then one more) and what its bytes take at most."""
        self._contents = contents
        self._packs = packs
        self.doubts = Doubts(packs, contents)
        self._read_timeout_s = read_timeout_s
        self._images = images
        self._manifests = manifests
        self._remote = remote
        self._tuning = tuning
        self._slots = Slots(tuning.fetch_threads, tuning.fetching_bytes)
        self._copies = trio.CapacityLimiter(_COPIES_AT_ONCE)
        # Those that never return, as on a NAS that is gone, are not in the slots any more; nor do they pile up.
        self._requesting = trio.CapacityLimiter(tuning.fetch_threads * _RANGES_AT_ONCE)
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
            here = self._contents.located([each.chunk.id for each in wanted], besides=image)
            for each in wanted:
                if each.chunk.id in here:
                    nursery.start_soon(self._copy, nursery, content, each, image, fd, deliver)
            remote = [each for each in wanted if each.chunk.id not in here]
            self._fetch_soon(nursery, content, remote, fd, deliver)

    async def raw(self, chunk: ChunkId, length: int) -> bytes | None:
        """The bytes of a chunk that is no delta; None when nobody has them. Raises RemoteError."""
        wanted = Wanted(Chunk(chunk, length, None), 0)
        outcome = await self._from_disk(wanted, None, None)
        at = self._packs.placed([chunk]).get(chunk)
        if outcome is None and at is not None and at.base is None:
            try:
                (outcome,) = await self._get_run(None, Run(at.pack, [(wanted, at)]), None)
            except RemoteError as error:
                if error.temporary:
                    raise
                self.doubts.missed(at.pack, error)
        return None if outcome is None or outcome.raw is None else bytes(outcome.raw)

    # This disk

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
        placed = self._packs.placed_with_bases(each.chunk.id for each in wanted)
        there = [(each, placed[each.chunk.id]) for each in wanted if each.chunk.id in placed]
        for run in self._runs(there, placed):
            nursery.start_soon(self._fetch_run, nursery, content, run, fd, deliver)
        lacking = [each for each in wanted if each.chunk.id not in placed]
        if lacking:
            nursery.start_soon(self._elsewhere, nursery, content, lacking, {}, {}, fd, deliver)

    def _runs(self, parts: list[tuple[Wanted, Placed]], bases: Mapping[ChunkId, Placed]) -> list[Run]:
        """Neighbours in one pack joined into runs; *bases* tells what will come with deltas."""
        runs: list[Run] = []
        end = 0
        for wanted, at in sorted(parts, key=lambda part: (part[1].pack, part[1].offset)):
            of_base = 0
            if at.base is not None:
                of_base = bases[at.base].length if at.base in bases else wanted.chunk.length
            joined = (
                bool(runs)
                and runs[-1].pack == at.pack
                and at.offset <= end + self._tuning.fetch_gap_bytes
                and at.offset + at.length <= runs[-1].start + self._tuning.fetch_bytes
                and runs[-1].base_bytes + of_base <= self._tuning.fetch_bytes
            )
            if joined:
                runs[-1].parts.append((wanted, at))
                runs[-1].base_bytes += of_base
                end = max(end, at.offset + at.length)
            else:
                runs.append(Run(at.pack, [(wanted, at)], of_base))
                end = at.offset + at.length
        order = {id(wanted): index for index, (wanted, _) in enumerate(parts)}
        # What the reader asked for first is requested first.
        return sorted(runs, key=lambda run: min(order[id(wanted)] for wanted, _ in run.parts))

    async def _fetch_run(
        self, nursery: trio.Nursery, content: Content, run: Run, fd: int | None, deliver: Deliver
    ) -> None:
        try:
            async with self._slots.take(run.size_bytes):
                outcomes = await self._get_run(content, run, fd)
                damaged = {id(each.wanted) for each in outcomes if isinstance(each.error, FormatError)}
                if damaged:  # on their way, perhaps
                    outcomes = [each for each in outcomes if id(each.wanted) not in damaged]
                    again = replace(run, parts=[part for part in run.parts if id(part[0]) in damaged])
                    outcomes += await self._get_run(content, again, fd)
        except RemoteError as error:
            outcomes = [Outcome(wanted, error, pack=run.pack) for wanted, _ in run.parts]
        bad: list[Outcome] = []
        for outcome in outcomes:
            lost = isinstance(outcome.error, FormatError | RemoteError)
            if lost and not (isinstance(outcome.error, RemoteError) and outcome.error.temporary):
                bad.append(outcome)
            else:
                deliver(outcome)
        if bad:
            for pack, why in {outcome.pack: outcome.error for outcome in bad}.items():
                if pack is not None and why is not None:
                    self.doubts.missed(pack, why)
                else:
                    log.error("a delta cannot be had: %s", why)
            wanted = [outcome.wanted for outcome in bad]
            tried = {each.chunk.id: at for each, at in run.parts}
            causes = {outcome.wanted.chunk.id: outcome.error for outcome in bad}
            await self._elsewhere(nursery, content, wanted, tried, causes, fd, deliver)

    async def _get_run(self, content: Content | None, run: Run, fd: int | None) -> list[Outcome]:
        """Raises RemoteError."""
        bases = _Bases()
        base_runs = await self._bases(content, run, bases)
        data, *others = await self._get_ranges([run, *base_runs])
        if isinstance(data, RemoteError):
            raise data
        for each, got in zip(base_runs, others, strict=True):
            if not isinstance(got, RemoteError):
                bases.encoded.update((wanted.chunk.id, (at, part)) for wanted, at, part in each.cut(got))
            elif got.temporary:
                raise got
            else:
                bases.missed.update((wanted.chunk.id, (each.pack, got)) for wanted, _ in each.parts)
        unpack = partial(self._unpack, run, data, bases, fd)
        return await trio.to_thread.run_sync(unpack, limiter=_unlimited())

    async def _get_ranges(self, runs: Sequence[Run]) -> list[bytes | RemoteError]:
        """What the packs hold there, or why it cannot be had; several at once."""
        found: dict[int, bytes | RemoteError] = {}
        at_once = trio.Semaphore(_RANGES_AT_ONCE)

        async def get(index: int, run: Run) -> None:
            self.requests += 1
            key = pack_key(run.pack)
            request = partial(self._remote.get, key, run.start, run.end)
            allowed_s = 2 * self._read_timeout_s + (run.end - run.start) / _SLOWEST_BYTES_S
            found[index] = RemoteError(
                f"{self._remote.url}: get {key}: no answer in {allowed_s:.0f} s", key=key, temporary=True
            )
            async with at_once:
                with trio.move_on_after(allowed_s):
                    try:
                        found[index] = await trio.to_thread.run_sync(
                            request, abandon_on_cancel=True, limiter=self._requesting
                        )
                        self.bytes_fetched += run.end - run.start
                    except RemoteError as error:
                        found[index] = error

        async with trio.open_nursery() as nursery:
            for index, run in enumerate(runs):
                nursery.start_soon(get, index, run)
        return [found[index] for index in range(len(runs))]

    async def _bases(self, content: Content | None, run: Run, bases: _Bases) -> list[Run]:
        """Put into *bases* what deltas of *run* are against and this disk has; the runs that hold the rest.

        What nobody has is left out.
        """
        wanted = {
            at.base: Wanted(Chunk(at.base, each.chunk.length, None), 0) for each, at in run.parts if at.base is not None
        }
        if not wanted:
            return []
        for base in self._contents.located(wanted, besides=None):
            outcome = await self._from_disk(wanted[base], None, None)
            if outcome is not None and outcome.raw is not None:
                bases.raw[base] = outcome.raw
        lacking = wanted.keys() - bases.raw.keys()
        places = self._packs.placed(lacking)
        if content is not None and lacking - places.keys():
            places = dict(await self._manifests.places(content)) | places
        # One that is said to be a delta itself is nobody's base: who wrote that may also have written a circle.
        whole = [(wanted[base], places[base]) for base in lacking & places.keys() if places[base].base is None]
        return self._runs(whole, {})

    async def _elsewhere(
        self,
        nursery: trio.Nursery,
        content: Content,
        wanted: list[Wanted],
        tried: Mapping[ChunkId, Placed],
        causes: Mapping[ChunkId, Exception | None],
        fd: int | None,
        deliver: Deliver,
    ) -> None:
        """Where the file's own manifest says that the chunks are, if that is not the place that was *tried*."""
        places = await self._manifests.places(content)
        again = []
        for each in wanted:
            at = places.get(each.chunk.id)
            if at is None or at == tried.get(each.chunk.id):
                cause = causes.get(each.chunk.id)
                deliver(Outcome(each, cause or ContentUnavailable(f"no pack known holds chunk {each.chunk.id.hex()}")))
            else:
                again.append((each, at))
        for run in self._runs(again, places):
            await self._fetch_run(nursery, content, run, fd, deliver)

    def _unpack(self, run: Run, data: bytes, bases: _Bases, fd: int | None) -> list[Outcome]:
        outcomes = []
        for wanted, at, encoded in run.cut(data):
            try:
                base = None if at.base is None else bases.decoded(at.base, wanted.chunk.length)
                outcome = self._put(wanted, decode(at.codec, encoded, wanted.chunk.length, _scratch.buffer, base), fd)
            except FormatError as error:
                outcome = Outcome(wanted, error)
            if isinstance(outcome.error, FormatError):
                fault = None if at.base is None else bases.fault(at.base, wanted.chunk.length)
                why = FormatError(f"{pack_key(run.pack)} is damaged: {outcome.error}")
                pack, cause = fault or (run.pack, why)
                outcome = Outcome(wanted, cause, pack=pack)
            outcomes.append(outcome)
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
