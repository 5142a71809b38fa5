"""Hydrating: missing bytes of images come back from wherever they are, when they are read and a little before.

Who calls: the event loop's thread; `run` must be running. What is on its way, and where it goes, is the business of
`flights`: what the disk has no room for is still readable, from memory, where a few chunks are kept.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable

import trio

from ckptfs.config import Tuning
from ckptfs.encoding.manifest import Content
from ckptfs.errors import ContentUnavailable, FormatError, RemoteError
from ckptfs.ids import ChunkId
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.images import Image, Images
from ckptfs.local.room import Room
from ckptfs.reading import Reading
from ckptfs.remote.base import ObjectStore
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.replica.chunks import ChunkFetcher, Wanted
from ckptfs.replica.flights import Flight, Flights, Purpose, Stopped
from ckptfs.replica.kept import KeptChunks, Raw
from ckptfs.replica.manifests import Manifests
from ckptfs.replica.readahead import window_end

log = logging.getLogger(__name__)

_LOOK_FOR_ROOM_S = 0.5
_REMEMBER_ERROR_S = 60.0
_RETRY_MOST_S = 4.0
"""Somebody waits for these bytes: longest wait before the next try, however long the outage."""


class Hydrator:
    """Gives file contents and their bytes."""

    def __init__(
        self,
        catalog: Catalog,
        images: Images,
        remote: ObjectStore,
        tuning: Tuning,
        room: Room,
        *,
        read_timeout_s: float,
        write: Callable[[int, memoryview, int], int] = os.pwrite,
    ) -> None:
        """A reader waits for up to *read_timeout_s*; *write* stands for os.pwrite in tests of a failing disk."""
        self._stop = threading.Event()
        limits = Limits(
            tuning.retry_first_s,
            min(tuning.retry_most_s, _RETRY_MOST_S),
            deadline_s=read_timeout_s,
            cancel=self._stop,
        )
        self.last_error: str | None = None
        """Why bytes did not come, and what is done about it; None once some came, if the remote was away."""
        self._failed_at = 0.0
        self._fails_lastingly = False
        self._remote = Retrying(remote, limits, on_retry=self._failing)
        self._tuning = tuning
        self._room = room
        self._contents = Contents(catalog)
        self._catalog = catalog
        self._read_timeout_s = read_timeout_s
        self._manifests = Manifests(catalog, self._remote, read_timeout_s, trio.CapacityLimiter(tuning.fetch_threads))
        self.fetcher = ChunkFetcher(
            self._contents, Packs(catalog), images, self._manifests, self._remote, tuning, read_timeout_s, write
        )
        self._kept = KeptChunks(tuning.kept_bytes, tuning.kept_ahead_bytes)
        self._flights = Flights(self.fetcher, room, self._kept)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the fetches until cancelled."""
        self._stop.clear()  # of an earlier run, which failed
        try:
            await self._flights.run(task_status=task_status)
        finally:
            self._stop.set()

    def _failing(self, error: Exception, wait_s: float = 0.0) -> None:
        self.last_error, self._failed_at = str(error), time.monotonic()
        lasting = isinstance(error, RemoteError) and not error.temporary
        self._fails_lastingly = lasting or isinstance(error, FormatError)

    def _succeeded(self) -> None:
        """Bytes came. That says nothing of an object that is gone or damaged."""
        if not self._fails_lastingly:
            self.last_error = None

    def forget_error(self) -> None:
        """The remote answers, nobody waits for bytes: why some did not come a while ago is past."""
        if self._flights.is_quiet and time.monotonic() - self._failed_at > _REMEMBER_ERROR_S:
            self.last_error = None

    async def content(self, manifest_row: int) -> Content:
        """What a sealed file version consists of. Raises ContentUnavailable."""
        try:
            content = await self._manifests.content(manifest_row)
        except ContentUnavailable as error:
            self._failing(error)
            self.fetcher.doubts.missed_manifest(manifest_row, error)
            raise
        self.fetcher.doubts.found_manifest(manifest_row)
        return content

    async def learn_places(self, manifest_row: int) -> None:
        """Look up where the remote has a published file version, once more. Raises ContentUnavailable."""
        await self._manifests.learn(manifest_row)

    def begin(self, image: Image, content: Content, start: int, end: int) -> None:
        """Have the bytes [start, end) of the file on their way into it; nobody is told when they do not come."""
        try:
            self._flights.start(image, content, _missing(image, content, start, end), Purpose.STORE)
        except OSError as error:
            log.debug("not all of image %016x is fetched: %s", image.id, error)

    async def ensure(self, image: Image, content: Content, start: int, end: int) -> None:
        """On return the bytes [start, end) of the file are in the image file.

        Raises ContentUnavailable (remote gone for longer than the read timeout, object missing or damaged), OSError
        when they cannot be written: ENOSPC at once when the disk has no room for them. Cancelling leaves fetches going
        that others may be waiting for.
        """
        length = self._flights.to_take(image, _missing(image, content, start, end))
        if length and (image.unstored or length > self._room.free_bytes()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await self._arrive(image, content, start, end, Purpose.STORE)

    async def read(self, image: Image, content: Content, start: int, end: int) -> bytes:
        """The bytes [start, end) of the file, whether or not the disk has room for them.

        Raises ContentUnavailable, OSError when the image cannot be read.
        """
        held = await self._arrive(image, content, start, end, Purpose.READ)
        data = os.pread(image.fd, end - start, start)
        if not held:
            return data
        filled = bytearray(data)
        for offset, raw in held.items():
            first, last = max(start, offset), min(end, offset + len(raw))
            filled[first - start : last - start] = memoryview(raw)[first - offset : last - offset]
        return bytes(filled)

    async def quiet(self) -> None:
        """Return when nothing is being fetched."""
        await self._flights.quiet()

    def has_room(self, length: int) -> bool:
        """Whether *length* bytes that nobody waits for may be stored now."""
        return self._room.has(length)

    async def room_for(self, image: Image, content: Content, start: int, end: int) -> None:
        """Return when what is missing of [start, end) may be stored beside what is being saved.

        Raises OSError (ENOSPC) when the disk has no room for it at all.
        """
        while length := self._flights.to_take(image, _missing(image, content, start, end)):
            if self._room.has(length):
                return
            if length > self._room.free_bytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.last_error = "what is left of the disk is kept for the save that is going on; waiting for its end"
            await trio.sleep(_LOOK_FOR_ROOM_S)

    def read_ahead(self, image: Image, content: Content, position: int, reading: Reading) -> None:
        """A reader read up to *position*, as *reading* knows: fetch ahead of it in the background."""
        most = self._tuning.readahead_bytes
        asked = reading.asked(position)
        if asked - position > most * 3 // 4:  # as below; but most reads end here, and the disk need not be asked
            return
        if image.unstored or not self._room.has(most):
            most = min(most, self._tuning.kept_ahead_bytes // 2)
        end = window_end(content, reading, position, most)
        # Not before a quarter of it was used, so that requests are long, and the line is not idle between them.
        if asked - position > (end - position) * 3 // 4:
            return
        missing = [each for each in _missing(image, content, asked, end) if each.chunk.id not in self._kept]
        for each in missing:
            reading.ask(each.offset, each.offset + each.chunk.length)
        self._flights.start(image, content, missing, Purpose.AHEAD)

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
        if self._contents.image_is_whole(image.id):  # opened anew meanwhile, and perhaps un-sealed and written
            return
        with self._catalog.transaction():
            self._contents.add_locations(image.id, [(ChunkId(chunk), at, length) for chunk, at, length in written])
            gone = set(written)
            image.unrecorded[:] = [each for each in image.unrecorded if each not in gone]
            if not image.unrecorded and image.present.covers(0, size):
                self._contents.set_image_whole(image.id)
                image.present = None

    # Within

    async def _arrive(self, image: Image, content: Content, start: int, end: int, purpose: Purpose) -> dict[int, Raw]:
        """Wait for the bytes [start, end); gives by offset those chunks of them that did not go into the image."""
        began = time.monotonic()
        deadline = trio.current_time() + self._read_timeout_s
        held: dict[int, Raw] = {}
        cause: Exception | None = None
        while flights := self._start(image, content, start, end, purpose, held):
            for offset, flight in flights.items():
                if not flight.done.is_set():
                    with trio.move_on_at(deadline):
                        await flight.done.wait()
                late = trio.current_time() >= deadline
                if not flight.done.is_set():
                    why = cause or self._remote.failure_since(began) or "no answer"
                    missed = ContentUnavailable(f"the remote did not deliver in time: {why}")
                    self._failing(missed)
                    raise missed from cause
                if flight.raw is not None and purpose is Purpose.READ:
                    held[offset] = flight.raw
                elif isinstance(flight.error, Stopped) and not late:
                    break  # begin another
                elif isinstance(flight.error, OSError | ContentUnavailable):
                    raise flight.error
                elif flight.error is not None:
                    cause = flight.error
                    self._failing(cause)
                    if late or not (isinstance(cause, RemoteError) and cause.temporary):
                        raise ContentUnavailable(f"bytes cannot be had from the remote: {cause}") from cause
                    break  # a fetch that somebody began earlier ran out of its own time: begin another
                self._succeeded()
                deadline = trio.current_time() + self._read_timeout_s
        return held

    def _start(
        self, image: Image, content: Content, start: int, end: int, purpose: Purpose, held: dict[int, Raw]
    ) -> dict[int, Flight]:
        """Flights of what is still missing of [start, end); what a reader finds in memory goes into *held*."""
        missing = [each for each in _missing(image, content, start, end) if each.offset not in held]
        if purpose is Purpose.READ:
            for each in missing:
                raw = self._kept.read(each.chunk.id)
                if raw is not None:
                    held[each.offset] = raw
            missing = [each for each in missing if each.offset not in held]
        return self._flights.start(image, content, missing, purpose) if missing else {}


def _missing(image: Image, content: Content, start: int, end: int) -> list[Wanted]:
    """The chunks in [start, end) of the file that are not in the image, in order."""
    present = image.present
    if present is None:
        return []
    offsets = content.offsets()
    each = [Wanted(content.chunks[index], offsets[index]) for index in content.at(start, end)]
    return [one for one in each if not present.covers(one.offset, one.offset + one.chunk.length)]
