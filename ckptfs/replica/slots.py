"""How many range requests may be going on: by number, and by the bytes that they bring into memory.

Who calls: the event loop's thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class Slots:
    """At most *most* holders, who together brought *most_bytes*; one that brings more than that is alone."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._holders = self._bytes = 0
        self._turn = trio.Lock()  # first come, first served: a large one is not overtaken for ever
        self._left = trio.Event()

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold a slot for *size_bytes*; waits for it."""
        async with self._turn:
            while self._holders and (self._holders >= self._most or self._bytes + size_bytes > self._most_bytes):
                self._left = trio.Event()
                await self._left.wait()
            self._holders += 1
            self._bytes += size_bytes
        try:
            yield
        finally:
            self._holders -= 1
            self._bytes -= size_bytes
            self._left.set()
