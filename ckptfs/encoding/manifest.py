"""A sealed file version: its size, holes and chunks (`Content`), and where the remote has them (`Manifest`).

How chunks are cut is left to `ckptfs.formats`, how they are encoded to `codec`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ckptfs.encoding.canonical import OBJECT_LIMIT, dumps, loads, open_object, seal_object
from ckptfs.encoding.features import check_names, demand
from ckptfs.encoding.fields import HEX_32, MOST, array, check_keys, digest_of, integer, mapping, string
from ckptfs.errors import FormatError
from ckptfs.ids import DIGEST_BYTES, ChunkId, ObjectId
from ckptfs.spans import Span

CHUNK_MOST = 64 << 20
"""Most bytes of a chunk, raw or encoded: what a reader must be ready to hold in memory."""
CODEC_MOST = (1 << 16) - 1

_DTYPE = re.compile(r"[a-z0-9_]{1,32}").fullmatch
_DIMENSIONS_MOST = 64


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor lies in its file. For people and for choosing delta bases; nothing is decoded by it."""

    name: str
    dtype: str
    """numpy-like, lower case: float32, bfloat16 ..."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file, bytes."""
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of the file's bytes."""

    id: ChunkId
    length: int
    """Raw bytes, 1 to `CHUNK_MOST`."""
    dtype: str | None
    """What the bytes are elements of, where known."""


@dataclass(frozen=True)
class Content:
    """One sealed file version, without where its chunks live."""

    size: int
    holes: tuple[Span, ...]
    """The application's own holes: ordered, disjoint, not touching."""
    chunks: tuple[Chunk, ...]
    """In file order; they fill ``[0, size)`` minus the holes exactly, and none spans a hole."""
    tensors: tuple[TensorSpan, ...] = ()
    """In the order in which the format was read; they may overlap (views)."""

    @cached_property
    def _offsets(self) -> list[int]:
        offsets = []
        at = 0
        holes = iter(self.holes)
        hole_start, hole_end = next(holes, (self.size, self.size))
        for chunk in self.chunks:
            if at == hole_start:
                at = hole_end
                hole_start, hole_end = next(holes, (self.size, self.size))
            offsets.append(at)
            at += chunk.length
        return offsets

    def offsets(self) -> list[int]:
        """The file offset of each chunk. Computed once; not to be changed."""
        return self._offsets

    def at(self, start: int, end: int) -> range:
        """Indexes of the chunks that overlap ``[start, end)``; empty when there are none."""
        if start >= end:
            return range(0)
        offsets = self._offsets
        first = bisect_right(offsets, start) - 1
        if first < 0 or offsets[first] + self.chunks[first].length <= start:
            first += 1
        return range(first, max(first, bisect_left(offsets, end)))


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a chunk lies on the remote."""

    pack: ObjectId
    offset: int
    """In the pack object, bytes."""
    length: int
    """Encoded bytes there."""
    codec: int
    """Codec id, see `codec`."""
    base: ChunkId | None
    """The chunk that a delta is against."""


@dataclass(frozen=True)
class Manifest:
    """The remote object: a file version's content and the place of each of its chunks."""

    content: Content
    places: tuple[Placed, ...]
    """One per chunk, in the same order."""


_NEEDED = frozenset({"chunks", "holes", "size", "tensors"})
_CONTENT_KEYS = _NEEDED | {"requires", "optional"}
_MANIFEST_NEEDED = _NEEDED | {"packs"}
_MANIFEST_KEYS = _MANIFEST_NEEDED | {"requires", "optional"}


