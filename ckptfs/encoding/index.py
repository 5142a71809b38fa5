"""The index object: which chunks a head added to the remote, and in which packs they are.

Following `previous` from the current heads, a new writer learns all that is there without reading a single pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptfs.encoding.canonical import dumps, loads
from ckptfs.encoding.features import check_names, demand
from ckptfs.encoding.fields import array, check_keys, digest_of, integer, mapping
from ckptfs.encoding.manifest import CHUNK_MOST, read_place
from ckptfs.encoding.pack import PackedChunk, check_packed
from ckptfs.errors import FormatError
from ckptfs.ids import ChunkId, ObjectId

_NEEDED = frozenset({"packs", "previous"})
_KEYS = _NEEDED | {"requires", "optional"}


@dataclass(frozen=True)
class Index:
    """Chunks by pack."""

    packs: Mapping[ObjectId, tuple[PackedChunk, ...]] = field(default_factory=dict)
    """In each pack ordered by offset, not overlapping; there may be gaps."""
    previous: ObjectId | None = None
    """The index before this one."""


def encode_index(index: Index) -> bytes:
    """*index* as canonical JSON; its digest is the object's name. Raises FormatError when it would not decode."""
    packs = {}
    for pack, chunks in index.packs.items():
        for chunk in chunks:
            check_packed(chunk)
        _check_order(chunks)
        packs[pack.hex()] = [
            [c.id.hex(), c.offset, c.length, c.raw_length, c.codec, None if c.base is None else c.base.hex()]
            for c in chunks
        ]
    return dumps({"packs": packs, "previous": None if index.previous is None else index.previous.hex()})


def decode_index(data: bytes) -> Index:
    """The index in canonical JSON *data*, whose digest `open_object` checks. Raises FormatError."""
    value = mapping(loads(data), "index")
    demand(value.get("requires", []), "index")
    check_keys(value, "index", _NEEDED, _KEYS, check_names(value.get("optional", []), "index"))
    packs = {}
    for key, rows in mapping(value["packs"], "packs").items():
        pack = ObjectId(digest_of(key, "pack"))
        packs[pack] = tuple(_read_row(row, pack) for row in array(rows, "chunks"))
        _check_order(packs[pack])
    previous = value["previous"]
    return Index(packs, None if previous is None else ObjectId(digest_of(previous, "previous")))


def _read_row(row: object, pack: ObjectId) -> PackedChunk:
    if type(row) is not list or len(row) != 6:
        raise FormatError("a chunk of an index is not an array of 6")
    chunk = ChunkId(digest_of(row[0], "chunk"))
    raw_length = integer(row[3], "raw length", 1, CHUNK_MOST)
    place = read_place(chunk, pack, row[1], row[2], row[4], row[5])
    return PackedChunk(chunk, place.offset, place.length, raw_length, place.codec, place.base)


def _check_order(chunks: tuple[PackedChunk, ...]) -> None:
    end = 0
    for chunk in chunks:
        if chunk.offset < end:
            raise FormatError("an index's chunks are not ordered by offset, or overlap")
        end = chunk.offset + chunk.length
