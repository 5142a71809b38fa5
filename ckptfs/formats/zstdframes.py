"""Zstandard frames that stand one behind the other: the data files of Orbax (OCDBT), which hold arrays so compressed.

An array that did not change makes the same frame, but which file holds it, and where, changes with every save. Cut at
frames, it is found again whole; cut by content, some 64 KiB at either end of it are not. Source of the format: RFC
8878, section 3.1.1. Nothing is decompressed: the lengths of a frame's blocks say where it ends.
"""

from __future__ import annotations

from ckptfs.errors import FormatError
from ckptfs.formats.base import MAX_TENSORS, UNKNOWN, Source, Tensor, read_exactly

MAGIC = b"\x28\xb5\x2f\xfd"

MAX_BLOCKS = 1 << 20
"""In one file, 128 GiB of content: two seconds. A hostile one has a block every four bytes."""

_MAX_BLOCK_BYTES = 128 << 10
_DICTIONARY_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_RLE, _RESERVED = 1, 3


def read_tensors(source: Source) -> list[Tensor]:
    """The frames from the file's start up to something else, each as bytes of unknown type.

    None for a file that is one frame from start to end: a compressed file like any other.
    """
    tensors: list[Tensor] = []
    at = blocks = 0
    while len(tensors) < MAX_TENSORS and source.read(at, len(MAGIC)) == MAGIC:
        try:
            end, blocks = _end(source, at, blocks)
        except FormatError:
            break  # cut off, or no frame at all
        tensors.append(Tensor(str(len(tensors)), UNKNOWN, (), at, end))
        at = end
    return [] if len(tensors) == 1 and at == source.size else tensors


def _end(source: Source, at: int, blocks: int) -> tuple[int, int]:
    """Where the frame that starts at *at* ends, and *blocks* with its own added."""
    descriptor = read_exactly(source, at + len(MAGIC), 1)[0]
    if descriptor & 8:
        raise FormatError("a zstd frame of a newer kind")
    size, single, checksum, dictionary = descriptor >> 6, descriptor >> 5 & 1, descriptor >> 2 & 1, descriptor & 3
    content_size = _CONTENT_SIZE_BYTES[size] or single  # a frame of one segment always tells it
    at += len(MAGIC) + 1 + (not single) + _DICTIONARY_BYTES[dictionary] + content_size
    last = 0
    while not last:
        blocks += 1
        header = int.from_bytes(read_exactly(source, at, 3), "little")
        last, kind, length = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED or length > _MAX_BLOCK_BYTES or blocks > MAX_BLOCKS:
            raise FormatError("not a block of a zstd frame")
        at += 3 + (1 if kind == _RLE else length)
    at += 4 * checksum
    if at > source.size:
        raise FormatError("a zstd frame longer than its file")
    return at, blocks
