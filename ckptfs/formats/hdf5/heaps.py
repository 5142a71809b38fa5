"""The heaps of HDF5 that hold links: local heaps, and fractal heaps as far as links need them. III.D and III.G."""

from __future__ import annotations

from ckptfs.errors import FormatError
from ckptfs.formats.base import MAX_NAME
from ckptfs.formats.hdf5.file import Fields, File


class LocalHeap:
    """Names of the members of an old-style group."""

    def __init__(self, file: File, address: int) -> None:
        head = file.read(address, 8 + 2 * file.length_bytes + file.address_bytes)
        head.expect(b"HEAP", version=0)
        head.take(3)
        self._length = head.length()
        head.length()
        self._at = head.defined_address()
        self._file = file

    def name(self, offset: int) -> str:
        """The name that begins at *offset*."""
        length = min(self._length - offset, MAX_NAME)
        return self._file.read(self._at + offset, length).data.split(b"\0")[0].decode("utf-8", "replace")


class FractalHeap:
    """Objects of a fractal heap without filters; only managed ones, which links are unless they are enormous."""

    def __init__(self, file: File, address: int) -> None:
        head = file.read(address, 22 + 12 * file.length_bytes + 3 * file.address_bytes)
        head.expect(b"FRHP", version=0)
        self._file = file
        head.take(2)
        if head.integer(2):
            raise FormatError("a heap of HDF5 with filters")
        head.take(1)
        largest_object = head.integer(4)
        head.take(2 * file.address_bytes + 10 * file.length_bytes)
        self._width = head.integer(2)
        self._start_bytes, self._direct_bytes = head.length(), head.length()
        self._heap_bits = head.integer(2)
        head.take(2)
        self._root, self._rows = head.address(), head.integer(2)
        self._offset_bytes = -(-self._heap_bits // 8)
        self._length_bytes = -(-min(self._direct_bytes, largest_object).bit_length() // 8)
        if not self._width or not self._start_bytes or self._start_bytes > self._direct_bytes:
            raise FormatError("a heap of HDF5 that makes no sense")

    def managed(self, heap_id: bytes) -> Fields:
        """The object that *heap_id* means; FormatError when it is not in a block of the heap."""
        fields = Fields(self._file, heap_id)
        if fields.integer(1) & 0xF0:
            raise FormatError("an object of HDF5 that is not in its heap")
        offset, length = fields.integer(self._offset_bytes), fields.integer(self._length_bytes)
        if self._root is None:
            raise FormatError("an object in an empty heap of HDF5")
        block, rows = self._root, self._rows
        while rows:  # it is an indirect block
            block, rows, offset = self._child(block, rows, offset)
        return self._file.read(block + offset, length)

    def _child(self, block: int, rows: int, offset: int) -> tuple[int, int, int]:
        """Of an indirect block of so many rows: the child with *offset* in it, its rows, and the offset in it."""
        row, size = 0, self._start_bytes
        while offset >= size * self._width:
            offset -= size * self._width
            row += 1
            size = self._block_bytes(row)
        if row >= rows:
            raise FormatError("an object outside its heap of HDF5")
        direct_rows = 2 + (self._direct_bytes // self._start_bytes).bit_length() - 1
        number = row * self._width + offset // size
        at = 5 + self._file.address_bytes + self._offset_bytes + number * self._file.address_bytes
        child = self._file.read(block + at, self._file.address_bytes).defined_address()
        if row < direct_rows:
            return child, 0, offset % size
        below = (size // (self._start_bytes * self._width)).bit_length()
        return child, min(below, rows - 1), offset % size

    def _block_bytes(self, row: int) -> int:
        if row > 64:
            raise FormatError("an object outside its heap of HDF5")
        return self._start_bytes << max(0, row - 1)
