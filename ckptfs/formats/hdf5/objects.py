"""Object headers and the links of groups: IV.A, III.B and III.C of the specification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptfs.errors import FormatError
from ckptfs.formats.base import MAX_NAME
from ckptfs.formats.hdf5.file import Fields, File
from ckptfs.formats.hdf5.heaps import FractalHeap, LocalHeap
from ckptfs.formats.hdf5.trees import children_v1, records_v2

DATASPACE, LINK_INFO, DATATYPE, LINK, LAYOUT, FILTERS, _CONTINUATION, SYMBOL_TABLE = 1, 2, 3, 6, 8, 11, 16, 17

_CONTINUATIONS_MOST = 4096
_SHARED = 2
"""The flag of a message that lies elsewhere, such as a datatype that has a name."""


@dataclass(frozen=True)
class Message:
    """One message of an object header."""

    kind: int
    data: bytes


def read_messages(file: File, address: int) -> list[Message]:
    """The messages of the object header at *address*, without those that lie elsewhere."""
    head = file.read(address, 16)
    if head.data.startswith(b"OHDR"):
        return _messages_v2(file, address)
    if head.integer(1) != 1:
        raise FormatError("an object header of HDF5 of an unknown version")
    head.take(7)
    chunks = [(address + 16, head.integer(4))]
    messages: list[Message] = []
    for start, length in chunks:
        fields = file.read(start, length)
        while fields.left >= 8:
            kind, size, flags = fields.integer(2), fields.integer(2), fields.integer(1)
            fields.take(3)
            _add(messages, chunks, kind, flags, Fields(file, fields.take(size)))
    return messages


def _messages_v2(file: File, address: int) -> list[Message]:
    head = file.read(address, 6)
    head.expect(b"OHDR", version=2)
    flags = head.integer(1)
    has_order = bool(flags & 4)
    at = address + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    chunks = [(at + width, file.read(at, width).integer(width))]
    messages: list[Message] = []
    for number, (start, length) in enumerate(chunks):
        fields = file.read(start, length)
        if number > 0:
            fields.expect(b"OCHK")
        behind = 4 if number > 0 else 0  # of a continuation, its checksum is part
        while fields.left - behind >= 4 + 2 * has_order:
            kind, size, flags = fields.integer(1), fields.integer(2), fields.integer(1)
            fields.take(2 * has_order)
            _add(messages, chunks, kind, flags, Fields(file, fields.take(size)))
    return messages


def _add(messages: list[Message], chunks: list[tuple[int, int]], kind: int, flags: int, fields: Fields) -> None:
    """Keep one message; add the chunk that it says follows."""
    if kind == _CONTINUATION:
        if len(chunks) >= _CONTINUATIONS_MOST:
            raise FormatError("an object header of HDF5 without an end")
        chunks.append((fields.defined_address(), fields.length()))
    elif not flags & _SHARED:
        messages.append(Message(kind, fields.data))


def read_links(file: File, messages: list[Message]) -> Iterator[tuple[str, int]]:
    """(name, address of the object header) of each hard link of the group with these messages."""
    for message in messages:
        fields = Fields(file, message.data)
        if message.kind == SYMBOL_TABLE:
            yield from _symbol_table(file, fields.defined_address(), fields.defined_address())
        elif message.kind == LINK:
            yield from _link(fields)
        elif message.kind == LINK_INFO:
            yield from _dense_links(file, fields)


def _symbol_table(file: File, tree: int, heap_address: int) -> Iterator[tuple[str, int]]:
    heap = LocalHeap(file, heap_address)
    for _, address in children_v1(file, tree, 0, file.length_bytes):
        head = file.read(address, 8)
        head.expect(b"SNOD", version=1)
        head.take(1)
        entry_bytes = 2 * file.address_bytes + 24
        count = head.integer(2)
        entries = file.read(address + 8, count * entry_bytes)
        for _ in range(count):
            entry = Fields(file, entries.take(entry_bytes))
            offset, header, cached = entry.defined_address(), entry.address(), entry.integer(4)
            if header is not None and cached != 2:  # 2 is a symbolic link
                yield heap.name(offset), header


def _link(fields: Fields) -> Iterator[tuple[str, int]]:
    if fields.integer(1) != 1:
        raise FormatError("a link of HDF5 of an unknown version")
    flags = fields.integer(1)
    kind = fields.integer(1) if flags & 8 else 0
    fields.take((8 if flags & 4 else 0) + (1 if flags & 0x10 else 0))
    name = fields.take(fields.integer(1 << (flags & 3)))[:MAX_NAME].decode("utf-8", "replace")
    if kind == 0:
        yield name, fields.defined_address()


def _dense_links(file: File, fields: Fields) -> Iterator[tuple[str, int]]:
    fields.expect(b"", version=0)
    fields.take(8 if fields.integer(1) & 1 else 0)
    heap_address, index = fields.address(), fields.address()
    if heap_address is None or index is None:
        return
    heap = FractalHeap(file, heap_address)
    for record in records_v2(file, index, 5):
        record.take(4)  # hash of the name
        yield from _link(heap.managed(record.take(record.left)))
