"""Tables of chunks in JSON: one array per column, as long as the others.

A hundred thousand rows would be as many small lists to build and check one by one; columns are checked by loops in C.
Raises FormatError, naming the column.

| column | each element |
|---|---|
| chunks | 64 hex digits: BLAKE3-256 of the chunk's raw bytes |
| lengths | raw bytes, 1 to `CHUNK_MOST` |
| dtypes | what the bytes are elements of, or null |
| offsets | in the pack object, bytes |
| stored | encoded bytes in the pack, 1 to `CHUNK_MOST` |
| codecs | codec id, see `codec` |
| bases | the chunk that a delta is against, or null |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import add, eq

from ckptfs.encoding.fields import MOST, array
from ckptfs.errors import FormatError
from ckptfs.ids import DIGEST_BYTES, ChunkId

CHUNK_MOST = 64 << 20
"""Most bytes of a chunk, raw or encoded: what a reader must be ready to hold in memory."""
CODEC_MOST = (1 << 16) - 1

_DIGITS = 2 * DIGEST_BYTES
_DTYPE = re.compile(r"[a-z0-9_]{1,32}").fullmatch


def hexes(digests: Iterable[bytes]) -> list[str]:
    """*digests* as JSON."""
    return [digest.hex() for digest in digests]


def optional_hexes(digests: Iterable[bytes | None]) -> list[str | None]:
    """The same where some are missing."""
    return [None if digest is None else digest.hex() for digest in digests]


def read_digests(value: object, what: str) -> list[bytes]:
    """A column of 32-byte digests."""
    column = array(value, what)
    if not column:
        return []
    if set(map(type, column)) != {str} or {len(str(item)) for item in column} != {_DIGITS}:
        raise FormatError(f"{what} holds something other than 64 hex digits")
    joined = "".join(map(str, column))
    try:
        data = bytes.fromhex(joined)
    except ValueError:
        data = b""
    if data.hex() != joined:  # fromhex takes capitals and spaces
        raise FormatError(f"{what} holds something other than 64 hex digits")
    return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


def read_integers(table: Mapping[str, object], what: str, count: int, least: int, most: int) -> list[int]:
    """Column *what* of *table*: *count* integers in ``[least, most]``."""
    column: list[int] = array(table[what], what)  # type: ignore[assignment]  # checked next
    if len(column) != count:
        raise FormatError(f"{what} is not as long as chunks")
    if count and (set(map(type, column)) != {int} or min(column) < least or max(column) > most):
        raise FormatError(f"{what} holds something other than integers from {least} to {most}")
    return column


def read_dtypes(value: object, count: int) -> list[str | None]:
    """Column dtypes. Equal names are one object: a hundred thousand copies would cost memory."""
    column: list[str | None] = array(value, "dtypes")  # type: ignore[assignment]  # checked next
    if len(column) != count:
        raise FormatError("dtypes is not as long as chunks")
    if not set(map(type, column)) <= {str, type(None)}:
        raise FormatError("dtypes holds something other than names and null")
    names = {name: name for name in set(column)}
    if not all(name is None or _DTYPE(name) for name in names):
        raise FormatError("dtypes holds something other than short lower-case names")
    return [names[name] for name in column]


def read_bases(value: object, chunks: Sequence[ChunkId]) -> list[ChunkId | None]:
    """Column bases."""
    column = array(value, "bases")
    if len(column) != len(chunks):
        raise FormatError("bases is not as long as chunks")
    given = iter(read_digests([item for item in column if item is not None], "bases"))
    bases = [None if item is None else ChunkId(next(given)) for item in column]
    if any(map(eq, bases, chunks)):
        raise FormatError("a chunk is a delta against itself")
    return bases


def check_ends(offsets: Sequence[int], stored: Sequence[int]) -> None:
    """No chunk ends past what an offset can say."""
    if max(map(add, offsets, stored), default=0) > MOST:
        raise FormatError("offsets reach past 2^63")
