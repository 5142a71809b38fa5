"""Uploading: the chunks that the remote lacks become packs, deterministically, and are put.

Which chunks share a pack (`PackPlan`) depends only on what is uploaded, in path order: a file with a pack's worth of
new chunks or more gets packs of its own; what is left of it and smaller files share packs. So the same tree published
from two machines makes the same packs, and a pack that is there already is not sent twice. A pack is closed by the raw
bytes in it, not the encoded ones: it can be planned without encoding, and packs are encoded side by side.

Who calls: one task on the loop, which plans and owns the catalog, and begins a task for each pack: it has the pack
built in the background (`encode_threads` at once) and puts it in a thread (as many at once as `Pace` says). What is in
memory is at most that many packs and one more for each that may be built, and never more than `upload_bytes`. Each
acknowledged pack is one transaction, so that nothing acknowledged is sent again after a kill; one with deltas against
chunks that are on their way themselves counts as acknowledged once they are. Cancelling leaves puts on their way to
finish alone: an object that nobody names is no harm.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio

from ckptfs.background.caller import Background, Threads
from ckptfs.background.packing import Built
from ckptfs.config import Tuning
from ckptfs.encoding.keys import pack_key
from ckptfs.encoding.manifest import Content, decode_content
from ckptfs.encoding.pack import PackedChunk
from ckptfs.errors import CkptfsError, ObjectExists, RemoteError
from ckptfs.ids import ChunkId, ImageId, ObjectId
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.cuts import CutFile, Cuts
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.images import Images
from ckptfs.pieces import Pieces
from ckptfs.remote.base import ObjectStore
from ckptfs.replica.bases import Bases, Kin
from ckptfs.replica.pace import Pace

log = logging.getLogger(__name__)

T = TypeVar("T")

_SMALL_BODY = 64 << 10
"""Encoded contents up to this are decoded on the loop: a thread hop would cost more."""
_LOOK_UP = 500
"""Chunks looked up before others may run: 5 to 10 ms."""
_RATE_OVER_S = 10.0
"""The upload rate is averaged over about this long ..."""
_RATE_FROM_S = 1.0
"""... and told from when so much was seen of it."""


class DamagedContent(CkptfsError):
    """Bytes of a sealed file are not what was hashed when it was sealed, and no other copy of them is here."""

    def __init__(self, manifests: set[int]) -> None:
        super().__init__(f"{len(manifests)} sealed files hold other bytes than when they were sealed")
        self.manifests = manifests


@dataclass(frozen=True, slots=True)
class Needed:
    """A chunk to be sent, and where its file has it."""

    id: ChunkId
    length: int
    dtype: str | None
    manifest: int
    offset: int
    """In the file, and so in its image."""
    image: ImageId | None = None
    """The file's image when this was planned."""
    kin: Kin | None = None
    """Its place in a series, where it is a piece of a tensor."""


class PackPlan:
    """Decides which chunks share a pack. Pure."""

    def __init__(self, pack_bytes: int) -> None:
        self._pack_bytes = pack_bytes
        self._shared: list[Needed] = []
        self._shared_bytes = 0

    def add(self, file: list[Needed]) -> list[list[Needed]]:
        """The packs that are full once *file*'s new chunks, in order, were added."""
        packs: list[list[Needed]] = []
        current: list[Needed] = []
        size = 0
        for chunk in file:
            if current and size + chunk.length > self._pack_bytes:
                packs.append(current)
                current, size = [], 0
            current.append(chunk)
            size += chunk.length
        if size >= self._pack_bytes:
            packs.append(current)
            return packs
        if self._shared and self._shared_bytes + size > self._pack_bytes:
            packs.append(self._shared)
            self._shared, self._shared_bytes = [], 0
        self._shared += current
        self._shared_bytes += size
        return packs

    def finish(self) -> list[list[Needed]]:
        """What is left."""
        left = [self._shared] if self._shared else []
        self._shared, self._shared_bytes = [], 0
        return left


