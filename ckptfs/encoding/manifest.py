"""A sealed file version: its size, holes and chunks (`Content`), and where the remote has them (`Manifest`).

How chunks are cut is left to `ckptfs.formats`, how they are encoded to `codec`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ckptfs.encoding.canonical import OBJECT_LIMIT, dumps, loads, open_object, seal_object
from ckptfs.encoding.columns import (
    CHUNK_MOST,
    CODEC_MOST,
    check_ends,
    hexes,
    optional_hexes,
    read_bases,
    read_digests,
    read_dtypes,
    read_integers,
)
from ckptfs.encoding.features import DELTA, check_names, demand
from ckptfs.encoding.fields import MOST, array, check_keys, integer, mapping, string
from ckptfs.errors import FormatError
from ckptfs.ids import ChunkId, ObjectId
from ckptfs.spans import Span

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
    """Raw bytes, 1 to `columns.CHUNK_MOST`."""
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

    @cached_property
    def _tensor_ends(self) -> list[int]:
        return sorted(tensor.end for tensor in self.tensors)

    def tensor_end(self, offset: int) -> int:
        """Where the next tensor ends behind *offset*; the end of the file when none does. Computed once."""
        at = bisect_right(self._tensor_ends, offset)
        return self._tensor_ends[at] if at < len(self._tensor_ends) else self.size

    @cached_property
    def _tensor_starts(self) -> list[int]:
        return sorted(tensor.start for tensor in self.tensors)

    def tensor_start(self, offset: int) -> int:
        """Where the last tensor begins that begins before *offset*; 0 when none does. Computed once."""
        at = bisect_left(self._tensor_starts, offset)
        return self._tensor_starts[at - 1] if at else 0

    def tensors_between(self, start: int, end: int) -> int:
        """How many tensors lie in ``[start, end)``, less those that are longer. Computed once."""
        return max(bisect_right(self._tensor_ends, end) - bisect_left(self._tensor_starts, start), 0)

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
    bases: Mapping[ChunkId, Placed] = field(default_factory=dict)
    """Where the chunks lie that the deltas among `places` are against, each once. None of them is a delta."""

    @classmethod
    def of(cls, content: Content, places: Mapping[ChunkId, Placed]) -> Manifest:
        """From the places of chunks and bases. Raises KeyError for one that is not in *places*."""
        found = tuple(places[chunk.id] for chunk in content.chunks)
        return cls(content, found, {each.base: places[each.base] for each in found if each.base is not None})


_CONTENT_NEEDED = frozenset({"chunks", "lengths", "dtypes", "holes", "size", "tensors"})
_MANIFEST_NEEDED = _CONTENT_NEEDED | {"packs", "pack", "offsets", "stored", "codecs", "bases"}
_MAY = frozenset({"requires", "optional"})
_BASE_COLUMNS = frozenset({"chunks", "pack", "offsets", "stored", "codecs"})


def encode_content(content: Content) -> bytes:
    """*content* for the local catalog: a zstd frame of canonical JSON. Raises FormatError when it would not decode."""
    value = _write_content(content)
    _read_content(value)
    return seal_object(dumps(value))


def decode_content(data: bytes, limit: int = OBJECT_LIMIT) -> Content:
    """The inverse of `encode_content`. Raises FormatError."""
    return _read_content(_open(open_object(data, None, limit), "content", _CONTENT_NEEDED)).content()


def encode_manifest(manifest: Manifest) -> bytes:
    """*manifest* as canonical JSON; its digest is the object's name. Raises FormatError when it would not decode."""
    places = manifest.places
    packs: dict[ObjectId, int] = {}
    value = _write_content(manifest.content) | _write_places(places, packs)
    value["bases"] = optional_hexes(place.base for place in places)
    used = dict.fromkeys(place.base for place in places if place.base is not None)
    if used:
        if used.keys() != manifest.bases.keys() or any(place.base for place in manifest.bases.values()):
            raise FormatError("the bases are not those that are used, or are deltas themselves")
        value["requires"] = [DELTA]
        value["based"] = _write_places([manifest.bases[base] for base in used], packs) | {"chunks": hexes(used)}
    value["packs"] = hexes(packs)
    _read_places(value, _read_content(value).ids)
    return dumps(value)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in canonical JSON *data*, whose digest is checked by `open_object`. Raises FormatError."""
    value = _open(data, "manifest", _MANIFEST_NEEDED)
    columns = _read_content(value)
    return _read_places(value, columns.ids).manifest(columns.content())


def _open(data: bytes, what: str, needed: frozenset[str]) -> dict[str, object]:
    value = mapping(loads(data), what)
    if DELTA in demand(value.get("requires", []), what):
        needed = needed | {"based"}
    check_keys(value, what, needed, needed | _MAY, check_names(value.get("optional", []), what))
    return value


def _write_places(places: Sequence[Placed], packs: dict[ObjectId, int]) -> dict[str, object]:
    """Columns; *packs* gets those that are not in it yet."""
    return {
        "pack": [packs.setdefault(place.pack, len(packs)) for place in places],
        "offsets": [place.offset for place in places],
        "stored": [place.length for place in places],
        "codecs": [place.codec for place in places],
    }


def _write_content(content: Content) -> dict[str, object]:
    return {
        "chunks": hexes(chunk.id for chunk in content.chunks),
        "lengths": [chunk.length for chunk in content.chunks],
        "dtypes": [chunk.dtype for chunk in content.chunks],
        "holes": list(map(list, content.holes)),
        "size": content.size,
        "tensors": [[t.name, t.dtype, list(t.shape), t.start, t.end] for t in content.tensors],
    }


class _ContentColumns(NamedTuple):
    """A content in parts, checked. Encoders check by it too, without building a hundred thousand objects."""

    size: int
    holes: tuple[Span, ...]
    ids: list[ChunkId]
    lengths: list[int]
    dtypes: list[str | None]
    tensors: tuple[TensorSpan, ...]

    def content(self) -> Content:
        return Content(self.size, self.holes, tuple(map(Chunk, self.ids, self.lengths, self.dtypes)), self.tensors)


def _read_content(value: dict[str, object]) -> _ContentColumns:
    ids = list(map(ChunkId, read_digests(value["chunks"], "chunks")))
    columns = _ContentColumns(
        integer(value["size"], "size"),
        tuple(map(_read_hole, array(value["holes"], "holes"))),
        ids,
        read_integers(value, "lengths", len(ids), 1, CHUNK_MOST),
        read_dtypes(value["dtypes"], len(ids)),
        tuple(map(_read_tensor, array(value["tensors"], "tensors"))),
    )
    _check_filled(columns.size, columns.holes, columns.lengths)
    for tensor in columns.tensors:
        if not tensor.start <= tensor.end <= columns.size:
            raise FormatError(f"tensor {tensor.name[:80]!r} lies outside the file")
    return columns


class _PlaceColumns(NamedTuple):
    """Places in parts, checked; `packs` are numbers."""

    packs: list[int]
    offsets: list[int]
    stored: list[int]
    codecs: list[int]


class _PlaceTables(NamedTuple):
    """The places of a manifest's chunks, and of what deltas are against, in parts, checked."""

    packs: list[ObjectId]
    chunks: _PlaceColumns
    bases: list[ChunkId | None]
    based: _PlaceColumns

    def manifest(self, content: Content) -> Manifest:
        used = dict.fromkeys(base for base in self.bases if base is not None)
        based = self._placed(self.based, itertools.repeat(None))
        return Manifest(content, tuple(self._placed(self.chunks, self.bases)), dict(zip(used, based, strict=True)))

    def _placed(self, columns: _PlaceColumns, bases: Iterable[ChunkId | None]) -> Iterator[Placed]:
        packs = map(self.packs.__getitem__, columns.packs)
        return map(Placed, packs, columns.offsets, columns.stored, columns.codecs, bases)


