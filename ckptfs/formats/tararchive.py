"""The members of tar archives that are not compressed, such as NeMo's .nemo, and where their bytes lie.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block"; the GNU tar manual, "Basic Tar Format",
for large numbers. The stdlib's `tarfile` is not used because it reads an extended header at whatever size the file
claims.
"""

from __future__ import annotations

import re

from ckptfs.errors import FormatError
from ckptfs.formats.base import MAX_TENSORS, Member, Source, read_exactly

BLOCK = 512
MAGIC = b"ustar"
MAGIC_AT = 257

MAX_EXTENDED_BYTES = 1 << 20
"""Of one extended header, which tells a long name or size in a few hundred."""

_PAX_SIZE = re.compile(rb"(?:\A|\n)\d{1,7} size=(\d{1,19})\n")


def read_members(source: Source) -> list[Member]:
    """The regular files in the archive, in order; FormatError when it is none. Where it is damaged, what is before."""
    members: list[Member] = []
    at = 0
    size: int | None = None  # as an extended header told it, of the next member
    while at + BLOCK <= source.size and len(members) < MAX_TENSORS:
        header = read_exactly(source, at, BLOCK)
        if not header.strip(b"\0"):
            break
        try:
            if not _is_sound(header):
                raise FormatError("no tar header")
            length = size if size is not None and header[156:157] not in b"xgLK" else _number(header[124:136])
            start = at + BLOCK
            if start + length > source.size:
                raise FormatError("a member longer than its tar archive")
            if header[156:157] == b"x":
                size = _pax_size(read_exactly(source, start, min(length, MAX_EXTENDED_BYTES)))
        except FormatError:
            if not members:
                raise
            break
        if header[156:157] in (b"0", b"\0"):
            name = header[345:500].split(b"\0")[0] + b"/" if header[257:263] == b"ustar\0" and header[345] else b""
            name += header[:100].split(b"\0")[0]
            members.append(Member(name.decode("utf-8", "surrogateescape"), start, start + length, True))
        if header[156:157] not in b"xgLK":
            size = None
        at = start + -(-length // BLOCK) * BLOCK
    return members


def _is_sound(header: bytes) -> bool:
    """Whether the header's checksum is its own: the sum of its bytes, those of the checksum taken as spaces."""
    return _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * ord(" ")


def _number(field: bytes) -> int:
    """Octal digits; from 8 GiB on, big-endian bytes behind one with the highest bit."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise FormatError("no number in a tar header")
    return int(digits or b"0", 8)


def _pax_size(records: bytes) -> int | None:
    found = _PAX_SIZE.findall(records)
    return int(found[-1]) if found else None