@dataclass
class UploadCounters:
    """What was sent since the process began."""

    sent_bytes: int = 0
    """Encoded."""
    raw_bytes: int = 0
    """The same bytes before they were encoded."""
    packs: int = 0
    puts: int = 0
    repeated: int = 0
    """Requests that failed for a while and were sent again."""
    _lately_bytes: float = 0.0
    _lately_s: float = 0.0
    _rated_at: float = field(default_factory=time.monotonic)

    @property
    def rate_bytes_s(self) -> float:
        """Raw bytes per second while something was sent, lately; 0 when that is not known yet."""
        return self._lately_bytes / self._lately_s if self._lately_s >= _RATE_FROM_S else 0.0

    def begin(self) -> None:
        """Sending begins: the time before was idle."""
        self._rated_at = time.monotonic()

    def sent(self, encoded: int, raw: int) -> None:
        now = time.monotonic()
        elapsed = now - self._rated_at
        self._rated_at = now
        forgotten = math.exp(-elapsed / _RATE_OVER_S)
        self._lately_bytes = self._lately_bytes * forgotten + raw
        self._lately_s = self._lately_s * forgotten + elapsed
        self.sent_bytes += encoded
        self.raw_bytes += raw
        self.packs += 1


@dataclass(frozen=True)
class _Sent:
    """A pack that the remote has taken."""

    name: ObjectId
    rows: tuple[PackedChunk, ...]
    verified: bool
    chunks: list[Needed]


@dataclass
class _Job:
    """A pack on its way: what belongs into it, and the images where it may be found."""

    chunks: list[Needed]
    sources: dict[ChunkId, list[tuple[ImageId, int]]]