def _check(content: Content) -> None:
    """Raise FormatError unless holes are in order and the chunks fill the rest of the file exactly."""
    size = integer(content.size, "size")
    last = -1
    for start, end in content.holes:
        if type(start) is not int or type(end) is not int or not last < start < end <= size:
            raise FormatError("holes are not ordered, disjoint ranges within the file")
        last = end
    at = 0
    holes = iter(content.holes)
    hole_start, hole_end = next(holes, (size, size))
    for chunk in content.chunks:
        if at == hole_start:
            at = hole_end
            hole_start, hole_end = next(holes, (size, size))
        at += chunk.length
        if at > hole_start:
            raise FormatError("a chunk reaches past the end of the file or into a hole")
    if at == hole_start:
        at = hole_end
    if at != size or next(holes, None) is not None:
        raise FormatError("the chunks do not fill the file")
    for tensor in content.tensors:
        if not 0 <= tensor.start <= tensor.end <= size:
            raise FormatError(f"tensor {tensor.name[:80]!r} lies outside the file")


def _read_dtype(value: object) -> str | None:
    if value is not None and (type(value) is not str or not _DTYPE(value)):
        raise FormatError("dtype is not a short lower-case name")
    return value


def _chunk(chunk_hex: object, length: object, dtype: object, seen: dict[object, str | None]) -> Chunk:
    """One checked chunk; *seen* keeps each dtype once, a hundred thousand equal strings cost memory."""
    if type(chunk_hex) is not str or not HEX_32(chunk_hex):
        raise FormatError("chunk id is not 64 hex digits")
    if type(length) is not int or not 0 < length <= CHUNK_MOST:
        raise FormatError(f"chunk length is not from 1 to {CHUNK_MOST}")
    if type(dtype) is not str:
        dtype = _read_dtype(dtype)
    elif dtype in seen:
        dtype = seen[dtype]
    else:
        dtype = seen.setdefault(dtype, _read_dtype(dtype))
    return Chunk(ChunkId(bytes.fromhex(chunk_hex)), length, dtype)


def _read_tensor(row: object) -> TensorSpan:
    if type(row) is not list or len(row) != 5:
        raise FormatError("a tensor is not an array of 5")
    shape = array(row[2], "tensor shape")
    if len(shape) > _DIMENSIONS_MOST:
        raise FormatError(f"a tensor of more than {_DIMENSIONS_MOST} dimensions")
    return TensorSpan(
        string(row[0], "tensor name"),
        string(row[1], "tensor dtype", 32),
        tuple(integer(length, "tensor dimension") for length in shape),
        integer(row[3], "tensor start"),
        integer(row[4], "tensor end"),
    )


def _content(value: dict[str, object], chunks: tuple[Chunk, ...]) -> Content:
    """The checked content in parsed JSON *value*, whose chunk rows were already read."""
    holes = []
    for row in array(value["holes"], "holes"):
        if type(row) is not list or len(row) != 2:
            raise FormatError("a hole is not an array of 2")
        holes.append((row[0], row[1]))
    size = integer(value["size"], "size")
    tensors = tuple(map(_read_tensor, array(value["tensors"], "tensors")))
    content = Content(size, tuple(holes), chunks, tensors)
    _check(content)
    return content


def _fields(content: Content) -> dict[str, object]:
    """What is the same in both encodings."""
    return {
        "holes": content.holes,
        "size": content.size,
        "tensors": [[t.name, t.dtype, t.shape, t.start, t.end] for t in content.tensors],
    }


def _open(data: bytes, needed: frozenset[str], known: frozenset[str], what: str) -> dict[str, object]:
    value = mapping(loads(data), what)
    demand(value.get("requires", []), what)
    check_keys(value, what, needed, known, check_names(value.get("optional", []), what))
    return value


def encode_content(content: Content) -> bytes:
    """*content* for the local catalog: a zstd frame of canonical JSON. Raises FormatError when it would not decode."""
    fields = _fields(content) | {"chunks": [[c.id.hex(), c.length, c.dtype] for c in content.chunks]}
    _verify(fields, content, ())
    return seal_object(dumps(fields))


def decode_content(data: bytes, limit: int = OBJECT_LIMIT) -> Content:
    """The inverse of `encode_content`. Raises FormatError."""
    value = _open(open_object(data, None, limit), _NEEDED, _CONTENT_KEYS, "content")
    seen: dict[object, str | None] = {}
    chunks = []
    for row in array(value["chunks"], "chunks"):
        if type(row) is not list or len(row) != 3:
            raise FormatError("a chunk is not an array of 3")
        chunks.append(_chunk(row[0], row[1], row[2], seen))
    return _content(value, tuple(chunks))


