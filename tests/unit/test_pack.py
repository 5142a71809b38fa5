"""Packs and indexes of packs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ckptfs.encoding.canonical import object_id
from ckptfs.encoding.index import Index, decode_index, encode_index
from ckptfs.encoding.pack import TRAILER_BYTES, PackBuilder, PackedChunk, pack_name, read_index, tail_bytes
from ckptfs.errors import FormatError
from ckptfs.ids import ChunkId, ObjectId, digest


def build(count: int = 20) -> tuple[ObjectId, bytes, tuple[PackedChunk, ...], list[bytes]]:
    random.seed(1)
    builder = PackBuilder()
    parts = [random.randbytes(random.randint(1, 50)) for _ in range(count)]
    for number, part in enumerate(parts):
        base = ChunkId(digest(b"base")) if number % 3 == 0 else None
        builder.add(ChunkId(digest(part)), 100 + number, number % 5, part, base)
        assert builder.size == sum(map(len, parts[: number + 1]))
        assert ChunkId(digest(part)) in builder and len(builder) == number + 1
    name, data, chunks = builder.finish()
    return name, bytes(data), chunks, parts


@pytest.mark.parametrize("count", [0, 1, 20])
def test_pack_round_trip(count: int) -> None:
    """A pack's end alone tells what is where, and each chunk's bytes are there."""
    name, data, chunks, parts = build(count)
    needed = tail_bytes(data[-TRAILER_BYTES:], len(data))
    for tail in (data[-needed:], data, memoryview(data)[-needed - (needed < len(data)) :]):
        assert read_index(tail, len(data), name) == chunks
    assert [data[c.offset : c.offset + c.length] for c in chunks] == parts
    assert name == pack_name(chunks)


def test_name_tells_the_layout() -> None:
    """The name follows from chunks, codecs, bases and encoded lengths, so equal names mean equal places."""
    name, _, chunks, _ = build()
    assert build()[0] == name
    assert name.hex() == "dd7cb31a44473169418e5a085714ff4538b3eed0cb48c5975494960942da9268"
    for change in ({"codec": 9}, {"base": None}, {"length": 51}, {"id": ChunkId(bytes(32))}):
        assert pack_name((replace(chunks[0], **change), *chunks[1:])) != name  # type: ignore[arg-type]
    assert pack_name(chunks[::-1]) != name


def test_builder_refuses() -> None:
    """A chunk goes into a pack once; nothing is written that would not be read; the builder is empty when finished."""
    builder = PackBuilder()
    chunk = ChunkId(bytes(32))
    builder.add(chunk, 1, 0, b"x")
    with pytest.raises(ValueError, match="already"):
        builder.add(chunk, 1, 0, b"x")
    for bad in (
        (ChunkId(b"x"), 1, 0, b"x", None), (ChunkId(bytes([1]) * 32), 0, 0, b"x", None),
        (ChunkId(bytes([1]) * 32), 1, 0, b"", None), (ChunkId(bytes([1]) * 32), 1, -1, b"x", None),
        (ChunkId(bytes([1]) * 32), 1, 0, b"x", ChunkId(bytes([1]) * 32)),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            builder.add(*bad)
    assert builder.size == 1
    builder.finish()
    assert builder.size == 0 and chunk not in builder


def test_damaged_packs() -> None:
    """Every truncation, wrong object size, wrong name and flipped byte of index and trailer is refused or harmless."""
    name, data, chunks, _ = build(5)
    needed = tail_bytes(data, len(data))
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            read_index(data[:cut], cut)
        with pytest.raises(FormatError):
            read_index(data, cut)
        if cut > len(data) - needed:
            with pytest.raises(FormatError):
                read_index(data[cut:], len(data))
    with pytest.raises(FormatError):
        read_index(data, len(data) + 1)
    with pytest.raises(FormatError, match="other chunks"):
        read_index(data, len(data), ObjectId(bytes(32)))
    for at in range(len(data) - needed, len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            try:
                assert read_index(damaged, len(data), name) == chunks
            except FormatError:
                pass


def test_index_round_trip() -> None:
    """An index comes back equal, also with gaps in a pack, and has a fixed name."""
    name, _, chunks, _ = build()
    other = ObjectId(bytes(32))
    for index in (Index(), Index({name: chunks}, other), Index({name: chunks[1::2], other: ()})):
        body = encode_index(index)
        assert decode_index(body) == index
    found = object_id(encode_index(Index({name: chunks}))).hex()
    assert found == "b88b9c98c5a0aa8cd8b8f01c4925b90ba78b5d247abd747990231a70401e5609"


def test_impossible_indexes() -> None:
    """Overlapping, unordered, repeated or mistyped chunks are refused when writing and when reading."""
    name, _, chunks, _ = build()
    for bad in (chunks[::-1], (chunks[0], chunks[0]), (chunks[0], replace(chunks[1], offset=chunks[0].length - 1))):
        with pytest.raises(FormatError):
            encode_index(Index({name: bad}))
    body = encode_index(Index({name: chunks[:1]}))
    for old, new in [
        (b'"codecs":[0]', b'"codecs":[]'), (b'"codecs":[0]', b'"codecs":[-1]'), (b'"codecs":[0]', b'"codecs":0'),
        (b'"offsets":[0]', b'"offsets":[false]'), (b'"offsets"', b'"off"'), (b'"previous":null', b'"previous":1'),
        (b'"previous":null', b'"previous":null,"x":1'), (b'"previous":null', b'"previous":null,"requires":["x@2"]'),
        (name.hex().encode(), b"00"), (b'"packs":{', b'"packs":{"a":1,'),
    ]:  # fmt: skip
        assert old in body
        with pytest.raises(FormatError):
            decode_index(body.replace(old, new))
