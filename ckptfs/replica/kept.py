"""Raw chunks kept in memory while the disk has no room for them: a reader asks for a chunk in many small reads.

Bounded in bytes. What was fetched ahead of readers and not read yet is given up last, and bounded by itself, so that
fetching ahead never drives out what it fetched before.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from ckptfs.ids import ChunkId

Raw = bytes | bytearray

_UNREAD_S = 10.0
"""Whoever they were fetched for reads no more."""


class KeptChunks:
    """Chunks by id; `coming_bytes` of others are on their way."""

    def __init__(self, most_bytes: int, ahead_bytes: int, *, now: Callable[[], float] = time.monotonic) -> None:
        """*ahead_bytes* of them at most were fetched ahead, or are on their way."""
        self._most_bytes = most_bytes
        self._ahead_bytes = ahead_bytes
        self._now = now
        self._read: OrderedDict[ChunkId, Raw] = OrderedDict()
        self._unread: OrderedDict[ChunkId, tuple[Raw, float]] = OrderedDict()
        self._read_bytes = self._unread_bytes = 0
        self.coming_bytes = 0

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._read or chunk in self._unread

    @property
    def bytes(self) -> int:
        return self._read_bytes + self._unread_bytes

    def read(self, chunk: ChunkId) -> Raw | None:
        """The bytes of *chunk*, if it is kept."""
        if chunk in self._unread:
            self._now_read(chunk)
        elif chunk in self._read:
            self._read.move_to_end(chunk)
        else:
            return None
        return self._read[chunk]

    def add(self, chunk: ChunkId, raw: Raw, *, read: bool) -> None:
        """Keep *raw*; not *read*: it was fetched ahead."""
        if chunk in self:
            return
        if read:
            self._read[chunk] = raw
            self._read_bytes += len(raw)
        else:
            self._unread[chunk] = raw, self._now()
            self._unread_bytes += len(raw)
        while self.bytes > self._most_bytes and len(self._read) + len(self._unread) > 1:
            self._give_up()

    def takes_ahead(self, length: int) -> bool:
        """Whether so many bytes more may be fetched ahead."""
        while self._unread and self._now() - next(iter(self._unread.values()))[1] > _UNREAD_S:
            self._now_read(next(iter(self._unread)))
        return self._unread_bytes + self.coming_bytes + length <= self._ahead_bytes

    def _now_read(self, chunk: ChunkId) -> None:
        raw, _ = self._unread.pop(chunk)
        self._unread_bytes -= len(raw)
        self._read[chunk] = raw
        self._read_bytes += len(raw)

    def _give_up(self) -> None:
        if len(self._read) > 1 or not self._unread:
            _, raw = self._read.popitem(last=False)
            self._read_bytes -= len(raw)
        else:
            _, (raw, _) = self._unread.popitem(last=False)
            self._unread_bytes -= len(raw)
