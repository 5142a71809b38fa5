"""Build a pack: read its chunks from images, verify them, encode them, and write the pack into a file. Blocking."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from itertools import starmap
from typing import NamedTuple

from ckptfs.encoding.codec import delta_shares, encode, encode_delta
from ckptfs.encoding.pack import PackBuilder
from ckptfs.ids import ChunkId, ObjectId, digest
from ckptfs.pieces import pays

_DESCRIPTORS = 16
"""Images held open while a pack is built; a pack of small files has thousands."""
_WRITTEN_AT_ONCE = 4 << 20

PackRow = tuple[ChunkId, int, int, int, int, ChunkId | None]
"""The fields of a PackedChunk."""


Places = Sequence[tuple[str, int]]
"""(file, offset) where a chunk may be found."""


class Against(NamedTuple):
    """A chunk of the same length that another may be a delta against."""

    id: ChunkId
    places: Places
    average_bytes: float
    """Encoded, of it and its deltas so far: when one more would take more, the next chunk becomes what others are
    against."""


class Wanted(NamedTuple):
    """A chunk that is to be packed."""

    id: ChunkId
    length: int
    dtype: str | None
    places: Places
    against: tuple[ChunkId, Places, float] | None = None
    """The fields of an `Against`."""


class Built(NamedTuple):
    """A pack that lies in the file; or, when `missing` is not empty, none."""

    name: ObjectId
    size: int
    rows: Sequence[PackRow]
    missing: Sequence[ChunkId]
    """Chunks that are not where they are said to be."""
    notes: Sequence[str]
    """What the log should know."""


def build_pack(wanted: Sequence[Wanted], target: str, label: str) -> Built:
    """Write the pack of *wanted*, in order, into the memfd *target* that was made with the name *label*.

    Every byte is hashed again (invariant 6): what is packed has the name it is packed under. Raises OSError, also when
    *target* is something else by now: who asked may have closed it.
    """
    builder = PackBuilder()
    missing: list[ChunkId] = []
    reader = _Reader()
    fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if label not in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(f"{target} is not the pack {label}")
        for chunk in starmap(Wanted, wanted):
            data = reader.read(chunk.id, chunk.length, chunk.places)
            if data is None:
                missing.append(chunk.id)
            elif not missing:
                builder.add(chunk.id, chunk.length, *_encode(chunk, data, reader))
                if builder.undrained >= _WRITTEN_AT_ONCE:
                    _write(fd, builder.drain())
        if missing:
            return Built(ObjectId(b""), 0, (), missing, reader.notes)
        name, rest, rows = builder.finish()
        _write(fd, rest)
        packed = [(row.id, row.offset, row.length, row.raw_length, row.codec, row.base) for row in rows]
        return Built(name, os.fstat(fd).st_size, packed, (), reader.notes)
    finally:
        os.close(fd)
        reader.close()


def _encode(chunk: Wanted, data: bytes, reader: _Reader) -> tuple[int, bytes, ChunkId | None]:
    """Codec, encoded bytes, and what they are a delta against."""
    if chunk.against is not None:
        base = Against._make(chunk.against)
        base_data = reader.read(base.id, chunk.length, base.places)
        if base_data is not None:
            whole, delta = delta_shares(data, base_data, chunk.dtype)
            if pays(whole, delta, chunk.length, base.average_bytes):
                return *encode_delta(data, base_data, chunk.dtype), base.id
    return *encode(data, chunk.dtype), None


def _write(fd: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Reader:
    """Reads chunks from images, of which it keeps some open."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._unreadable: set[str] = set()
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def read(self, chunk: ChunkId, length: int, places: Places) -> bytes | None:
        """The first copy that has the right digest; None when there is none."""
        for path, offset in places:
            try:
                data = os.pread(self._open(path), length, offset)
            except FileNotFoundError:
                continue
            except OSError as error:
                if path not in self._unreadable:
                    self._unreadable.add(path)
                    self.notes.append(f"{path} cannot be read at {offset}: {error}")
                continue
            if len(data) == length and digest(data) == chunk:
                return data
            self.notes.append(
                f"{path} has other bytes at {offset} than when chunk {chunk.hex()[:16]} was sealed"
            )
        return None

    def _open(self, path: str) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) >= _DESCRIPTORS:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[path]

    def close(self) -> None:
        for fd in self._descriptors.values():
            os.close(fd)
