"""Contents and manifests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptfs.encoding import canonical
from ckptfs.encoding.manifest import (
    Chunk,
    Content,
    Manifest,
    Placed,
    TensorSpan,
    decode_content,
    decode_manifest,
    encode_content,
    encode_manifest,
)
from ckptfs.errors import FormatError
from ckptfs.ids import ChunkId, ObjectId


def chunk(number: int, length: int, dtype: str | None = None) -> Chunk:
    return Chunk(ChunkId(bytes([number]) * 32), length, dtype)


def placed(pack: int, offset: int, length: int, codec: int = 0, base: int | None = None) -> Placed:
    against = None if base is None else ChunkId(bytes([base]) * 32)
    return Placed(ObjectId(bytes([pack]) * 32), offset, length, codec, against)


CONTENT = Content(
    100,
    ((0, 10), (30, 50), (90, 100)),
    (chunk(1, 15), chunk(2, 5, "float32"), chunk(3, 39), chunk(4, 1)),
    (TensorSpan("layer.weight", "float32", (2, 5), 25, 30), TensorSpan("", "void16", (), 100, 100)),
)
MANIFEST = Manifest(
    CONTENT,
    (placed(9, 0, 15), placed(8, 7, 5, 2), placed(9, 15, 20, 7, 6), placed(9, 40, 1)),
    {ChunkId(bytes([6]) * 32): placed(7, 3, 30, 3)},
)


def test_offsets_skip_holes() -> None:
    """Each chunk's file offset, and which chunks overlap a range, follow from lengths and holes."""
    assert CONTENT.offsets() == [10, 25, 50, 89]
    assert CONTENT.offsets() is CONTENT.offsets()
    owners = [None] * 10 + [0] * 15 + [1] * 5 + [None] * 20 + [2] * 39 + [3] + [None] * 10
    for start in range(101):
        for end in range(start, 103):
            found = CONTENT.at(start, end)
            assert set(found) == {owner for owner in owners[start:end] if owner is not None}, (start, end)


@pytest.mark.parametrize(
    "content",
    [
        Content(0, (), (), ()),
        Content(5, ((0, 5),), (), ()),
        Content(5, (), (chunk(1, 5),), ()),
        Content(5, ((0, 2),), (chunk(1, 3),), ()),
        Content(5, ((3, 5),), (chunk(1, 3),), ()),
        Content(1 << 62, ((0, 1 << 62),), (), ()),
        CONTENT,
    ],
)
def test_contents_round_trip(content: Content) -> None:
    """Empty files, all holes, holes at either end and tensors come back equal; the bytes do not depend on the run."""
    assert decode_content(encode_content(content)) == content
    places = tuple(placed(1, number, 1) for number, _ in enumerate(content.chunks))
    manifest = Manifest(content, places)
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_manifest_bytes_are_fixed() -> None:
    """A manifest has the same name for ever: pinned here."""
    body = encode_manifest(MANIFEST)
    assert decode_manifest(body) == MANIFEST
    assert json.loads(body)["packs"] == ["09" * 32, "08" * 32, "07" * 32]
    assert canonical.object_id(body).hex() == "c87e39d526144939ae9aaf406a0c491502de64adb2e446bdeceda923f167ff4f"
    plain = Manifest(CONTENT, (*MANIFEST.places[:2], placed(9, 15, 20, 3), MANIFEST.places[3]))
    body = encode_manifest(plain)
    assert canonical.object_id(body).hex() == "4dcff37e65ee42cc80f3bffe29a1bd2c959d1fde9db7a1c620b9f6aff9eb9de0"


@pytest.mark.parametrize(
    "content",
    [
        replace(CONTENT, size=99),
        replace(CONTENT, size=101),
        replace(CONTENT, size=-1),
        replace(CONTENT, size=1 << 63),
        replace(CONTENT, chunks=CONTENT.chunks[:-1]),
        replace(CONTENT, chunks=(*CONTENT.chunks, chunk(5, 1))),
        Content(100, ((0, 10), (30, 50)), (chunk(1, 70),), ()),
        Content(10, ((5, 5),), (chunk(1, 10),), ()),
        Content(10, ((4, 2),), (chunk(1, 10),), ()),
        Content(10, ((0, 2), (2, 4)), (chunk(1, 6),), ()),
        Content(10, ((4, 6), (0, 2)), (chunk(1, 6),), ()),
        Content(10, ((-2, 0),), (chunk(1, 10),), ()),
        Content(10, ((8, 11),), (chunk(1, 8),), ()),
        Content(10, (), (chunk(1, 10), chunk(2, 0)), ()),
        Content(10, (), (chunk(1, 12), chunk(2, -2)), ()),
        Content(65 << 20, (), (chunk(1, 65 << 20),), ()),
        Content(1, (), (Chunk(ChunkId(b"short"), 1, None),), ()),
        Content(1, (), (chunk(1, 1, "Float 32"),), ()),
        Content(1, (), (chunk(1, 1, ""),), ()),
        Content(1, (), (chunk(1, 1),), (TensorSpan("t", "u", (), 1, 2),)),
        Content(1, (), (chunk(1, 1),), (TensorSpan("t", "u", (), 1, 0),)),
        Content(1, (), (chunk(1, 1),), (TensorSpan("t", "u", (-1,), 0, 1),)),
        Content(1, (), (chunk(1, 1),), (TensorSpan("t", "u", (1,) * 65, 0, 1),)),
    ],
)
def test_impossible_contents_are_never_written(content: Content) -> None:
    """What would not decode is refused by the encoder: a damaged manifest must not get a name."""
    with pytest.raises(FormatError):
        encode_content(content)