def _read_places(value: dict[str, object], ids: list[ChunkId]) -> _PlaceTables:
    packs = [ObjectId(pack) for pack in read_digests(value["packs"], "packs")]
    if len(set(packs)) != len(packs):
        raise FormatError("packs has one twice")
    bases = read_bases(value["bases"], ids)
    used = list(dict.fromkeys(base for base in bases if base is not None))
    table: dict[str, object] = {name: [] for name in _BASE_COLUMNS}
    if "based" in value:
        table = mapping(value["based"], "based")
        check_keys(table, "based", _BASE_COLUMNS, _BASE_COLUMNS, ())
    if read_digests(table["chunks"], "chunks of based") != used:
        raise FormatError("based is not of the bases that are used, in the order of their first use")
    chunks, based = _read_columns(value, len(ids), len(packs)), _read_columns(table, len(used), len(packs))
    # numbered by first use, so that one manifest has one encoding
    if list(dict.fromkeys(chunks.packs + based.packs)) != list(range(len(packs))):
        raise FormatError("packs are not numbered by first use")
    return _PlaceTables(packs, chunks, bases, based)


def _read_columns(table: dict[str, object], count: int, packs: int) -> _PlaceColumns:
    offsets = read_integers(table, "offsets", count, 0, MOST)
    stored = read_integers(table, "stored", count, 1, CHUNK_MOST)
    check_ends(offsets, stored)
    numbers = read_integers(table, "pack", count, 0, max(0, packs - 1))
    return _PlaceColumns(numbers, offsets, stored, read_integers(table, "codecs", count, 0, CODEC_MOST))


def _read_hole(row: object) -> Span:
    if type(row) is not list or len(row) != 2:
        raise FormatError("a hole is not an array of 2")
    return integer(row[0], "start of a hole"), integer(row[1], "end of a hole")


def _read_tensor(row: object) -> TensorSpan:
    if type(row) is not list or len(row) != 5:
        raise FormatError("a tensor is not an array of 5")
    shape = array(row[2], "tensor shape")
    if len(shape) > _DIMENSIONS_MOST:
        raise FormatError(f"a tensor of more than {_DIMENSIONS_MOST} dimensions")
    return TensorSpan(
        string(row[0], "tensor name", OBJECT_LIMIT),  # no name may keep a file from being sealed
        string(row[1], "tensor dtype", 32),
        tuple(integer(length, "tensor dimension") for length in shape),
        integer(row[3], "tensor start"),
        integer(row[4], "tensor end"),
    )


def _check_filled(size: int, holes: Sequence[Span], lengths: Sequence[int]) -> None:
    """Raise FormatError unless holes are in order and the chunks fill the rest of the file exactly."""
    last = -1
    for start, end in holes:
        if not last < start < end <= size:
            raise FormatError("holes are not ordered, disjoint ranges within the file")
        last = end
    at = 0
    rest = iter(holes)
    hole_start, hole_end = next(rest, (size, size))
    for length in lengths:
        if at == hole_start:
            at = hole_end
            hole_start, hole_end = next(rest, (size, size))
        at += length
        if at > hole_start:
            raise FormatError("a chunk reaches past the end of the file or into a hole")
    if at == hole_start:
        at = hole_end
    if at != size or next(rest, None) is not None:
        raise FormatError("the chunks do not fill the file")
