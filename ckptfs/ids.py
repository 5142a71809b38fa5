"""Identities, told apart by type, and the hybrid logical clock.

| type | what it is |
|---|---|
| ChunkId | BLAKE3-256 digest of a chunk's raw bytes, 32 bytes |
| ObjectId | BLAKE3-256 digest that names a remote object (manifest, tree, pack, index), 32 bytes |
| FileId | 16 random bytes, the same for one file or directory on every machine |
| WriterId | 16 random bytes, one store's identity in a shared remote |
| ImageId | 63 random bits, names a local image file |
| Inode | local inode number; the root is 1 |
| Stamp | hybrid logical clock value, 63 bits |
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import NewType

from blake3 import blake3

ChunkId = NewType("ChunkId", bytes)
ObjectId = NewType("ObjectId", bytes)
FileId = NewType("FileId", bytes)
WriterId = NewType("WriterId", bytes)
ImageId = NewType("ImageId", int)
Inode = NewType("Inode", int)
Stamp = NewType("Stamp", int)

ROOT_INODE = Inode(1)
ROOT_FILE_ID = FileId(bytes(16))  # every writer of a remote has the same root

DIGEST_BYTES = 32


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256 of *data* (https://github.com/BLAKE3-team/BLAKE3-specs), 32 bytes."""
    return blake3(data).digest()


def new_file_id() -> FileId:
    return FileId(os.urandom(16))


def new_writer_id() -> WriterId:
    return WriterId(os.urandom(16))


def new_image_id() -> ImageId:
    """Random rather than counted: an id must not come back after a power cut lost the row but not the file."""
    return ImageId(secrets.randbits(63) or 1)


class Clock:
    """A hybrid logical clock (Kulkarni et al., 2014): wall-clock milliseconds << 16 | counter.

    Stamps from one clock strictly rise, also when the wall clock steps back; after `see(other)` they are above *other*.
    """

    COUNTER_BITS = 16

    def __init__(self, last: Stamp = Stamp(0), now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._last = int(last)
        self._now_ms = now_ms

    def tick(self) -> Stamp:
        """A stamp above every earlier one and every one seen."""
        self._last = max(self._now_ms() << self.COUNTER_BITS, self._last + 1)
        return Stamp(self._last)

    def see(self, other: Stamp) -> None:
        """Never again return a stamp at or below *other*."""
        self._last = max(self._last, int(other))

    @property
    def last(self) -> Stamp:
        return Stamp(self._last)


def stamp_time_s(stamp: Stamp) -> float:
    """The wall-clock part of *stamp*, seconds since 1970."""
    return (int(stamp) >> Clock.COUNTER_BITS) / 1000
