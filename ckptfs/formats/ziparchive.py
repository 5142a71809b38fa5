"""The members of ZIP archives and where their bytes lie; also of several archives one behind the other.

Source: PKWARE APPNOTE 6.3.10 (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT), sections 4.3.7 local
header, 4.3.12 central directory, 4.3.14 to 4.3.16 its end records, 4.5.3 ZIP64. The stdlib's `zipfile` is not used
because it reads the whole central directory at the size that the file claims, and knows no chain of archives, which is
how torch.distributed.checkpoint writes a .distcp.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ckptfs.errors import FormatError
from ckptfs.formats.base import MAX_TENSORS, Member, Source, read_exactly

LOCAL_MAGIC = b"PK\x03\x04"

MAX_DIRECTORY_BYTES = 32 << 20
"""Bytes of central directories in one file; 100,000 members of torch.save need half."""

_END = struct.Struct("<4sHHHHIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")


@dataclass(frozen=True, slots=True)
class _End:
    """What the end of one archive says."""

    base: int  # where the archive itself starts in the file
    directory: int  # offset of the central directory in the file
    length: int
    count: int


def read_archives(source: Source) -> list[list[Member]]:
    """The members of every archive in the file, first archive first; FormatError when it is not wholly archives.

    Bytes before the first archive that can be reached from the end are allowed: their archives are just not seen.
    """
    ends = [_find_end(source)]
    budget = MAX_DIRECTORY_BYTES - ends[0].length
    while ends[-1].base > 0 and len(ends) < MAX_TENSORS:
        try:
            end = _end_at(source, ends[-1].base - _END.size)
        except FormatError:
            break
        budget -= end.length
        if budget < 0:
            raise FormatError("central directories too long")
        ends.append(end)
    archives = [_members(source, end) for end in reversed(ends)]
    if sum(map(len, archives)) > 4 * MAX_TENSORS:
        raise FormatError("too many members")
    return archives


def _find_end(source: Source) -> _End:
    """The end record of the last archive; a comment of up to 65,535 bytes may follow it."""
    if source.size < _END.size:
        raise FormatError("too short for a ZIP archive")
    try:
        return _end_at(source, source.size - _END.size)
    except FormatError:
        pass  # then there is a comment, or no archive
    length = min(source.size, _END.size + 0xFFFF)
    tail = read_exactly(source, source.size - length, length)
    found = tail.rfind(b"PK\x05\x06", 0, length - _END.size + 4)
    if found < 0:
        raise FormatError("no end of a ZIP archive")
    return _end_at(source, source.size - length + found, comment=length - found - _END.size)


def _end_at(source: Source, at: int, comment: int = 0) -> _End:
    """The end record that lies at *at* and is followed by *comment* bytes."""
    if at < 0:
        raise FormatError("no end of a ZIP archive")
    magic, disk, first, here, count, length, offset, comment_length = _END.unpack(read_exactly(source, at, _END.size))
    if magic != b"PK\x05\x06" or comment_length != comment:
        raise FormatError("no end of a ZIP archive")
    directory_end = at
    if 0xFFFF in (here, count) or 0xFFFFFFFF in (length, offset) or _is_zip64(source, at):
        record = at - _END64_LOCATOR.size - _END64.size  # as everyone writes it: record, locator, end
        fields = _END64.unpack(read_exactly(source, record, _END64.size))
        if fields[0] != b"PK\x06\x06":
            raise FormatError("no ZIP64 end record")
        disk, first, here, count, length, offset = fields[4:]
        directory_end = record
    if disk or first or here != count:
        raise FormatError("a ZIP archive of several disks")
    directory = directory_end - length
    base = directory - offset
    if length > MAX_DIRECTORY_BYTES or base < 0 or count * _CENTRAL.size > length:
        raise FormatError("a central directory that does not fit")
    return _End(base, directory, length, count)


def _is_zip64(source: Source, at: int) -> bool:
    """torch writes ZIP64 records also where the small ones would do; then they say where the directory ends."""
    at -= _END64_LOCATOR.size
    return at >= _END64.size and read_exactly(source, at, 4) == b"PK\x06\x07"


def _members(source: Source, end: _End) -> list[Member]:
    data = read_exactly(source, end.directory, end.length)
    members: list[Member] = []
    at = 0
    for _ in range(end.count):
        if at + _CENTRAL.size > len(data):
            raise FormatError("a central directory that ends early")
        fields = _CENTRAL.unpack_from(data, at)
        magic, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
        name_length, extra_length, comment_length, offset = fields[10], fields[11], fields[12], fields[16]
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        if magic != b"PK\x01\x02" or at > len(data):
            raise FormatError("a central directory that does not parse")
        if 0xFFFFFFFF in (packed, size, offset):
            size, packed, offset = _zip64(data[extra_at : extra_at + extra_length], size, packed, offset)
        start = _data_start(source, end.base + offset)
        if start + packed > end.directory:
            raise FormatError("a ZIP member that runs into the central directory")
        name = data[name_at:extra_at].decode("utf-8", "surrogateescape")
        stored = method == 0 and not flags & 1 and packed == size
        members.append(Member(name, start, start + packed, stored))
    return members


def _zip64(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The three fields with those that are all ones taken from the ZIP64 extra, which holds only these, in order."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            values = [value for (value,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            wanted = [value == 0xFFFFFFFF for value in (size, packed, offset)]
            if len(values) < sum(wanted):
                raise FormatError("a ZIP64 field too short")
            found = iter(values)
            size, packed, offset = (
                next(found) if ask else old for ask, old in zip(wanted, (size, packed, offset), strict=True)
            )
            return size, packed, offset
        at += 4 + length
    raise FormatError("no ZIP64 field")


def _data_start(source: Source, at: int) -> int:
    """Where a member's bytes start: its local header may carry other extras (padding) than the central directory."""
    fields = _LOCAL.unpack(read_exactly(source, at, _LOCAL.size))
    if fields[0] != LOCAL_MAGIC:
        raise FormatError("no local header where the central directory says")
    return at + _LOCAL.size + int(fields[9]) + int(fields[10])
