"""Chunks on their way: into images where the disk has room, else into memory.

A flight belongs to (image, chunk's offset): everyone who needs it waits for the same one, and it goes on when a waiter
is cancelled. Flights work on a descriptor of their own, so that closing the image's never lets them write somewhere
else. `Image.present` is the caller's object; it is updated here, on the loop, after the bytes are in the file.

Who calls: the event loop's thread; flights take off while `run` is running.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import trio

from ckptfs.encoding.manifest import Content
from ckptfs.errors import ContentUnavailable
from ckptfs.ids import ImageId
from ckptfs.local.images import Image
from ckptfs.local.room import Room
from ckptfs.replica.chunks import ChunkFetcher, Outcome, Wanted
from ckptfs.replica.kept import KeptChunks, Raw

log = logging.getLogger(__name__)


class Stopped(ContentUnavailable):
    """Fetching stopped in the middle; what is asked for now comes when it goes on."""

    def __init__(self) -> None:
        super().__init__("reading from the remote has stopped")


class Purpose(Enum):
    """What a chunk is fetched for."""

    READ = "a reader waits for it: memory will do"
    AHEAD = "a reader may want it soon: memory will do, if it is not full of such"
    STORE = "it must be in the image"


@dataclass
class Flight:
    """A chunk on its way."""

    images: list[Image]
    stored: bool
    """Whether it is to be written into the image: room was taken for it."""
    awaited: bool
    """Whether a reader waits for it."""
    done: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None
    raw: Raw | None = None
    """The bytes, when they did not go into the image; `error` says why if they should have."""


class Flights:
    """The table of flights; see the module."""

    def __init__(self, fetcher: ChunkFetcher, room: Room, kept: KeptChunks) -> None:
        self._fetcher = fetcher
        self._room = room
        self._kept = kept
        self._flights: dict[tuple[ImageId, int], Flight] = {}
        self._quiet = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._waiting: list[tuple[ImageId, int | None, Content, dict[int, tuple[Wanted, Flight]]]] = []
        """What is to be fetched once `run` is running, again."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the fetches until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                nursery.start_soon(self._fetch, *each)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # before those who wait hear of it

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way."""
        return not self._flights

    async def quiet(self) -> None:
        """Return when nothing is on its way."""
        while self._flights:
            await self._quiet.wait()

    def start(self, image: Image, content: Content, wanted: Iterable[Wanted], purpose: Purpose) -> dict[int, Flight]:
        """The flights of *wanted* chunks by offset, begun where there was none. Chunks ahead may be left out.

        Raises OSError (ENOSPC) when the disk has no room for what must be stored; others before it are on their way.
        """
        flights: dict[int, Flight] = {}
        begun: list[Wanted] = []
        left_out = False
        for each in wanted:
            flight = self._flights.get((image.id, each.offset))
            if flight is None:
                flight = self._begin(image, each, purpose)
                if flight is None:
                    left_out = True
                    break
                begun.append(each)
            elif not any(known is image for known in flight.images):
                flight.images.append(image)
            flight.awaited |= purpose is Purpose.READ
            flights[each.offset] = flight
        self._launch(image, content, [(each, flights[each.offset]) for each in begun])
        if left_out and purpose is Purpose.STORE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return flights

    def to_take(self, image: Image, wanted: Iterable[Wanted]) -> int:
        """How many bytes of the disk's room *wanted* chunks still take: not those that are on their way there."""
        flights = ((each, self._flights.get((image.id, each.offset))) for each in wanted)
        return sum(each.chunk.length for each, flight in flights if flight is None or not flight.stored)

    # Within

    def _begin(self, image: Image, wanted: Wanted, purpose: Purpose) -> Flight | None:
        """A new flight; None when the disk has no room for it, and memory is no use."""
        length = wanted.chunk.length
        take = self._room.demand if purpose is Purpose.STORE else self._room.take
        stored = not image.unstored and take(length)
        if not stored:
            if purpose is Purpose.STORE or (purpose is Purpose.AHEAD and not self._kept.takes_ahead(length)):
                return None
            self._kept.coming_bytes += length
        flight = self._flights[image.id, wanted.offset] = Flight([image], stored, awaited=False)
        if self._quiet.is_set():
            self._quiet = trio.Event()
        return flight

    def _launch(self, image: Image, content: Content, begun: Sequence[tuple[Wanted, Flight]]) -> None:
        for stored in (True, False):
            part = {wanted.offset: (wanted, flight) for wanted, flight in begun if flight.stored is stored}
            if not part:
                continue
            fd = os.dup(image.fd) if stored else None
            if self._nursery is None:
                self._waiting.append((image.id, fd, content, part))
            else:
                self._nursery.start_soon(self._fetch, image.id, fd, content, part)

    async def _fetch(
        self, image: ImageId, fd: int | None, content: Content, flying: dict[int, tuple[Wanted, Flight]]
    ) -> None:
        def landed(outcome: Outcome) -> None:
            self._landed(image, *flying.pop(outcome.wanted.offset), outcome)

        error: Exception = Stopped()
        try:
            await self._fetcher.fetch(content, [wanted for wanted, _ in flying.values()], image, fd, landed)
        except Exception as failure:
            log.exception("fetching into image %016x failed", image)
            error = failure
        finally:
            if fd is not None:
                os.close(fd)
            self._fail(image, flying, error)

    def _landed(self, image: ImageId, wanted: Wanted, flight: Flight, outcome: Outcome) -> None:
        chunk, offset = wanted.chunk, wanted.offset
        if outcome.raw is not None:
            self._kept.add(chunk.id, outcome.raw, read=flight.awaited)
            if outcome.error is not None and self._room.refused():
                log.warning("the disk does not take bytes, which are served from memory: %s", outcome.error)
        elif outcome.error is None:
            for index, each in enumerate(flight.images):
                if each.present is not None:
                    each.present.add(offset, offset + chunk.length)
                    if index == 0:
                        each.unrecorded.append((chunk.id, offset, chunk.length))
        self._end(image, wanted, flight, outcome.error, outcome.raw)

    def _fail(self, image: ImageId, flying: dict[int, tuple[Wanted, Flight]], error: Exception) -> None:
        """Whatever has not landed by now does not."""
        for wanted, flight in flying.values():
            self._end(image, wanted, flight, error, None)
        flying.clear()

    def _end(self, image: ImageId, wanted: Wanted, flight: Flight, error: Exception | None, raw: Raw | None) -> None:
        del self._flights[image, wanted.offset]
        if flight.stored:
            self._room.landed(wanted.chunk.length)
        else:
            self._kept.coming_bytes -= wanted.chunk.length
        flight.error, flight.raw = error, raw
        flight.done.set()
        if not self._flights:
            self._quiet.set()
