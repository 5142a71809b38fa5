"""Hydrating: missing bytes of images come back from wherever they are, when they are read and a little before.

Who calls: the event loop's thread; `run` must be running. A fetch in flight belongs to (image, chunk): everyone who
needs it waits for the same one, and it goes on when a waiter is cancelled. Fetches work on a descriptor of their own,
so that closing the image's never lets them write somewhere else. `Image.present` is the caller's object; it is updated
here, on the loop, after the bytes are in the file.

An image that could not be written (full disk) is still readable: `read` then gives the bytes from memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from ckptfs.config import MIB, Tuning
from ckptfs.encoding.manifest import Content
from ckptfs.errors import ContentUnavailable, RemoteError
from ckptfs.ids import ChunkId, ImageId
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.images import Image, Images
from ckptfs.remote.base import ObjectStore
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.replica.chunks import ChunkFetcher, Outcome, Wanted
from ckptfs.replica.manifests import Manifests
from ckptfs.replica.readahead import window_end

log = logging.getLogger(__name__)

_READ_AHEADS = 32
"""Runs of reads remembered."""
_KEPT_BYTES = 32 * MIB
"""Raw chunks kept in memory while the disk is full: a reader asks for a chunk in many small reads."""


@dataclass
class _Flight:
    """A chunk on its way into an image."""

    images: list[Image]
    done: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None


class Hydrator:
    """Gives file contents and their bytes."""

    def __init__(
        self,
        catalog: Catalog,
        images: Images,
        remote: ObjectStore,
        tuning: Tuning,
        *,
        write: Callable[[int, bytes | bytearray, int], int] = os.pwrite,
    ) -> None:
        """*write* stands for os.pwrite in tests of a full disk."""
        self._stop = threading.Event()
        limits = Limits(tuning.retry_first_s, tuning.retry_most_s, deadline_s=tuning.read_timeout_s, cancel=self._stop)
        self.last_error: str | None = None
        """Why the last request failed and is made again; None once bytes came."""
        retrying = Retrying(remote, limits, on_retry=self._failing)
        limiter = trio.CapacityLimiter(tuning.fetch_threads)
        self._tuning = tuning
        self._contents = Contents(catalog)
        self._catalog = catalog
        self._manifests = Manifests(
            catalog, retrying, tuning.read_timeout_s, trio.CapacityLimiter(tuning.fetch_threads)
        )
        self.fetcher = ChunkFetcher(
            self._contents, Packs(catalog), images, self._manifests, retrying, tuning, limiter, write
        )
        self._flights: dict[tuple[ImageId, int], _Flight] = {}
        self._asked: OrderedDict[tuple[ImageId, int], int] = OrderedDict()
        """How far ahead of a run of reads, known by its start, chunks were asked for: an offset in the file."""
        self._kept: OrderedDict[ChunkId, bytes | bytearray] = OrderedDict()
        self._kept_bytes = 0
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the fetches until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._stop.set()

    def _failing(self, error: RemoteError, wait_s: float) -> None:
        self.last_error = str(error)

    async def content(self, manifest_row: int) -> Content:
        """What a sealed file version consists of. Raises ContentUnavailable."""
        return await self._manifests.content(manifest_row)

    def begin(self, image: Image, content: Content, start: int, end: int) -> None:
        """Have the bytes [start, end) of the file on their way; nobody is told when they do not come."""
        if self._nursery is not None:
            self._start(image, content, start, end)

    async def ensure(self, image: Image, content: Content, start: int, end: int) -> None:
        """On return the bytes [start, end) of the file are in the image file.

        Raises ContentUnavailable (remote gone for longer than the read timeout, object missing or damaged), OSError
        when they cannot be written. Cancelling leaves fetches going that others may be waiting for.
        """
        deadline = trio.current_time() + self._tuning.read_timeout_s
        cause: Exception | None = None
        while True:
            flights = self._start(image, content, start, end)
            if not flights:
                return
            for flight in flights:
                with trio.move_on_at(deadline):
                    await flight.done.wait()
                late = trio.current_time() >= deadline
                if not flight.done.is_set():
                    raise ContentUnavailable(f"the remote did not deliver in time: {cause or 'no answer'}") from cause
                if flight.error is None:
                    deadline = trio.current_time() + self._tuning.read_timeout_s
                    continue
                if isinstance(flight.error, OSError | ContentUnavailable):
                    raise flight.error
                cause = flight.error
                if late or not (isinstance(cause, RemoteError) and cause.temporary):
                    raise ContentUnavailable(f"bytes cannot be had from the remote: {cause}") from cause
                break  # a fetch that somebody began earlier ran out of its own time: begin another

    async def read(self, image: Image, content: Content, start: int, end: int) -> bytes:
        """The bytes [start, end) of the file, also when they could not be written to the image.

        Raises ContentUnavailable, OSError when the image cannot be read.
        """
        try:
            await self.ensure(image, content, start, end)
        except OSError as error:
            log.debug("image %016x cannot take bytes: %s", image.id, error)
            return await self._assemble(image, content, start, end)
        return os.pread(image.fd, end - start, start)

    def read_ahead(self, image: Image, content: Content, run_start: int, position: int) -> None:
        """A reader came from *run_start* to *position* without a jump: fetch ahead of it in the background."""
        asked = self._asked.get((image.id, run_start), position)
        most = self._tuning.readahead_bytes
        if not position <= asked <= position + most:
            asked = position
        end = window_end(content, run_start, position, most)
        # Not before half of it was used, so that requests are long.
        if self._nursery is None or asked - position > (end - position) // 2:
            return
        self._asked[image.id, run_start] = end
        self._asked.move_to_end((image.id, run_start))
        while len(self._asked) > _READ_AHEADS:
            self._asked.popitem(last=False)
        self._start(image, content, asked, end)

    async def record(self, image: Image) -> None:
        """Flush what was fetched into *image* and record where it lies; the image becomes whole when all is there.

        Raises OSError when the flush fails: then nothing is recorded.
        """
        if image.present is None:
            return
        written = list(image.unrecorded)
        fd = os.dup(image.fd)
        try:
            await trio.to_thread.run_sync(os.fdatasync, fd)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        # Others ran meanwhile: what was recorded, or un-sealed, by them is no longer in the list.
        still = set(image.unrecorded)
        written = [each for each in written if each in still]
        if image.present is None or not self._contents.has_image(image.id):
            return
        with self._catalog.transaction():
            self._contents.add_locations(image.id, [(ChunkId(chunk), at, length) for chunk, at, length in written])
            gone = set(written)
            image.unrecorded[:] = [each for each in image.unrecorded if each not in gone]
            if not image.unrecorded and image.present.covers(0, size):
                self._contents.set_image_whole(image.id)
                image.present = None

    # Within

    def _start(self, image: Image, content: Content, start: int, end: int) -> list[_Flight]:
        """The flights of every chunk in [start, end) that is missing, begun where there was none."""
        present = image.present
        if present is None:
            return []
        offsets = content.offsets()
        flights: list[_Flight] = []
        wanted: list[Wanted] = []
        begun: dict[int, _Flight] = {}
        for index in content.at(start, end):
            chunk, offset = content.chunks[index], offsets[index]
            if present.covers(offset, offset + chunk.length):
                continue
            flight = self._flights.get((image.id, offset))
            if flight is None:
                flight = self._flights[image.id, offset] = begun[offset] = _Flight([image])
                wanted.append(Wanted(chunk, offset))
            elif not any(each is image for each in flight.images):
                flight.images.append(image)
            flights.append(flight)
        if wanted:
            if self._nursery is None:
                self._end(image.id, begun, ContentUnavailable("reading from the remote has stopped"))
            else:
                self._nursery.start_soon(self._fetch, image.id, os.dup(image.fd), content, wanted, begun)
        return flights

    async def _fetch(
        self, image: ImageId, fd: int, content: Content, wanted: list[Wanted], begun: dict[int, _Flight]
    ) -> None:
        error: Exception = ContentUnavailable("reading from the remote has stopped")
        try:
            await self.fetcher.fetch(content, wanted, image, fd, lambda outcome: self._landed(image, begun, outcome))
        except Exception as failure:
            log.exception("fetching into image %016x failed", image)
            error = failure
        finally:
            os.close(fd)
            self._end(image, begun, error)

    def _landed(self, image: ImageId, begun: dict[int, _Flight], outcome: Outcome) -> None:
        chunk, offset = outcome.wanted.chunk, outcome.wanted.offset
        flight = begun.pop(offset)
        del self._flights[image, offset]
        flight.error = outcome.error
        if outcome.error is None:
            self.last_error = None
            for index, each in enumerate(flight.images):
                if each.present is not None:
                    each.present.add(offset, offset + chunk.length)
                    if index == 0:
                        each.unrecorded.append((chunk.id, offset, chunk.length))
        elif outcome.raw is not None:
            self._keep(chunk.id, outcome.raw)
        flight.done.set()

    def _end(self, image: ImageId, begun: dict[int, _Flight], error: Exception) -> None:
        """Whatever has not landed by now does not."""
        for offset, flight in begun.items():
            del self._flights[image, offset]
            flight.error = error
            flight.done.set()
        begun.clear()

    async def _assemble(self, image: Image, content: Content, start: int, end: int) -> bytes:
        """[start, end) from what the image has, what is kept, and fetched chunks that are written nowhere."""
        data = bytearray(end - start)
        offsets = content.offsets()
        needed = [Wanted(content.chunks[index], offsets[index]) for index in content.at(start, end)]
        loaded = await self._load(content, [each for each in needed if not _has(image, each)])
        for each in needed:
            first, last = max(start, each.offset), min(end, each.offset + each.chunk.length)
            raw = loaded.get(each.chunk.id)
            if raw is None:
                data[first - start : last - start] = os.pread(image.fd, last - first, first)
            else:
                data[first - start : last - start] = raw[first - each.offset : last - each.offset]
        return bytes(data)

    async def _load(self, content: Content, wanted: list[Wanted]) -> dict[ChunkId, bytes | bytearray]:
        loaded = {each.chunk.id: self._kept[each.chunk.id] for each in wanted if each.chunk.id in self._kept}
        failed: list[Exception] = []

        def deliver(outcome: Outcome) -> None:
            if outcome.raw is not None:
                loaded[outcome.wanted.chunk.id] = outcome.raw
                self._keep(outcome.wanted.chunk.id, outcome.raw)
            else:
                failed.append(outcome.error or ContentUnavailable("no bytes came"))

        left = [each for each in wanted if each.chunk.id not in loaded]
        if left:
            with trio.move_on_after(self._tuning.read_timeout_s):
                await self.fetcher.fetch(content, left, None, None, deliver)
        if any(each.chunk.id not in loaded for each in wanted):
            cause = failed[0] if failed else None
            raise ContentUnavailable(f"bytes cannot be had from the remote: {cause or 'no answer in time'}") from cause
        return loaded

    def _keep(self, chunk: ChunkId, raw: bytes | bytearray) -> None:
        if chunk in self._kept:
            self._kept.move_to_end(chunk)
            return
        self._kept[chunk] = raw
        self._kept_bytes += len(raw)
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest)


def _has(image: Image, wanted: Wanted) -> bool:
    return image.present is None or image.present.covers(wanted.offset, wanted.offset + wanted.chunk.length)
