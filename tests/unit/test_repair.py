"""The parts of scrub: its pace, a pack made anew, and what is left of a damaged one."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from ckptfs.encoding import codec
from ckptfs.encoding.pack import PackBuilder, PackedChunk
from ckptfs.ids import ChunkId, ObjectId, digest
from ckptfs.repair.pace import Pace, Scrubbing
from ckptfs.repair.packs import examine, rebuild

RANDOM = np.random.default_rng(3)
RAW = {
    "noise": RANDOM.bytes(5000),
    "zeros": bytes(5000),
    "floats": RANDOM.normal(size=2000).astype(np.float32).tobytes(),
    "doubles": RANDOM.normal(size=900).tobytes() + b"odd",
    "bytes": (RANDOM.integers(0, 4, 6000)).astype(np.uint8).tobytes(),
    "short": b"x",
}
DTYPES = {"floats": "float32", "doubles": "float64", "bytes": "float8_e4m3fn"}


def a_pack() -> tuple[ObjectId, bytes, tuple[PackedChunk, ...]]:
    builder = PackBuilder()
    for name, raw in RAW.items():
        number, encoded = codec.encode(raw, DTYPES.get(name))
        builder.add(ChunkId(digest(raw)), len(raw), number, encoded)
    name, data, rows = builder.finish()
    return name, bytes(data), rows


@pytest.mark.parametrize("kind", RAW)
def test_a_chunk_is_encoded_again_as_it_was(kind: str) -> None:
    """The codec and the length that a pack's name demands give the very bytes; another length gives none."""
    raw = RAW[kind]
    number, encoded = codec.encode(raw, DTYPES.get(kind))
    assert codec.encode_as(number, raw, len(encoded)) == encoded
    assert codec.encode_as(number, raw, len(encoded) + 1) is None
    assert codec.encode_as(999, raw, len(raw)) is None


def test_a_rate_is_kept() -> None:
    """Ten times a hundred bytes at a hundred bytes a second: ten seconds, but for the last."""

    async def main() -> None:
        pace = Pace(Scrubbing(), 100.0, 1.0)
        began = trio.current_time()
        for _ in range(10):
            await pace.spend(100)
        assert trio.current_time() - began == pytest.approx(9.0)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_sample_is_about_its_share() -> None:
    """A tenth of many things is looked at, all of them without a sample."""
    tenth = Pace(Scrubbing(), None, 0.1)
    assert 700 < sum(tenth.chooses() for _ in range(10_000)) < 1300
    assert all(Pace(Scrubbing(), None, 1.0).chooses() for _ in range(1000))


@pytest.mark.parametrize("damage", ["chunk", "index", "trailer", "cut", "gone", "several"])
def test_a_damaged_pack_is_made_anew(damage: str) -> None:
    """Whatever was damaged: with the raw bytes of the chunks it comes out byte for byte; without, not at all."""
    name, data, rows = a_pack()
    broken = bytearray(data)
    if damage in ("chunk", "several"):
        broken[10] ^= 1
    if damage == "several":
        broken[rows[2].offset + 40] ^= 1
    if damage == "index":
        broken[-40] ^= 1
    if damage == "trailer":
        broken[-1] ^= 1
    left = None if damage == "gone" else bytes(broken[: rows[3].offset]) if damage == "cut" else bytes(broken)
    found = examine(name, left, rows)
    assert not found.is_sound and found.chunks == rows
    raw_of = {digest(raw): raw for raw in RAW.values()}

    async def everything(chunk: PackedChunk) -> bytes | None:
        return raw_of[chunk.id]

    async def nothing(chunk: PackedChunk) -> bytes | None:
        return None

    assert trio.run(rebuild, name, left, found, everything) == data
    if damage not in ("index", "trailer"):
        assert trio.run(rebuild, name, left, found, nothing) is None
    assert examine(name, data, ()).is_sound


def test_a_pack_of_which_nobody_knows_what_was_in_it() -> None:
    """Its index is damaged and the catalog knows some of its chunks only: nothing is guessed."""
    name, data, rows = a_pack()
    found = examine(name, data[:-1] + b"?", rows[:2])
    assert found.chunks is None and not found.is_sound

    async def nothing(chunk: PackedChunk) -> bytes | None:
        return None

    assert trio.run(rebuild, name, data, found, nothing) is None
