"""The header of a GGUF file: which tensors it holds and where.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian; the sizes of the
quantised types from `ggml-common.h` there. Magic, version, how many tensors and key-value pairs; the pairs; a
description of each tensor; from the next multiple of `general.alignment` on the tensors' bytes. Quantised tensors have
dtype `UNKNOWN` here: their elements are blocks.
"""

from __future__ import annotations

import math

from ckptfs.errors import FormatError
from ckptfs.formats.base import MAX_NAME, MAX_TENSORS, UNKNOWN, Cursor, Source, Tensor, tidy

MAGIC = b"GGUF"

MAX_VALUES = 2_000_000
"""Strings in the key-value pairs, two seconds' worth: the tokens and merges of a vocabulary are up to 800,000."""

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the values of each type that has a fixed length."""
_UINT32, _STRING, _ARRAY = 4, 8, 9

_PLAIN = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"}

_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66),
    17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54),
    35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}  # fmt: skip
"""By the number of the type: elements and bytes of a block. Tensors of other types end where the next one begins."""


def read_tensors(source: Source) -> list[Tensor]:
    """The tensors in file order; FormatError when this is no sound GGUF file."""
    cursor = Cursor(source, window=1 << 16)
    if cursor.take(4) != MAGIC or cursor.integer(4) not in (2, 3):
        raise FormatError("no GGUF file of version 2 or 3")
    tensors, pairs = cursor.integer(8), cursor.integer(8)
    if tensors > MAX_TENSORS or pairs > MAX_VALUES:
        raise FormatError("too many tensors or values in a GGUF file")
    alignment = _alignment(cursor, pairs)
    infos = [_info(cursor) for _ in range(tensors)]
    data = -(-cursor.at // alignment) * alignment
    infos.sort(key=lambda info: info[3])
    ends = [info[3] for info in infos[1:]] + [source.size - data]
    return tidy((_tensor(*info, data, end) for info, end in zip(infos, ends, strict=False)), source.size)


def _alignment(cursor: Cursor, pairs: int) -> int:
    """Go past the key-value pairs. Returns what they say of the alignment of tensors."""
    alignment, left = 32, MAX_VALUES
    for _ in range(pairs):
        key = _string(cursor)
        kind = cursor.integer(4)
        if key == "general.alignment" and kind == _UINT32:
            alignment = cursor.integer(4)
            continue
        count = 1
        if kind == _ARRAY:
            kind, count = cursor.integer(4), cursor.integer(8)
        if kind in _WIDTHS:
            cursor.skip(_WIDTHS[kind] * count)
        elif kind == _STRING:
            left -= count
            if left < 0:
                raise FormatError("too many strings in a GGUF file")
            for _ in range(count):
                cursor.skip(cursor.integer(8))
        else:
            raise FormatError("a value of an unknown type in a GGUF file")
    if not 1 <= alignment <= 1 << 30:
        raise FormatError("an alignment that makes no sense")
    return alignment


def _info(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (outermost dimension first), type, and offset behind the header."""
    name = _string(cursor)
    rank = cursor.integer(4)
    if rank > 16:
        raise FormatError("a tensor of too many dimensions in a GGUF file")
    shape = tuple(reversed([cursor.integer(8) for _ in range(rank)]))
    return name, shape, cursor.integer(4), cursor.integer(8)


def _string(cursor: Cursor) -> str:
    length = cursor.integer(8)
    text = cursor.take(min(length, MAX_NAME))
    cursor.skip(length - len(text))
    return text.decode("utf-8", "replace")


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int, data: int, end: int) -> Tensor:
    """*end* is where the next one begins."""
    if kind in _BLOCKS:
        elements, size = _BLOCKS[kind]
        end = offset + math.prod(shape) // elements * size
    return Tensor(name, _PLAIN.get(kind, UNKNOWN), shape, data + offset, data + end)
