"""What the format readers share: tensors, pieces, and random access to a file's bytes. Reads no format itself."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ckptfs.errors import FormatError

UNKNOWN = "unknown"
"""The dtype of a tensor whose elements have no name here: structured, big-endian, or not said."""

MAX_TENSORS = 100_000
"""More tensors than this in one file and it is taken as unknown: a hostile header must not cost memory or minutes."""

BITS = {
    "bool": 8, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "uint32": 32, "int32": 32, "uint64": 64, "int64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex32": 32, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6,
    "void8": 8, "void16": 16,
}  # fmt: skip
"""Bits of one element, by dtype name. The names are numpy's and torch's; `void16` is how numpy saves a bfloat16."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array of numbers in a file."""

    name: str
    """The path to it inside the file, parts joined by dots; may repeat."""
    dtype: str
    """A key of `BITS`, or `UNKNOWN`."""
    shape: tuple[int, ...]
    """As the program saw it; the memory order is not told."""
    start: int
    """Offset of its first byte in the file."""
    end: int
    """Offset behind its last byte; equal to `start` for an empty one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of file bytes that becomes one chunk."""

    start: int
    end: int
    dtype: str | None
    """The dtype of its elements where all of it is one tensor's; None for anything else."""


class Source(Protocol):
    """Random access to the bytes of one file."""

    @property
    def size(self) -> int:
        """How many bytes the file has."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """The *length* bytes at *offset*; fewer only where the file ends."""
        ...


class FileSource:
    """A `Source` over an open descriptor, which stays the caller's. Safe in several threads: it only uses pread."""

    def __init__(self, fd: int, size: int | None = None) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size if size is None else size

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        data = os.pread(self._fd, length, offset)
        while len(data) < length:  # Linux returns at most 0x7ffff000 bytes at once
            more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data


class BytesSource:
    """A `Source` over bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


def read_exactly(source: Source, offset: int, length: int) -> bytes:
    """The *length* bytes at *offset*; FormatError when the file does not have them."""
    if offset < 0 or length < 0 or offset + length > source.size:
        raise FormatError(f"bytes {offset}..{offset + length} lie outside the file of {source.size}")
    data = source.read(offset, length)
    if len(data) != length:
        raise FormatError(f"the file ends inside bytes {offset}..{offset + length}")
    return data


def checked_shape(value: object) -> tuple[int, ...]:
    """*value* as a shape; FormatError unless it is a short sequence of sizes below 2^63."""
    if not isinstance(value, list | tuple) or len(value) > 64:
        raise FormatError("not a shape")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 63:
            raise FormatError("not a shape")
    return tuple(value)


def byte_length(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a dense array, or None where the dtype does not say. Sub-byte types round up to a whole byte."""
    bits = BITS.get(dtype)
    return None if bits is None else -(-math.prod(shape) * bits // 8)


def tidy(tensors: Iterable[Tensor], size: int) -> list[Tensor]:
    """*tensors* in file order; FormatError where they overlap, leave the file or are too many."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))
    if len(ordered) > MAX_TENSORS:
        raise FormatError(f"more than {MAX_TENSORS} tensors")
    at = 0
    for tensor in ordered:
        if tensor.start < at or tensor.end < tensor.start or tensor.end > size:
            raise FormatError(f"tensor at {tensor.start}..{tensor.end} overlaps another or leaves the file")
        at = tensor.end
    return ordered
