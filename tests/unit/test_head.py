"""Heads, which of them are current, and ckptfs.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from ckptfs.encoding import canonical
from ckptfs.encoding.head import Head, current_heads, decode_head, encode_head, head_key, open_head
from ckptfs.encoding.index import Index, encode_index
from ckptfs.encoding.remote_format import RemoteFormat, decode_remote_format, encode_remote_format
from ckptfs.encoding.tree import Entry, Tree, encode_tree
from ckptfs.errors import FormatError
from ckptfs.ids import ROOT_FILE_ID, ObjectId, Stamp, WriterId

A, B, C = (WriterId(bytes([number]) * 16) for number in (1, 2, 3))
TREE = encode_tree(Tree(ROOT_FILE_ID, (Entry(b"gone", Stamp(5)),)))
INDEX = encode_index(Index())
HEAD = Head(
    A, 7,
    {"": (canonical.object_id(TREE), TREE), "länge": (ObjectId(bytes(32)), None)},
    {B: 3}, ObjectId(bytes([5]) * 32), canonical.object_id(INDEX), INDEX, 10**18, Stamp(1 << 60), True, {"files": 3},
    (), ("colours@0.9",),
)  # fmt: skip


@pytest.mark.parametrize("head", [HEAD, Head(A, 1, {}), replace(HEAD, index_body=None), replace(HEAD, vector={A: 7})])
def test_heads_round_trip(head: Head) -> None:
    """Heads come back equal, with inlined trees and indexes readable, and only from their own key."""
    body = encode_head(head)
    assert decode_head(body) == head
    data = canonical.seal_object(body)
    assert open_head(data, head_key(head.writer, head.seq)) == head
    for key in (head_key(B, head.seq), head_key(A, head.seq + 1)):
        with pytest.raises(FormatError, match="holds another head"):
            open_head(data, key)


def test_head_bytes_are_fixed() -> None:
    """A head's JSON is the same for ever: pinned here."""
    found = canonical.object_id(encode_head(HEAD)).hex()
    assert found == "fcd7acbadb67a92a19043ee6d9d0153aee824a0a0eabcf444a1deb09a229abbc"


@pytest.mark.parametrize(
    "bad",
    [
        replace(HEAD, writer=WriterId(b"x")), replace(HEAD, seq=0), replace(HEAD, seq=1 << 63),
        replace(HEAD, lanes={"": (ObjectId(b"x"), None)}), replace(HEAD, lanes={"": (ObjectId(bytes(32)), TREE)}),
        replace(HEAD, lanes={"\ud800": (ObjectId(bytes(32)), None)}), replace(HEAD, vector={B: 0}),
        replace(HEAD, lanes={"x" * 2000: (ObjectId(bytes(32)), None)}), replace(HEAD, vector={A: 8}),
        replace(HEAD, previous=ObjectId(b"")), replace(HEAD, index=None), replace(HEAD, index=ObjectId(bytes(32))),
        replace(HEAD, time_ns=-1), replace(HEAD, counts={"Files": 1}), replace(HEAD, counts={"files": -1}),
        replace(HEAD, requires=("b", "a")), replace(HEAD, optional=("No",)), replace(HEAD, incomplete=1),
    ],
)  # fmt: skip
def test_impossible_heads_are_never_written(bad: Head) -> None:
    """What would not decode is refused by the encoder."""
    with pytest.raises(FormatError):
        encode_head(bad)


@pytest.mark.parametrize("key", sorted(json.loads(encode_head(HEAD))))
def test_every_field_is_checked(key: str) -> None:
    """A missing or mistyped field is FormatError, nothing else."""
    value = json.loads(encode_head(HEAD))
    for wrong in (7.5, "x", ["A"], {"X": 1}, -1, [[]]):
        if key == "index" and isinstance(wrong, dict):
            continue  # an inlined object is checked by who decodes it
        damaged = value | {key: wrong}
        with pytest.raises(FormatError):
            decode_head(json.dumps(damaged, sort_keys=True, separators=(",", ":")).encode())
    del value[key]
    with pytest.raises(FormatError):
        decode_head(canonical.dumps(value))


