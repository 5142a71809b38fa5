"""Memory that a thread uses again and again: fresh pages cost as much as parting or decoding a chunk into them."""

from __future__ import annotations

import threading

_KEPT_BYTES = 16 << 20


class Scratch(threading.local):
    """A buffer for each thread, which goes with the thread."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def buffer(self, length: int) -> memoryview:
        """*length* bytes of anything, valid until the thread asks again. Above 16 MiB they are not kept."""
        if length > _KEPT_BYTES:
            return memoryview(bytearray(length))
        if len(self._kept) < length:
            self._kept = bytearray(length)
        return memoryview(self._kept)[:length]
