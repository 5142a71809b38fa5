"""Names of the objects on the remote, below the prefix that the user chose.

    ckptfs.json
    packs/ab/<digest>  manifests/ab/<digest>  trees/ab/<digest>  indexes/ab/<digest>
    heads/<writer>/<inverted sequence>

`ab` are the first two digits of the digest. Sequences are inverted so that a LIST gives a writer's newest head first.
"""

from __future__ import annotations

import re

from ckptfs.errors import FormatError
from ckptfs.ids import ObjectId, WriterId

FORMAT_KEY = "ckptfs.json"
PACKS = "packs/"
MANIFESTS = "manifests/"
TREES = "trees/"
INDEXES = "indexes/"
HEADS = "heads/"

SEQUENCE_MOST = (1 << 63) - 1
_INVERT = (1 << 64) - 1
_OBJECT = re.compile(r"(packs/|manifests/|trees/|indexes/)([0-9a-f]{2})/(\2[0-9a-f]{62})").fullmatch
_HEAD = re.compile(r"heads/([0-9a-f]{32})/([0-9a-f]{16})").fullmatch


def object_key(kind: str, name: ObjectId) -> str:
    """The key of object *name*; *kind* is PACKS, MANIFESTS, TREES or INDEXES."""
    digits = name.hex()
    return f"{kind}{digits[:2]}/{digits}"


def pack_key(name: ObjectId) -> str:
    return object_key(PACKS, name)


def manifest_key(name: ObjectId) -> str:
    return object_key(MANIFESTS, name)


def tree_key(name: ObjectId) -> str:
    return object_key(TREES, name)


def index_key(name: ObjectId) -> str:
    return object_key(INDEXES, name)


def parse_object_key(key: str) -> tuple[str, ObjectId]:
    """(kind, name) of a pack, manifest, tree or index. Raises FormatError."""
    match = _OBJECT(key)
    if match is None:
        raise FormatError(f"not the key of a content-addressed object: {key!r}")
    return match[1], ObjectId(bytes.fromhex(match[3]))


def heads_prefix(writer: WriterId) -> str:
    """What the keys of *writer*'s heads begin with."""
    return f"{HEADS}{writer.hex()}/"


def head_key(writer: WriterId, seq: int) -> str:
    """The key of *writer*'s head number *seq*, 1 up to 2^63-1."""
    if not 1 <= seq <= SEQUENCE_MOST:
        raise ValueError(f"no head has sequence {seq}")
    return f"{heads_prefix(writer)}{_INVERT - seq:016x}"


def parse_head_key(key: str) -> tuple[WriterId, int]:
    """(writer, sequence) of a head's key. Raises FormatError."""
    match = _HEAD(key)
    seq = _INVERT - int(match[2], 16) if match else 0
    if match is None or not 1 <= seq <= SEQUENCE_MOST:
        raise FormatError(f"not the key of a head: {key!r}")
    return WriterId(bytes.fromhex(match[1])), seq
