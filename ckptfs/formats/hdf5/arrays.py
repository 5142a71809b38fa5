"""The arrays that index chunks: VII.C, "Fixed Array Index", and VII.D, "Extensible Array Index"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptfs.errors import FormatError
from ckptfs.formats.hdf5.file import File


def fixed_array(file: File, address: int, most: int) -> Iterator[tuple[int, int]]:
    """(index, address) of every chunk of the array at *address*; FormatError when it has more than *most*."""
    head = file.read(address, 8 + file.length_bytes + file.address_bytes)
    head.expect(b"FAHD", version=0)
    client, entry_bytes, page_bits = head.integer(1), head.integer(1), head.integer(1)
    count, block = head.length(), head.address()
    if client != 0 or entry_bytes != file.address_bytes or page_bits > 62:
        raise FormatError("an array of HDF5 that is not of plain chunks")
    if block is None:
        return
    if count > most:
        raise FormatError("too many chunks in an HDF5 dataset")
    page = 1 << page_bits
    at = block + 6 + file.address_bytes
    file.read(block, 4).expect(b"FADB")
    if count <= page:
        yield from _entries(file, at, 0, count)
        return
    pages = -(-count // page)
    begun = file.read(at, -(-pages // 8)).data
    at += len(begun) + 4
    for number in range(pages):
        if _is_set(begun, number):
            first = number * page
            yield from _entries(file, at + number * (page * entry_bytes + 4), first, min(page, count - first))


def _entries(file: File, address: int, first: int, count: int) -> Iterator[tuple[int, int]]:
    entries = file.read(address, count * file.address_bytes)
    for number in range(first, first + count):
        chunk = entries.address()
        if chunk is not None:
            yield number, chunk


def _is_set(flags: bytes, number: int) -> bool:
    """Bits are counted from the highest of the first byte on."""
    return bool(flags[number // 8] & 0x80 >> number % 8)


@dataclass(frozen=True)
class _Extensible:
    """What the header of an extensible array says."""

    file: File
    offset_bytes: int
    """Of the field in a block that says where it is in the array."""
    page: int
    """Elements in a page; a data block with more of them is pages."""

    @property
    def _prefix_bytes(self) -> int:
        return 6 + self.file.address_bytes + self.offset_bytes

    def data_block(self, address: int | None, first: int, count: int) -> Iterator[tuple[int, int]]:
        """The *count* elements of a data block without pages, of which *first* is the first."""
        if count > self.page:
            raise FormatError("a data block of HDF5 that has pages unexpectedly")
        if address is not None:
            self.file.read(address, 4).expect(b"EADB")
            yield from _entries(self.file, address + self._prefix_bytes, first, count)

    def secondary_block(self, address: int | None, first: int, blocks: int, count: int) -> Iterator[tuple[int, int]]:
        """The elements of a secondary block of so many *blocks* of *count* elements each."""
        if address is None:
            return
        file = self.file
        pages = count // self.page if count > self.page else 0
        flag_bytes = blocks * -(-pages // 8)
        fields = file.read(address, self._prefix_bytes + flag_bytes + blocks * file.address_bytes)
        fields.expect(b"EASB")
        fields.take(self._prefix_bytes - 4)
        flags = fields.take(flag_bytes)  # of all pages in a row
        for number in range(blocks):
            block, start = fields.address(), first + number * count
            if not pages:
                yield from self.data_block(block, start, count)
            elif block is not None:
                file.read(block, 4).expect(b"EADB")
                at = block + self._prefix_bytes + 4
                for page in range(pages):
                    if _is_set(flags, number * pages + page):
                        page_at = at + page * (self.page * file.address_bytes + 4)
                        yield from _entries(file, page_at, start + page * self.page, self.page)


def extensible_array(file: File, address: int, most: int) -> Iterator[tuple[int, int]]:
    """(index, address) of every chunk of the array at *address*; FormatError when it has more than *most*."""
    head = file.read(address, 12 + 6 * file.length_bytes + file.address_bytes)
    head.expect(b"EAHD", version=0)
    client, entry_bytes, bits, indexed, least, pointers, page_bits = head.take(7)
    head.take(4 * file.length_bytes)
    end, _, block = head.length(), head.length(), head.address()
    if client != 0 or entry_bytes != file.address_bytes or not least or not pointers or page_bits > 62:
        raise FormatError("an array of HDF5 that is not of plain chunks")
    if block is None:
        return
    if end > most:
        raise FormatError("too many chunks in an HDF5 dataset")
    array = _Extensible(file, -(-bits // 8), 1 << page_bits)
    # Level by level, data blocks are twice as many, then twice as long. The index block names those of the first levels
    # itself, of the others it names one secondary block each.
    direct = 2 * (pointers.bit_length() - 1)
    levels = max(direct, 2 + bits - least.bit_length())
    at = block + 6 + file.address_bytes
    yield from _entries(file, at, 0, indexed)
    named = file.read(at + indexed * file.address_bytes, (2 * (pointers - 1) + levels - direct) * file.address_bytes)
    first = indexed
    for level in range(levels):
        blocks, count = 1 << level // 2, least << (level + 1) // 2
        if first >= end:
            break
        if level < direct:
            for number in range(blocks):
                yield from array.data_block(named.address(), first + number * count, count)
        else:
            yield from array.secondary_block(named.address(), first, blocks, count)
        first += blocks * count
