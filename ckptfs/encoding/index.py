"""The index object: which chunks a head added to the remote, and in which packs they are.

Following `previous` from the current heads, a new writer learns all that is there without reading a single pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptfs.encoding.canonical import dumps, loads
from ckptfs.encoding.features import check_names, demand
from ckptfs.encoding.fields import check_keys, digest_of, mapping
from ckptfs.encoding.pack import PackedChunk, read_packed, write_packed
from ckptfs.errors import FormatError
from ckptfs.ids import ObjectId

_NEEDED = frozenset({"packs", "previous"})
_KEYS = _NEEDED | {"requires", "optional"}
_COLUMNS = frozenset({"chunks", "offsets", "stored", "lengths", "codecs", "bases"})


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
        table = write_packed(chunks) | {"offsets": [chunk.offset for chunk in chunks]}
        _check_order(read_packed(table))
        packs[pack.hex()] = table
    return dumps({"packs": packs, "previous": None if index.previous is None else index.previous.hex()})


def decode_index(data: bytes) -> Index:
    """The index in canonical JSON *data*, whose digest `open_object` checks. Raises FormatError."""
    value = mapping(loads(data), "index")
    demand(value.get("requires", []), "index")
    optional = check_names(value.get("optional", []), "index")
    check_keys(value, "index", _NEEDED, _KEYS, optional)
    packs = {}
    for key, item in mapping(value["packs"], "packs").items():
        table = mapping(item, "pack")
        check_keys(table, "pack", _COLUMNS, _COLUMNS, optional)
        chunks = read_packed(table)
        _check_order(chunks)
        packs[ObjectId(digest_of(key, "pack"))] = chunks
    previous = value["previous"]
    return Index(packs, None if previous is None else ObjectId(digest_of(previous, "previous")))


def _check_order(chunks: tuple[PackedChunk, ...]) -> None:
    end = 0
    for chunk in chunks:
        if chunk.offset < end:
            raise FormatError("an index's chunks are not ordered by offset, or overlap")
        end = chunk.offset + chunk.length
