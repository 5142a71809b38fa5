#!/usr/bin/env python3
"""How fast one core encodes and decodes weights, and how small they become.

    python bench/series.py SERIES --regimes A,B-weights
    python bench/codec.py SERIES [--runs 5] [--mib 64]

The large tensors of two neighbouring checkpoints, in pieces of up to 1 MiB as chunks are: alone, and as deltas against
the checkpoint before. Beside ckptfs's codec, the very same byte planes compressed by zstd at level 1. Rates are those
of the raw bytes, by processor time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.figures import console, spread, table, turns  # noqa: E402  (this directory must leave sys.path first)
from bench.machine import MIB, describe  # noqa: E402
from bench.savings import found  # noqa: E402
from ckptfs.encoding import codec, delta, planes  # noqa: E402
from ckptfs.formats.base import FileSource  # noqa: E402
from ckptfs.formats.recognise import recognise  # noqa: E402

_PIECE_BYTES, _LEAST_BYTES = 1 * MIB, MIB // 4
_WIDTHS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Piece:
    """A run of one tensor, and the same run of the checkpoint before."""

    raw: bytes
    base: bytes
    dtype: str


@dataclass(frozen=True)
class Way:
    name: str
    encode: Callable[[Piece], tuple[int, list[bytes]]]
    """The codec, 0 where it is always the same, and the parts that are stored."""
    decode: Callable[[Piece, int, list[bytes]], bytearray | memoryview]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("series", type=Path, help="what bench/series.py made")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--mib", type=int, default=64, help="at most so much of each checkpoint")
    arguments = options.parse_args()
    print(describe(arguments.series), flush=True)
    for regime, words in (("A", "fp32 weights"), ("B-weights", "bf16 weights")):
        before, after = found(arguments.series / regime)[-2:]
        pieces = read(before, after)[: arguments.mib * MIB // _PIECE_BYTES]
        report(f"{words}: {len(pieces)} pieces, {arguments.runs} runs", pieces, arguments.runs)


def read(before: Path, after: Path) -> list[Piece]:
    """What two checkpoints have in common: pieces of the tensors that are long enough."""
    pieces = []
    with open(before / "model.safetensors", "rb") as old, open(after / "model.safetensors", "rb") as new:
        sources = FileSource(old.fileno()), FileSource(new.fileno())
        tensors = {each.name: each for each in recognise(sources[0])}
        for tensor in recognise(sources[1]):
            for at in range(0, tensor.end - tensor.start, _PIECE_BYTES):
                length = min(_PIECE_BYTES, tensor.end - tensor.start - at)
                if length >= _LEAST_BYTES:
                    raw = sources[1].read(tensor.start + at, length)
                    pieces.append(Piece(raw, sources[0].read(tensors[tensor.name].start + at, length), tensor.dtype))
    return pieces


def report(title: str, pieces: Sequence[Piece], runs: int) -> None:
    encoding: dict[str, list[float]] = defaultdict(list)
    decoding: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, float] = {}
    total = sum(len(piece.raw) for piece in pieces)
    for _, way in turns(WAYS, runs):
        started = time.process_time()
        encoded = [way.encode(piece) for piece in pieces]
        between = time.process_time()
        decoded = [way.decode(piece, *stored) for piece, stored in zip(pieces, encoded, strict=True)]
        ended = time.process_time()
        assert all(bytes(each) == piece.raw for each, piece in zip(decoded, pieces, strict=True)), way.name
        encoding[way.name].append(total / 1e9 / (between - started))
        decoding[way.name].append(total / 1e9 / (ended - between))
        shares[way.name] = sum(len(part) for _, parts in encoded for part in parts) / total
    shown = table(title, "", "share", "encode GB/s", "decode GB/s")
    for name, share in shares.items():
        shown.add_row(name, f"{share:.3f}", spread(encoding[name]), spread(decoding[name]))
    console.print(shown)


def encode(piece: Piece) -> tuple[int, list[bytes]]:
    number, data = codec.encode(piece.raw, piece.dtype)
    return number, [data]


def encode_delta(piece: Piece) -> tuple[int, list[bytes]]:
    number, data = codec.encode_delta(piece.raw, piece.base, piece.dtype)
    return number, [data]


def decode(piece: Piece, number: int, parts: list[bytes]) -> memoryview:
    return codec.decode(number, parts[0], len(piece.raw), base=piece.base if number in codec.DELTAS else None)


_compressor = zstandard.ZstdCompressor(level=1)
_decompressor = zstandard.ZstdDecompressor()


def encode_at_level_1(piece: Piece) -> tuple[int, list[bytes]]:
    return 0, _planes_at_level_1(piece.raw, _WIDTHS[piece.dtype])


def decode_at_level_1(piece: Piece, number: int, parts: list[bytes]) -> bytearray:
    raw = bytearray(len(piece.raw))
    planes.join([_decompressor.decompress(part) for part in parts], memoryview(raw))
    return raw


def encode_delta_at_level_1(piece: Piece) -> tuple[int, list[bytes]]:
    folded, width = bytearray(len(piece.raw)), _WIDTHS[piece.dtype]
    delta.difference(piece.raw, piece.base, memoryview(folded), width)
    return 0, _planes_at_level_1(folded, width)


def decode_delta_at_level_1(piece: Piece, number: int, parts: list[bytes]) -> bytearray:
    raw = decode_at_level_1(piece, number, parts)
    delta.restore(memoryview(raw), piece.base, _WIDTHS[piece.dtype])
    return raw


def _planes_at_level_1(data: bytes | bytearray, width: int) -> list[bytes]:
    parted = memoryview(bytearray(len(data)))
    planes.part(data, parted, width)
    count = len(data) // width
    return [_compressor.compress(parted[at * count : (at + 1) * count]) for at in range(width)]


WAYS = (
    Way("ckptfs", encode, decode),
    Way("planes, zstd -1", encode_at_level_1, decode_at_level_1),
    Way("ckptfs, delta", encode_delta, decode),
    Way("delta, planes, zstd -1", encode_delta_at_level_1, decode_delta_at_level_1),
)

if __name__ == "__main__":
    main()