def encode_manifest(manifest: Manifest) -> bytes:
    """*manifest* as canonical JSON; its digest is the object's name. Raises FormatError when it would not decode."""
    content, places = manifest.content, manifest.places
    packs: dict[ObjectId, int] = {}
    rows = []
    for chunk, place in zip(content.chunks, places, strict=True):
        number = packs.setdefault(place.pack, len(packs))
        base = None if place.base is None else place.base.hex()
        rows.append(
            [chunk.id.hex(), chunk.length, chunk.dtype, number, place.offset, place.length, place.codec, base]
        )
    fields = _fields(content) | {"chunks": rows, "packs": [pack.hex() for pack in packs]}
    _verify(fields, content, places)
    return dumps(fields)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in canonical JSON *data*, whose digest is checked by `open_object`. Raises FormatError."""
    value = _open(data, _MANIFEST_NEEDED, _MANIFEST_KEYS, "manifest")
    packs = [ObjectId(digest_of(pack, "pack")) for pack in array(value["packs"], "packs")]
    if len(set(packs)) != len(packs):
        raise FormatError("a manifest names a pack twice")
    seen: dict[object, str | None] = {}
    chunks = []
    places = []
    used = 0
    for row in array(value["chunks"], "chunks"):
        if type(row) is not list or len(row) != 8:
            raise FormatError("a chunk is not an array of 8")
        chunk = _chunk(row[0], row[1], row[2], seen)
        number = row[3]
        # packs are numbered by first use, so that one manifest has one encoding
        if type(number) is not int or not 0 <= number <= used or number >= len(packs):
            raise FormatError("chunks do not name the packs in their order")
        used += number == used
        chunks.append(chunk)
        places.append(read_place(chunk.id, packs[number], row[4], row[5], row[6], row[7]))
    if used != len(packs):
        raise FormatError("a manifest names a pack that it does not use")
    return Manifest(_content(value, tuple(chunks)), tuple(places))


def read_place(chunk: ChunkId, pack: ObjectId, offset: object, length: object, codec: object, base: object) -> Placed:
    """A checked place of *chunk*. Raises FormatError."""
    if type(length) is not int or not 0 < length <= CHUNK_MOST:
        raise FormatError(f"encoded length is not from 1 to {CHUNK_MOST}")
    if type(offset) is not int or not 0 <= offset <= MOST - length:
        raise FormatError("offset in the pack is out of range")
    if type(codec) is not int or not 0 <= codec <= CODEC_MOST:
        raise FormatError("codec id is out of range")
    if base is None:
        return Placed(pack, offset, length, codec, None)
    against = ChunkId(digest_of(base, "base"))
    if against == chunk:
        raise FormatError("a chunk is a delta against itself")
    return Placed(pack, offset, length, codec, against)


def _verify(fields: dict[str, object], content: Content, places: Sequence[Placed]) -> None:
    """Refuse to encode what would not decode: a damaged manifest must not get a name."""
    for chunk in content.chunks:
        if len(chunk.id) != DIGEST_BYTES or type(chunk.length) is not int or not 0 < chunk.length <= CHUNK_MOST:
            raise FormatError("chunk id or length is out of range")
        if chunk.dtype is not None:
            _read_dtype(chunk.dtype)
    for place in places:
        if not (
            len(place.pack) == DIGEST_BYTES
            and 0 < place.length <= CHUNK_MOST
            and 0 <= place.offset <= MOST - place.length
            and 0 <= place.codec <= CODEC_MOST
            and (place.base is None or len(place.base) == DIGEST_BYTES)
        ):
            raise FormatError("a chunk's place is out of range")
    for tensor in content.tensors:
        _read_tensor([tensor.name, tensor.dtype, list(tensor.shape), tensor.start, tensor.end])
    _check(content)
