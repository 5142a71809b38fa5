"""However large what is saved is, no object comes near what a store takes in one request, or a reader may open."""

from __future__ import annotations

import hashlib

import pytest

from ckptfs.config import Tuning
from ckptfs.encoding.canonical import OBJECT_LIMIT, open_object, seal_object
from ckptfs.encoding.index import Index, decode_index, encode_index
from ckptfs.encoding.manifest import Chunk, Content, Manifest, Placed, decode_manifest, encode_manifest
from ckptfs.encoding.pack import PackedChunk
from ckptfs.ids import ChunkId, ObjectId
from ckptfs.replica.upload import Needed, PackPlan

MILLION = 1_000_000
LENGTH = 200_000
"""Bytes of a chunk: a million of them are 200 GB."""
IN_A_PACK = 80


def name(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest()


def metadata_of(count: int) -> None:
    """The manifest and the index of a file of *count* chunks, none of them like another."""
    most = OBJECT_LIMIT * count // MILLION
    packs = [ObjectId(name(-number % (1 << 60))) for number in range(count // IN_A_PACK + 1)]
    chunks = tuple(Chunk(ChunkId(name(number)), LENGTH, None) for number in range(count))
    places = [Placed(packs[at // IN_A_PACK], at % IN_A_PACK * LENGTH, LENGTH, 0, None) for at in range(count)]
    manifest = Manifest(Content(count * LENGTH, (), chunks, ()), tuple(places))
    body = encode_manifest(manifest)
    assert len(body) < most
    assert decode_manifest(open_object(seal_object(body))) == manifest
    rows: dict[ObjectId, tuple[PackedChunk, ...]] = {
        pack: tuple(
            PackedChunk(chunks[at].id, places[at].offset, LENGTH, LENGTH, 0, None)
            for at in range(number * IN_A_PACK, min((number + 1) * IN_A_PACK, count))
        )
        for number, pack in enumerate(packs)
        if number * IN_A_PACK < count
    }
    body = encode_index(Index(rows, None))
    assert len(body) < most
    assert decode_index(open_object(seal_object(body))) == Index(rows, None)


def test_case_053_metadata_is_small_beside_what_it_describes() -> None:
    """A fiftieth of a million chunks takes no more than a fiftieth of what one object may be."""
    metadata_of(MILLION // 50)


@pytest.mark.slow
def test_case_053_metadata_of_a_million_chunks() -> None:
    """One object each, and each can be read again."""
    metadata_of(MILLION)


def test_case_053_packs_of_200_gb() -> None:
    """Thousands of requests, each a single PUT of one pack: far below 5 GB, and nothing has parts."""
    tuning = Tuning()
    plan = PackPlan(tuning.pack_bytes_large)
    packs = 0
    step = 50_000
    for start in range(0, MILLION, step):
        numbers = range(start, start + step)
        file = [Needed(ChunkId(b"%032d" % number), LENGTH, None, 1, number * LENGTH) for number in numbers]
        for pack in plan.add(file):
            assert sum(chunk.length for chunk in pack) <= tuning.pack_bytes_large
            packs += 1
    packs += len(plan.finish())
    assert packs >= MILLION * LENGTH // tuning.pack_bytes_large
