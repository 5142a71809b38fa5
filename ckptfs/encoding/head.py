"""Heads: one published state of one writer, and which heads are current. Keys are in `keys`.

A head is named by writer and sequence, not by its content: its frame's checksum and `previous` of the next guard it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptfs.encoding.canonical import OBJECT_LIMIT, dumps, embed, loads, open_object, unembed
from ckptfs.encoding.features import check_names, demand
from ckptfs.encoding.fields import STAMP_MOST, boolean, check_keys, digest_of, id_of, integer, mapping
from ckptfs.encoding.keys import SEQUENCE_MOST
from ckptfs.encoding.keys import head_key as head_key
from ckptfs.encoding.keys import parse_head_key as parse_head_key
from ckptfs.errors import FormatError
from ckptfs.ids import ObjectId, Stamp, WriterId

LANE_MOST = 1024
"""Bytes in a lane's name."""
_NEVER = Stamp(0)
_COUNT = re.compile(r"[a-z][a-z0-9_]{0,63}").fullmatch


@dataclass(frozen=True)
class Head:
    """One published state of one writer."""

    writer: WriterId
    seq: int
    """1 for the writer's first, one more for each that follows; never used twice."""
    lanes: Mapping[str, tuple[ObjectId, bytes | None]]
    """Lane name ("" is the whole mount) -> its root tree: digest, and canonical JSON where inlined."""
    vector: Mapping[WriterId, int] = field(default_factory=dict)
    """The highest sequence of every other writer that this state has merged."""
    previous: ObjectId | None = None
    """Digest of the canonical JSON of this writer's head before."""
    index: ObjectId | None = None
    """The index of the chunks that this head added."""
    index_body: bytes | None = None
    """Its canonical JSON where inlined."""
    time_ns: int = 0
    """When the state was taken, by the writer's clock."""
    stamp: Stamp = _NEVER
    """Not below any stamp in the trees."""
    incomplete: bool = False
    """Taken although something in it was neither whole nor growing."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """For people: files, bytes ..."""
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_KEYS = frozenset({
    "writer", "seq", "lanes", "vector", "previous", "index", "time", "stamp", "incomplete", "counts", "requires",
    "optional",
})  # fmt: skip


def encode_head(head: Head) -> bytes:
    """*head* as canonical JSON. Raises FormatError when it would not decode."""
    value: dict[str, object] = {
        "writer": head.writer.hex(),
        "seq": head.seq,
        "lanes": {lane: tree.hex() for lane, (tree, _) in head.lanes.items()},
        "vector": {writer.hex(): seq for writer, seq in head.vector.items()},
        "previous": None if head.previous is None else head.previous.hex(),
        "index": None if head.index is None else head.index.hex(),
        "time": head.time_ns,
        "stamp": head.stamp,
        "incomplete": head.incomplete,
        "counts": dict(head.counts),
        "requires": list(check_names(head.requires, "requires")),
        "optional": list(check_names(head.optional, "optional")),
    }
    _read(value, check_names(head.requires, "requires"))
    value["lanes"] = {lane: embed(tree, body) for lane, (tree, body) in head.lanes.items()}
    if head.index is not None:
        value["index"] = embed(head.index, head.index_body)
    elif head.index_body is not None:
        raise FormatError("an inlined index without its digest")
    return dumps(value)


def decode_head(data: bytes) -> Head:
    """The head in canonical JSON *data*.

    Raises FormatError, also when the head needs a feature that this version does not know.
    """
    value = mapping(loads(data), "head")
    return _read(value, demand(value.get("requires"), "head"))


def open_head(data: bytes | bytearray | memoryview, key: str, limit: int = OBJECT_LIMIT) -> Head:
    """The head in an object's bytes *data*, got from *key*. Raises FormatError, also when it belongs to another key."""
    head = decode_head(open_object(data, None, limit))
    if parse_head_key(key) != (head.writer, head.seq):
        raise FormatError(f"{key} holds another head: {head_key(head.writer, head.seq)}")
    return head


def _read(value: dict[str, object], requires: tuple[str, ...]) -> Head:
    optional = check_names(value.get("optional"), "optional")
    check_keys(value, "head", _KEYS, _KEYS, optional)
    lanes = {}
    for lane, tree in mapping(value["lanes"], "lanes").items():
        try:
            size = len(lane.encode())
        except UnicodeEncodeError as error:
            raise FormatError("a lane's name holds half of a surrogate pair") from error
        if size > LANE_MOST or "\0" in lane:
            raise FormatError("a lane's name is too long or holds NUL")
        lanes[lane] = unembed(tree)
    vector = {
        WriterId(id_of(writer, "writer in the vector")): integer(seq, "sequence in the vector", 1, SEQUENCE_MOST)
        for writer, seq in mapping(value["vector"], "vector").items()
    }
    counts = {}
    for name, count in mapping(value["counts"], "counts").items():
        if not _COUNT(name):
            raise FormatError("counts has something other than short lower-case names")
        counts[name] = integer(count, "count")
    writer = WriterId(id_of(value["writer"], "writer"))
    seq = integer(value["seq"], "seq", 1, SEQUENCE_MOST)
    if vector.get(writer, seq) > seq:
        raise FormatError("a head's vector has its own writer's future")
    previous = value["previous"]
    index, index_body = (None, None) if value["index"] is None else unembed(value["index"])
    return Head(
        writer,
        seq,
        lanes,
        vector,
        None if previous is None else ObjectId(digest_of(previous, "previous")),
        index,
        index_body,
        integer(value["time"], "time"),
        Stamp(integer(value["stamp"], "stamp", 0, STAMP_MOST)),
        boolean(value["incomplete"], "incomplete"),
        counts,
        requires,
        optional,
    )


def current_heads(heads: Iterable[Head]) -> list[Head]:
    """Of *heads*, each writer's newest, without those that another one's vector covers; ordered by writer.

    Together they are the present state. Raises FormatError when vectors cover each other in a circle.
    """
    newest: dict[WriterId, Head] = {}
    for head in heads:
        if head.writer not in newest or newest[head.writer].seq < head.seq:
            newest[head.writer] = head
    current = [
        head
        for head in newest.values()
        if not any(other is not head and other.vector.get(head.writer, 0) >= head.seq for other in newest.values())
    ]
    if newest and not current:
        raise FormatError("the heads cover each other in a circle")
    return sorted(current, key=lambda head: head.writer)
