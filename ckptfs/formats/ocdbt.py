"""The data files that Orbax and TensorStore write in an OCDBT database (`d/<name>`): where the values in them begin.

Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, "Storage format", and RFC 8878 for Zstandard
frames. A data file is values one behind the other, and nodes of the B-tree that names them. The tree says where a value
lies, but mostly in a node of another file, so it is not asked: the values that matter are chunks of zarr arrays, which
are Zstandard frames (with zarr 3, shards of them), and a frame says how long it is. What an array compresses to depends
on nothing but its bytes and the compressor, so an array that did not change is the same frame in the next save.
"""

from __future__ import annotations

import zlib

from ckptfs.errors import FormatError
from ckptfs.formats.base import MAX_TENSORS, UNKNOWN, Cursor, Source, Tensor, tidy

FRAME = b"\x28\xb5\x2f\xfd"
NODE = b"\x0c\xdb\x20\xde"

MAX_BLOCKS = 1_000_000
"""Blocks of all frames, three seconds' worth and 122 GiB of what was compressed: a block is mostly 128 KiB."""

_NAMED_BY = 64
"""Bytes at either end of a frame that make its name."""

_SHARD_MOST = 1 << 16
"""Frames in one shard."""


def read_tensors(source: Source) -> list[Tensor]:
    """The frames, each as a tensor of unknown type; FormatError when this is no such file.

    What follows a value that is no frame is not looked at. One frame alone is some compressed file, of which nothing is
    known.
    """
    cursor = Cursor(source, window=24)
    frames: list[tuple[int, int]] = []
    blocks = others = 0
    value = 0  # the first frame of those that may be one value: a shard of zarr 3
    while cursor.left >= 12 and len(frames) <= MAX_TENSORS:
        start = cursor.at
        magic = cursor.take(4)
        try:
            if magic == FRAME:
                blocks += _skip_frame(cursor, MAX_BLOCKS - blocks)
                frames.append((start, cursor.at))
                continue
            if magic == NODE:  # its length counts from its own start
                cursor.skip(cursor.integer(8) - 12)
            else:
                cursor.at = start
                _skip_index(cursor, frames[value:])
        except FormatError:
            break
        others += 1
        value = len(frames)
    if len(frames) + others < 2:
        raise FormatError("neither frames in a row nor a node")
    tensors = (Tensor(_name(source, start, end), UNKNOWN, (end - start,), start, end) for start, end in frames)
    return tidy(tensors, source.size)


def _name(source: Source, start: int, end: int) -> str:
    """What a frame is called: after what is in it, since its own name is not here and its place changes."""
    length = min(_NAMED_BY, end - start)
    ends = source.read(start, length) + source.read(end - length, length)
    return f"zstd-{zlib.crc32(ends):08x}"


def _skip_frame(cursor: Cursor, most: int) -> int:
    """Go past a frame, behind its magic. Returns how many blocks it has, at most *most*."""
    descriptor = cursor.integer(1)
    is_single = descriptor >> 5 & 1
    size = (is_single, 2, 4, 8)[descriptor >> 6]
    cursor.skip(1 - is_single + (0, 1, 2, 4)[descriptor & 3] + size)
    for count in range(1, most + 1):
        block = cursor.integer(3)
        cursor.skip(1 if block >> 1 & 3 == 1 else block >> 3)
        if block & 1:
            cursor.skip(4 * (descriptor >> 2 & 1))
            return count
    raise FormatError("too many blocks")


def _skip_index(cursor: Cursor, frames: list[tuple[int, int]]) -> None:
    """Go past the index that ends a shard of these *frames*; FormatError where there is none.

    Source: https://zarr-specs.readthedocs.io, "Sharding codec": offset and length of each inner chunk, and a CRC32C.
    """
    if not frames or len(frames) > _SHARD_MOST:
        raise FormatError("neither a frame, a node, nor the index of a shard")
    first = frames[0][0]
    told = {(cursor.integer(8), cursor.integer(8)) for _ in frames}
    if told != {(start - first, end - start) for start, end in frames}:
        raise FormatError("not the index of a shard")
    cursor.skip(4)