def test_impossible_places_are_never_written() -> None:
    """The same for places."""
    one = Content(1, (), (chunk(1, 1),), ())
    for place in (
        placed(1, -1, 1), placed(1, 0, 0), placed(1, (1 << 63) - 1, 1), placed(1, 0, 65 << 20), placed(1, 0, 1, -1),
        placed(1, 0, 1, 1 << 16), placed(1, 0, 1, 0, 1), replace(placed(1, 0, 1), pack=ObjectId(b"x")),
        replace(placed(1, 0, 1), base=ChunkId(b"x")),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            encode_manifest(Manifest(one, (place,)))
    delta, base = placed(1, 0, 1, 7, 2), ChunkId(bytes([2]) * 32)
    for bases in ({}, {base: placed(1, 0, 1, 7, 3)}, {ChunkId(bytes([3]) * 32): placed(1, 0, 1)}):
        with pytest.raises(FormatError):
            encode_manifest(Manifest(one, (delta,), bases))
    for places in ((), (placed(1, 0, 1), placed(1, 1, 1))):
        with pytest.raises(FormatError):
            encode_manifest(Manifest(one, places))


def _set(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.__setitem__(key, value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda fields: fields.pop("size"),
        lambda fields: fields.pop("bases"),
        _set("surprise", 1),
        _set("size", True),
        _set("size", "100"),
        _set("size", None),
        _set("chunks", None),
        _set("chunks", {}),
        _set("chunks", ["AA" * 32] * 4),
        _set("chunks", ["0 " * 32] * 4),
        _set("chunks", [1, 2, 3, 4]),
        _set("lengths", [15, 5, 39, True]),
        _set("lengths", [15, 5, 39]),
        _set("lengths", [15, 5, 39, [1]]),
        _set("dtypes", [None, 1, None, None]),
        _set("dtypes", [None, [], None, None]),
        _set("holes", [[0, 10, 1]]),
        _set("holes", [["0", 10], [30, 50], [90, 100]]),
        _set("tensors", [[]]),
        _set("tensors", [["t", "u", 1, 0, 0]]),
        _set("pack", [0, 1, 0, 3]),
        _set("pack", [1, 0, 1, 1]),
        _set("pack", [0, 0, 0, 0]),
        _set("packs", ["09" * 32, "09" * 32]),
        _set("packs", []),
        _set("bases", [None, None, "x", None]),
        _set("bases", [None, None, None]),
        _set("requires", ["shiny@9.9"]),
        _set("requires", "shiny"),
        _set("optional", [1]),
        _set("requires", []),
        lambda fields: fields.pop("requires"),
        lambda fields: fields.pop("based"),
        _set("based", None),
        lambda fields: fields["based"].pop("pack"),
        lambda fields: fields["based"].update(surprise=[1]),
        lambda fields: fields["based"].update(chunks=["07" * 32]),
        lambda fields: fields["based"].update(chunks=["06" * 32, "06" * 32]),
        lambda fields: fields["based"].update(pack=[3]),
        lambda fields: fields["based"].update(pack=[0]),
        lambda fields: fields["based"].update(stored=[0]),
        lambda fields: fields["based"].update(codecs=[]),
    ],
)
def test_every_field_is_checked(damage: Callable[[dict[str, Any]], object]) -> None:
    """A missing, unknown, mistyped or impossible field is FormatError, nothing else."""
    fields = json.loads(encode_manifest(MANIFEST))
    damage(fields)
    with pytest.raises(FormatError):
        decode_manifest(canonical.dumps(fields))


def test_evolution() -> None:
    """A field that comes with an unknown optional feature is ignored; a required one says what to install."""
    fields = json.loads(encode_manifest(MANIFEST))
    fields |= {"optional": ["colours@0.9"], "colours": ["red"]}
    assert decode_manifest(canonical.dumps(fields)) == MANIFEST
    fields["requires"] = ["delta", "shiny@9.9"]
    with pytest.raises(FormatError, match=r"manifest needs shiny@9\.9: install ckptfs 9\.9 or newer"):
        decode_manifest(canonical.dumps(fields))


def test_damaged_content_of_the_catalog() -> None:
    """Every truncation and every flipped byte of a catalog's content is refused or harmless."""
    data = encode_content(CONTENT)
    for at in range(len(data)):
        with pytest.raises(FormatError):
            decode_content(data[:at])
        for bit in (1, 16, 128):
            damaged = bytearray(data)
            damaged[at] ^= bit
            try:
                assert decode_content(bytes(damaged)) == CONTENT
            except FormatError:
                pass
