"""What the format readers share: tensors, pieces, and random access to a file's bytes. Reads no format itself."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ckptfs.errors import FormatError

MAX_NAME = 512
"""Characters of a tensor's name; hostile nesting makes them long."""

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


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an archive."""

    name: str
    start: int
    """Offset in the file of its (perhaps compressed) bytes."""
    end: int
    stored: bool
    """True when the bytes are the member itself: neither compressed nor encrypted."""


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


class Window:
    """The `Source` that is a part of another one: a member of an archive."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self._source = source
        self._start = start
        self.size = end - start

    def read(self, offset: int, length: int) -> bytes:
        return self._source.read(self._start + offset, max(0, min(length, self.size - offset)))


class Budget:
    """A `Source` of which only so much may be read: FormatError beyond *most* bytes, or a 64th as many reads.

    For formats whose structures refer to each other, in circles where they are hostile, and for members of archives, of
    which there are many: what each of them costs is bounded, and so is the sum. Of a small file it is a few times all.
    """

    def __init__(self, source: Source, most: int) -> None:
        self._source = source
        self._left = min(most, 4 * source.size + 100_000)
        self.size = source.size

    def read(self, offset: int, length: int) -> bytes:
        self._left -= max(length, 64)
        if self._left < 0:
            raise FormatError("the file's structure takes too much reading")
        return self._source.read(offset, length)


class Cursor:
    """Reads a source forwards in small steps, a *window* of bytes at a time."""

    def __init__(self, source: Source, at: int = 0, window: int = 4096) -> None:
        self._source = source
        self._window = window
        self._ahead = b""
        self._ahead_at = at
        self.at = at
        """Where the next `take` begins; may be set."""

    @property
    def left(self) -> int:
        """Bytes until the end of the file."""
        return self._source.size - self.at

    def take(self, length: int) -> bytes:
        """The next *length* bytes, all of them read at once; FormatError when the file does not have them."""
        start = self.at - self._ahead_at
        if start < 0 or start + length > len(self._ahead):
            if length < 0 or length > self.left:
                raise FormatError(f"the file ends inside bytes {self.at}..{self.at + length}")
            self._ahead = read_exactly(self._source, self.at, min(max(length, self._window), self.left))
            self._ahead_at, start = self.at, 0
        self.at += length
        return self._ahead[start : start + length]

    def skip(self, length: int) -> None:
        """Go on *length* bytes later; FormatError when that is behind the end."""
        if not 0 <= length <= self.left:
            raise FormatError(f"the file ends inside bytes {self.at}..{self.at + length}")
        self.at += length

    def integer(self, width: int) -> int:
        """The next *width* bytes as an unsigned little-endian number."""
        return int.from_bytes(self.take(width), "little")


def checked_shape(value: object) -> tuple[int, ...]:
    """*value* as a shape; FormatError unless it is a short sequence of sizes below 2^63."""
    if not isinstance(value, list | tuple) or len(value) > 64:
        raise FormatError("not a shape")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 63:
            raise FormatError("not a shape")
    return tuple(value)


def joined(name: str, label: str) -> str:
    """*name*, a dot, *label*: the path of what lies in something; cut off where it is too long for a name."""
    label = label[:MAX_NAME]
    return name if len(name) > MAX_NAME else f"{name}.{label}" if name else label


def byte_length(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a dense array, or None where the dtype does not say. Sub-byte types round up to a whole byte."""
    bits = BITS.get(dtype)
    return None if bits is None else -(-math.prod(shape) * bits // 8)


def described(name: str, dtype: str, shape: tuple[int, ...], start: int, end: int) -> Tensor:
    """The tensor; as bytes of unknown type where dtype and shape do not make the length."""
    if byte_length(dtype, shape) == end - start:
        return Tensor(name, dtype, shape, start, end)
    return Tensor(name, UNKNOWN, (end - start,), start, end)


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
