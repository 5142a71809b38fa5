"""Addresses, lengths and fields: what all structures of an HDF5 file are made of."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.errors import FormatError
from ckptfs.formats.base import Source, read_exactly

MAX_STRUCTURE_BYTES = 16 << 20
"""Of one structure, read at once; an array of 500,000 chunks has 4 MB."""


@dataclass(frozen=True)
class File:
    """An HDF5 file whose superblock was read."""

    source: Source
    base: int
    """Where in the file address 0 is."""
    address_bytes: int
    length_bytes: int

    def read(self, address: int, length: int) -> Fields:
        """The *length* bytes at *address*; FormatError when the file does not have them."""
        if length > MAX_STRUCTURE_BYTES:
            raise FormatError("an HDF5 structure too long")
        return Fields(self, read_exactly(self.source, self.base + address, length))


class Fields:
    """The bytes of one structure, taken field by field; FormatError where they end too early."""

    def __init__(self, file: File, data: bytes) -> None:
        self.file = file
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, length: int) -> bytes:
        if not 0 <= length <= self.left:
            raise FormatError("an HDF5 structure that ends early")
        self.at += length
        return self.data[self.at - length : self.at]

    def expect(self, signature: bytes, *, version: int | None = None) -> None:
        """Go past *signature* and, where it is given, a *version*; FormatError when it is another."""
        if self.take(len(signature)) != signature:
            raise FormatError(f"no {signature.decode()} where an HDF5 file says")
        if version is not None and self.integer(1) != version:
            raise FormatError(f"{signature.decode()} of an unknown version")

    def integer(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def length(self) -> int:
        return self.integer(self.file.length_bytes)

    def address(self) -> int | None:
        """None where it is undefined: all ones."""
        data = self.take(self.file.address_bytes)
        return None if data.count(0xFF) == len(data) else int.from_bytes(data, "little")

    def defined_address(self) -> int:
        """FormatError where it is undefined."""
        address = self.address()
        if address is None:
            raise FormatError("an HDF5 address that is needed is undefined")
        return address