class Uploader:
    """Sends what file versions need and the remote lacks."""

    def __init__(
        self,
        *,
        contents: Contents,
        cuts: Cuts,
        packs: Packs,
        bases: Bases,
        images: Images,
        remote: ObjectStore,
        tuning: Tuning,
        counters: UploadCounters,
        acknowledged: Callable[[ObjectId], None] = lambda name: None,
        background: Background | None = None,
    ) -> None:
        self._contents = contents
        self._cuts = cuts
        self._packs = packs
        self._bases = bases
        self._images = images
        self._remote = remote
        self._tuning = tuning
        self._counters = counters
        self._acknowledged = acknowledged
        self._background = background or Threads()
        self._encoding = trio.CapacityLimiter(tuning.encode_threads)
        self._pace = Pace(tuning.upload_threads, tuning.upload_most)
        self._putting = trio.CapacityLimiter(self._pace.at_once)
        self._in_memory = trio.CapacityLimiter(1)
        self._most_in_memory = 1
        self._repeated = 0
        """`counters.repeated` when a put ended last."""
        self._early: list[_Sent] = []
        """Packs that came before what their deltas are against."""

    async def upload(self, files: Iterable[CutFile], pending_bytes: int) -> None:
        """Return when the remote has every chunk of *files*, which come in path order.

        Raises the first RemoteError after the packs that were on their way have come through, DamagedContent when a
        file's bytes are not what was sealed and OSError of the local disk.
        """
        large = pending_bytes > self._tuning.large_after_bytes
        pack_bytes = self._tuning.pack_bytes_large if large else self._tuning.pack_bytes
        self._begin(pack_bytes)
        failures: list[Exception] = []
        on_its_way: set[ChunkId] = set()
        async with trio.open_nursery() as nursery:
            try:
                async with aclosing(self._planned(files, pack_bytes, on_its_way)) as planned:
                    async for pack in planned:
                        await self._in_memory.acquire_on_behalf_of(id(pack))
                        nursery.start_soon(self._carry, pack, on_its_way, failures)
                        if failures:
                            break
            except CkptfsError as error:
                failures.append(error)
        self._acknowledge_early()
        if failures:
            raise next((each for each in failures if isinstance(each, DamagedContent)), failures[0])

    def _begin(self, pack_bytes: int) -> None:
        self._counters.begin()
        self._bases.begin()
        self._early.clear()
        self._repeated = self._counters.repeated
        self._most_in_memory = max(1, min(self._tuning.upload_most, self._tuning.upload_bytes // pack_bytes))
        self._pace.limit(self._most_in_memory)
        self._follow_pace()

    def _follow_pace(self) -> None:
        self._putting.total_tokens = self._pace.at_once
        self._in_memory.total_tokens = min(self._most_in_memory, self._pace.at_once + self._tuning.encode_threads)

    async def _planned(
        self, files: Iterable[CutFile], pack_bytes: int, on_its_way: set[ChunkId]
    ) -> AsyncGenerator[list[Needed], None]:
        """What is needed of *files*, by packs."""
        plan = PackPlan(pack_bytes)
        for file in files:
            for pack in plan.add(await self._needed(file, on_its_way)):
                self._bases.sending(_kin(pack), {chunk.id: chunk.length for chunk in pack})
                yield pack
        for pack in plan.finish():
            yield pack

    async def _needed(self, file: CutFile, on_its_way: set[ChunkId]) -> list[Needed]:
        """The chunks of *file* that neither the remote has nor a pack on its way."""
        content = await self.content(file.manifest)
        pieces = Pieces(file.path, content.tensors if self._tuning.delta else ())
        rows = zip(content.chunks, content.offsets(), strict=True)
        needed: list[Needed] = []
        await trio.lowlevel.checkpoint()
        while batch := list(itertools.islice(rows, _LOOK_UP)):
            known = self._packs.known({chunk.id for chunk, _ in batch})
            lacking = []
            for chunk, offset in batch:
                if chunk.id not in known and chunk.id not in on_its_way:
                    on_its_way.add(chunk.id)
                    lacking.append((chunk, offset))
            kin = self._bases.find([(chunk, pieces.keys(at, chunk.length, chunk.dtype)) for chunk, at in lacking])
            needed += (
                Needed(chunk.id, chunk.length, chunk.dtype, file.manifest, offset, file.image, kin.get(chunk.id))
                for chunk, offset in lacking
            )
            await trio.lowlevel.checkpoint()
        return needed

    async def content(self, manifest: int) -> Content:
        """The chunk list of a sealed file of ours."""
        body = self._contents.manifest(manifest).body
        assert body is not None, "only what was sealed here is uploaded"
        if len(body) <= _SMALL_BODY:
            return decode_content(body)
        return await trio.to_thread.run_sync(decode_content, body)

    async def _carry(self, chunks: list[Needed], on_its_way: set[ChunkId], failures: list[Exception]) -> None:
        """Send a pack whose place in memory is taken."""
        try:
            if not failures and await self._send(chunks):
                on_its_way.difference_update(chunk.id for chunk in chunks)  # the catalog knows them now
        except (CkptfsError, OSError) as error:
            failures.append(error)
        finally:
            self._in_memory.release_on_behalf_of(id(chunks))

    async def _send(self, chunks: list[Needed]) -> bool:
        """Whether the pack counts as acknowledged already."""
        job = _Job(chunks, {chunk.id: [(chunk.image, chunk.offset)] for chunk in chunks if chunk.image is not None})
        packed = await self._build(job)
        if isinstance(packed, set):  # moved or gone since: look at every place that is known now
            job.sources |= self._places([chunk for chunk in chunks if chunk.id in packed])
            packed = await self._build(job)
        if isinstance(packed, set):
            raise DamagedContent({chunk.manifest for chunk in chunks if chunk.id in packed})
        name, data, rows = packed
        sent = _Sent(name, rows, await self._put(name, data), chunks)
        self._counters.sent(len(data), sum(chunk.length for chunk in chunks))
        if not self._bases.are_there(rows):
            self._early.append(sent)
            return False
        self._acknowledge(sent)
        return True

    def _acknowledge_early(self) -> None:
        """Those of which what they are against is there by now. The rest is sent again, with what is lacking."""
        while ready := [sent for sent in self._early if self._bases.are_there(sent.rows)]:
            for sent in ready:
                self._acknowledge(sent)
                self._early.remove(sent)

    def _acknowledge(self, sent: _Sent) -> None:
        self._packs.acknowledged(sent.name, sent.rows, verified=sent.verified)
        self._bases.sent(_kin(sent.chunks), sent.rows)
        self._acknowledged(sent.name)

    async def _build(self, job: _Job) -> tuple[ObjectId, memoryview, tuple[PackedChunk, ...]] | set[ChunkId]:
        """The pack, in memory that only its file descriptor names; or the chunks that no place has."""
        wanted = [
            (chunk.id, chunk.length, chunk.dtype, self._files(job.sources.get(chunk.id, [])), self._against(chunk))
            for chunk in job.chunks
        ]
        light = sum(chunk.length for chunk in job.chunks) <= self._tuning.light_bytes
        label = f"ckptfs-pack-{secrets.token_hex(8)}"
        fd = os.memfd_create(label, os.MFD_CLOEXEC)
        try:
            async with self._encoding:
                target = f"/proc/{os.getpid()}/fd/{fd}"
                answer = await self._background.call("build_pack", wanted, target, label, light=light)
            built = Built._make(answer)
            for note in built.notes:
                log.warning("%s", note)
            if built.missing:
                return set(built.missing)
            data = mmap.mmap(fd, built.size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return built.name, memoryview(data), tuple(PackedChunk(*row) for row in built.rows)

    def _against(self, chunk: Needed) -> tuple[ChunkId, list[tuple[str, int]], float] | None:
        """What `background.packing.Against` is made of."""
        base = chunk.kin.base if chunk.kin is not None else None
        if base is None:
            return None
        return base.keyframe.chunk, self._files(base.places), base.keyframe.stored / base.keyframe.count

    def _files(self, places: Iterable[tuple[ImageId, int]]) -> list[tuple[str, int]]:
        return [(self._images.file(image), offset) for image, offset in places]

    async def _put(self, name: ObjectId, data: memoryview) -> bool:
        """Store the pack; whether the remote's own checksum of it equals ours."""
        key = pack_key(name)
        self._counters.puts += 1
        try:
            return await self._ask(partial(self._remote.put, key, data, if_absent=True))
        except ObjectExists:
            # An attempt whose answer was lost, or another machine with the same tree. The name fixes the layout.
            size = await self._ask(partial(self._remote.size, key))
            if size != len(data):
                raise RemoteError(
                    f"{self._remote.url} holds {key} with {size} bytes, and not {len(data)}: it is damaged", key=key
                ) from None
            return False
        finally:
            self._put_ended()

    def _put_ended(self) -> None:
        repeated = self._counters.repeated
        # Whoever waited for its turn has it already.
        self._pace.ended(trouble=repeated != self._repeated, others_wait=self._putting.available_tokens <= 0)
        self._repeated = repeated
        self._follow_pace()

    async def _ask(self, request: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(request, limiter=self._putting, abandon_on_cancel=True)

    def _places(self, chunks: list[Needed]) -> dict[ChunkId, list[tuple[ImageId, int]]]:
        """Where on this disk *chunks* are: in their file's image as the cut has it now, and in any other."""
        places: dict[ChunkId, list[tuple[ImageId, int]]] = {}
        for chunk in chunks:
            own = self._cuts.image_of(chunk.manifest)
            places[chunk.id] = [(own, chunk.offset)] if own is not None else []
            places[chunk.id] += [(each.image, each.offset) for each in self._contents.locations(chunk.id)]
        return places


def _kin(chunks: Iterable[Needed]) -> dict[ChunkId, Kin]:
    return {chunk.id: chunk.kin for chunk in chunks if chunk.kin is not None}
