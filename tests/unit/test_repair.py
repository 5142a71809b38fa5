"""The parts of scrub: its pace, a pack made anew, and what is left of a damaged one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from ckptfs.encoding import codec
from ckptfs.encoding.pack import PackBuilder, PackedChunk
from ckptfs.errors import RemoteError
from ckptfs.ids import ChunkId, ObjectId, digest
from ckptfs.repair.healing import heal
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
BEFORE = RANDOM.normal(size=2000).astype(np.float32)
"""What a delta is against, in another pack."""
AFTER = BEFORE * np.float32(1.001)


def a_pack() -> tuple[ObjectId, bytes, tuple[PackedChunk, ...]]:
    builder = PackBuilder()
    for name, raw in RAW.items():
        number, encoded = codec.encode(raw, DTYPES.get(name))
        builder.add(ChunkId(digest(raw)), len(raw), number, encoded)
    number, encoded = codec.encode_delta(AFTER.tobytes(), BEFORE.tobytes(), "float32")
    builder.add(ChunkId(digest(AFTER.tobytes())), AFTER.nbytes, number, encoded, ChunkId(digest(BEFORE.tobytes())))
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


async def only_the_base(chunk: ChunkId, length: int) -> bytes | None:
    return BEFORE.tobytes() if chunk == digest(BEFORE.tobytes()) else None


@pytest.mark.parametrize("damage", ["chunk", "delta", "index", "trailer", "cut", "gone", "several"])
def test_a_damaged_pack_is_made_anew(damage: str) -> None:
    """Whatever was damaged: with the raw bytes of the chunks it comes out byte for byte; without, not at all."""
    name, data, rows = a_pack()
    broken = bytearray(data)
    if damage in ("chunk", "several"):
        broken[10] ^= 1
    if damage == "several":
        broken[rows[2].offset + 40] ^= 1
    if damage == "delta":
        broken[rows[-1].offset + 40] ^= 1
    if damage == "index":
        broken[-40] ^= 1
    if damage == "trailer":
        broken[-1] ^= 1
    left = None if damage == "gone" else bytes(broken[: rows[3].offset]) if damage == "cut" else bytes(broken)
    found = trio.run(examine, name, left, rows, only_the_base)
    assert not found.is_sound and found.chunks == rows
    raw_of = {digest(raw): raw for raw in (*RAW.values(), AFTER.tobytes(), BEFORE.tobytes())}

    async def everything(chunk: ChunkId, length: int) -> bytes | None:
        return raw_of[chunk]

    assert trio.run(rebuild, name, left, found, everything) == data
    if damage not in ("index", "trailer"):
        assert trio.run(rebuild, name, left, found, only_the_base) is None
    assert trio.run(examine, name, data, (), only_the_base).is_sound


def test_a_pack_of_which_nobody_knows_what_was_in_it() -> None:
    """Its index is damaged and the catalog knows some of its chunks only: nothing is guessed."""
    name, data, rows = a_pack()
    found = trio.run(examine, name, data[:-1] + b"?", rows[:2], only_the_base)
    assert found.chunks is None and not found.is_sound
    assert trio.run(rebuild, name, data, found, only_the_base) is None


def test_a_delta_whose_base_nobody_has() -> None:
    """Its bytes cannot be told to be right, nor wrong; nothing is put in their place, also where others are damaged."""
    name, data, rows = a_pack()

    async def nothing(chunk: ChunkId, length: int) -> bytes | None:
        return None

    async def all_but_the_base(chunk: ChunkId, length: int) -> bytes | None:
        return {digest(raw): raw for raw in RAW.values()}.get(chunk)

    base = digest(BEFORE.tobytes())
    found = trio.run(examine, name, data, rows, nothing)
    assert found.is_sound and found.baseless == {base}
    assert not found.without({base}, {rows[-1].id}).is_sound
    assert found.without({base}, {rows[-1].id}).bad == {len(rows) - 1}
    assert found.without({base}, {rows[0].id}).is_sound, "nobody needs the delta"
    broken = bytearray(data)
    broken[10] ^= 1
    found = trio.run(examine, name, bytes(broken), rows, all_but_the_base)
    assert len(found.bad) == 1 and found.baseless == {base}
    assert trio.run(rebuild, name, bytes(broken), found, all_but_the_base) is None


def test_packs_in_doubt_are_looked_at_ever_more_rarely() -> None:
    """One that stays bad, and one that cannot be looked at now, do not keep the others from being mended."""
    looks: dict[bytes, list[float]] = {b"bad": [], b"fails": [], b"heals": []}
    left = [ObjectId(name) for name in looks]

    async def mend(name: ObjectId) -> None:
        looks[name].append(trio.current_time())
        if name == b"fails":
            raise RemoteError("no answer", temporary=True)
        if name == b"heals":
            left.remove(name)

    async def main() -> None:
        began = trio.current_time()
        with trio.move_on_after(20_000):
            await heal(lambda: list(left), mend, 60.0)
        for name in (b"bad", b"fails"):
            pauses = [after - before for before, after in pairwise([began, *looks[name]])]
            assert pauses == sorted(pauses) and 60 <= pauses[0] <= 120 and 3600 <= pauses[-1] <= 3630
        assert len(looks[b"heals"]) == 1

    trio.run(main, clock=MockClock(autojump_threshold=0))