def test_heads_need_known_features() -> None:
    """A head that requires what this version does not know says what to install."""
    with pytest.raises(FormatError, match=r"head needs shiny@9\.9: install ckptfs 9\.9 or newer"):
        decode_head(encode_head(replace(HEAD, requires=("shiny@9.9",))))


def test_damaged_heads() -> None:
    """A head has no digest in its name: its frame alone must catch every truncation and every flipped bit."""
    data = canonical.seal_object(encode_head(HEAD))
    key = head_key(HEAD.writer, HEAD.seq)
    for at in range(len(data)):
        with pytest.raises(FormatError):
            open_head(data[:at], key)
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            try:
                assert open_head(damaged, key) == HEAD
            except FormatError:
                pass


def head(writer: WriterId, seq: int, **vector: int) -> Head:
    return Head(writer, seq, {}, {{"a": A, "b": B, "c": C}[name]: number for name, number in vector.items()})


@pytest.mark.parametrize(
    ("heads", "current"),
    [
        ([], []),
        ([head(A, 1), head(A, 2)], [(A, 2)]),
        ([head(A, 2), head(B, 1)], [(A, 2), (B, 1)]),
        ([head(A, 2), head(B, 1, a=2)], [(B, 1)]),
        ([head(A, 3), head(B, 1, a=2)], [(A, 3), (B, 1)]),
        ([head(A, 3), head(A, 4), head(B, 1, a=3)], [(A, 4), (B, 1)]),
        ([head(A, 1), head(B, 1, a=1), head(C, 1, a=1, b=1)], [(C, 1)]),
        ([head(A, 1, a=1)], [(A, 1)]),
        ([head(A, 1), head(A, 2, b=1), head(B, 1, a=1)], [(A, 2)]),
    ],
)
def test_current_heads(heads: list[Head], current: list[tuple[WriterId, int]]) -> None:
    """Each writer's newest head counts, unless another writer's newest has merged it."""
    for order in (heads, heads[::-1]):
        assert [(one.writer, one.seq) for one in current_heads(order)] == current


def test_circular_heads() -> None:
    """Heads that claim to have merged each other would leave nothing: refused."""
    with pytest.raises(FormatError, match="circle"):
        current_heads([head(A, 1, b=1), head(B, 1, a=1)])


REMOTE = RemoteFormat(UUID(int=5), 10**18, optional=("colours@0.9",))


def test_remote_format_round_trip() -> None:
    """ckptfs.json comes back equal, whatever its white space, and people can read it."""
    data = encode_remote_format(REMOTE)
    assert decode_remote_format(data) == REMOTE
    assert decode_remote_format(json.dumps(json.loads(data)).encode()) == REMOTE
    assert json.loads(data)["format"] == "ckptfs" and data.count(b"\n") > 5


def test_remote_format_refuses() -> None:
    """Another version or an unknown feature says what to do; anything else and every flipped bit is refused."""
    data = encode_remote_format(REMOTE)
    with pytest.raises(FormatError, match="version 2, known here is 1: install a newer"):
        decode_remote_format(encode_remote_format(replace(REMOTE, version=2)))
    with pytest.raises(FormatError, match=r"install ckptfs 0\.9 or newer"):
        decode_remote_format(encode_remote_format(replace(REMOTE, requires=("shiny@0.9",))))
    for foreign in (b"", b"{}", b"[]", b'{"format":"other"}', b" " * 100_000, b'{"format":"ckptfs"}', data[:-3]):
        with pytest.raises(FormatError):
            decode_remote_format(foreign)
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            try:
                assert decode_remote_format(bytes(damaged)) == REMOTE
            except FormatError:
                pass


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value.update(store="x"),
        lambda value: value.update(store=5),
        lambda value: value.update(store=str(UUID(int=10)).upper().replace("A", "A")),
        lambda value: value.update(created=-1),
        lambda value: value.update(version=0),
        lambda value: value.pop("requires"),
        lambda value: value.pop("created"),
    ],
)
def test_remote_format_fields_are_checked(damage: Callable[[dict[str, Any]], object]) -> None:
    """A wrong field under a right check is still refused."""
    value = json.loads(encode_remote_format(REMOTE))
    del value["check"]
    damage(value)
    value["check"] = canonical.object_id(canonical.dumps(value)).hex()
    with pytest.raises(FormatError):
        decode_remote_format(json.dumps(value).encode())
