"""Packs: many encoded chunks in one remote object, then an index of them, then a trailer.

    encoded chunks, back to back from offset 0
    index     zstd frame of canonical JSON: columns chunks, stored, lengths, codecs, bases
    trailer   length of the index frame, 8 bytes little-endian, then MAGIC

The index lets a pack be understood without any other object. The name is the digest of the chunk list with codecs and
encoded lengths, so two packs of one name have each chunk at the same place although another zstd may have written them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptfs.encoding.canonical import OBJECT_LIMIT, dumps, loads, object_id, open_object, seal_object
from ckptfs.encoding.columns import (
    CHUNK_MOST,
    CODEC_MOST,
    check_ends,
    hexes,
    optional_hexes,
    read_bases,
    read_digests,
    read_integers,
)
from ckptfs.encoding.features import check_names, demand
from ckptfs.encoding.fields import MOST, check_keys, mapping
from ckptfs.errors import FormatError
from ckptfs.ids import ChunkId, ObjectId

MAGIC = b"ckptpk01"
_TRAILER = struct.Struct("<Q8s")
TRAILER_BYTES = _TRAILER.size
_NEEDED = frozenset({"chunks", "stored", "lengths", "codecs", "bases"})
_KEYS = _NEEDED | {"requires", "optional"}


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """One chunk in a pack."""

    id: ChunkId
    offset: int
    """In the pack object, bytes."""
    length: int
    """Encoded bytes."""
    raw_length: int
    codec: int
    base: ChunkId | None
    """The chunk that a delta is against."""


def write_packed(chunks: Sequence[PackedChunk]) -> dict[str, object]:
    """*chunks* as columns, without their offsets."""
    return {
        "chunks": hexes(chunk.id for chunk in chunks),
        "stored": [chunk.length for chunk in chunks],
        "lengths": [chunk.raw_length for chunk in chunks],
        "codecs": [chunk.codec for chunk in chunks],
        "bases": optional_hexes(chunk.base for chunk in chunks),
    }


def read_packed(value: dict[str, object]) -> tuple[PackedChunk, ...]:
    """The inverse, checked; offsets are column offsets, or where there is none, chunk lies after chunk."""
    ids = [ChunkId(chunk) for chunk in read_digests(value["chunks"], "chunks")]
    stored = read_integers(value, "stored", len(ids), 1, CHUNK_MOST)
    lengths = read_integers(value, "lengths", len(ids), 1, CHUNK_MOST)
    codecs = read_integers(value, "codecs", len(ids), 0, CODEC_MOST)
    bases = read_bases(value["bases"], ids)
    if len(set(ids)) != len(ids):
        raise FormatError("a pack holds a chunk twice")
    if "offsets" in value:
        offsets = read_integers(value, "offsets", len(ids), 0, MOST)
        check_ends(offsets, stored)
    else:
        offsets = list(accumulate(stored, initial=0))[: len(ids)]
    return tuple(map(PackedChunk, ids, offsets, stored, lengths, codecs, bases))


def pack_name(chunks: tuple[PackedChunk, ...]) -> ObjectId:
    """The name of a pack that holds *chunks*, in order."""
    return object_id(dumps([[c.id.hex(), c.codec, c.base and c.base.hex(), c.length] for c in chunks]))


class PackBuilder:
    """Collects encoded chunks into one pack. Not for use from several threads."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._drained = 0
        self._chunks: dict[ChunkId, PackedChunk] = {}

    def add(
        self, chunk: ChunkId, raw_length: int, codec: int, data: bytes | bytearray | memoryview,
        base: ChunkId | None = None,
    ) -> None:  # fmt: skip
        """Append *chunk*, encoded as *data*.

        Raises ValueError when it is in the pack already, FormatError when something is out of range.
        """
        if chunk in self._chunks:
            raise ValueError(f"chunk {chunk.hex()} is in this pack already")
        packed = PackedChunk(chunk, self.size, len(data), raw_length, codec, base)
        read_packed(write_packed([packed]))
        self._data += data
        self._chunks[chunk] = packed

    @property
    def size(self) -> int:
        """Encoded bytes so far, without the index."""
        return self._drained + len(self._data)

    @property
    def undrained(self) -> int:
        """Bytes that `drain` would return."""
        return len(self._data)

    def drain(self) -> bytearray:
        """The object's bytes so far, as far as they were not drained before: for who writes them as they come."""
        data, self._data = self._data, bytearray()
        self._drained += len(data)
        return data

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._chunks

    def finish(self) -> tuple[ObjectId, bytearray, tuple[PackedChunk, ...]]:
        """(name, the object's bytes less what was drained, what is where). The builder is empty afterwards."""
        chunks = tuple(self._chunks.values())
        index = seal_object(dumps(write_packed(chunks)))
        data = self._data
        data += index
        data += _TRAILER.pack(len(index), MAGIC)
        self._data, self._drained, self._chunks = bytearray(), 0, {}
        return pack_name(chunks), data, chunks


def tail_bytes(trailer: bytes | bytearray | memoryview, object_size: int) -> int:
    """How many bytes at the end of a pack `read_index` needs, given at least its last `TRAILER_BYTES`.

    Raises FormatError when it is no pack.
    """
    if len(trailer) < TRAILER_BYTES or object_size < TRAILER_BYTES:
        raise FormatError("a pack is shorter than its trailer")
    length, magic = _TRAILER.unpack(bytes(trailer[-TRAILER_BYTES:]))
    if magic != MAGIC or not 0 < length <= object_size - TRAILER_BYTES:
        raise FormatError("this object does not end as a pack does")
    return int(length) + TRAILER_BYTES


def read_index(
    tail: bytes | bytearray | memoryview, object_size: int, name: ObjectId | None = None, limit: int = OBJECT_LIMIT
) -> tuple[PackedChunk, ...]:
    """What lies where in a pack of *object_size* bytes, from its end *tail* (`tail_bytes` or more of it).

    Raises FormatError on damage, and when *name* is given and is not this pack's.
    """
    needed = tail_bytes(tail, object_size)
    if len(tail) < needed:
        raise FormatError(f"the index needs the last {needed} bytes of the pack, here are {len(tail)}")
    frame = bytes(tail[len(tail) - needed : len(tail) - TRAILER_BYTES])
    value = mapping(loads(open_object(frame, None, limit)), "pack index")
    demand(value.get("requires", []), "pack")
    check_keys(value, "pack index", _NEEDED, _KEYS, check_names(value.get("optional", []), "pack"))
    found = read_packed({key: value[key] for key in _NEEDED})
    if sum(chunk.length for chunk in found) + needed != object_size:
        raise FormatError("the chunks do not fill the pack")
    if name is not None and pack_name(found) != name:
        raise FormatError(f"pack {name.hex()} holds other chunks")
    return found
