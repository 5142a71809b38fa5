"""The B-trees of HDF5, of both versions: III.A of the specification."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfs.errors import FormatError
from ckptfs.formats.hdf5.file import Fields, File

_DEPTH_MOST = 30


def children_v1(file: File, address: int, kind: int, key_bytes: int) -> Iterator[tuple[bytes, int]]:
    """(key before it, address) of every child of every leaf of the version 1 tree at *address*, in order."""
    yield from _v1(file, address, kind, key_bytes, None)


def _v1(file: File, address: int, kind: int, key_bytes: int, level: int | None) -> Iterator[tuple[bytes, int]]:
    head = file.read(address, 8 + 2 * file.address_bytes)
    head.expect(b"TREE")
    found, its_level, used = head.integer(1), head.integer(1), head.integer(2)
    if found != kind or its_level > _DEPTH_MOST or (level is not None and its_level != level):
        raise FormatError("a B-tree of HDF5 that is none")  # levels fall, so that no tree is without an end
    entries = file.read(address + len(head.data), used * (key_bytes + file.address_bytes))
    for _ in range(used):
        key, child = entries.take(key_bytes), entries.defined_address()
        if its_level == 0:
            yield key, child
        else:
            yield from _v1(file, child, kind, key_bytes, its_level - 1)


def records_v2(file: File, address: int, kind: int) -> Iterator[Fields]:
    """Every record of the version 2 tree at *address*; not in order."""
    head = file.read(address, 16 + file.address_bytes + 2 + file.length_bytes)
    head.expect(b"BTHD", version=0)
    found, node_bytes, record_bytes, depth = (head.integer(width) for width in (1, 4, 2, 2))
    head.take(2)
    root, count = head.address(), head.integer(2)
    if found != kind or depth > _DEPTH_MOST or not record_bytes:
        raise FormatError("a B-tree of HDF5 that is none")
    if root is None:
        return
    # How wide the counts in a node are follows from how much can be below it.
    most = (node_bytes - 10) // record_bytes
    count_bytes = _width(most)
    totals: list[int] = [0, most]  # by level above the leaves, from 1 on: records below a child, at most
    widths: list[int] = [0, 0]
    for level in range(1, depth + 1):
        if level > 1:
            widths.append(_width(totals[level]))
        here = (node_bytes - 10) // (record_bytes + file.address_bytes + count_bytes + widths[level])
        totals.append((here + 1) * totals[level] + here)
    pending = [(root, count, depth)]
    while pending:
        node, count, level = pending.pop()
        pointer_bytes = file.address_bytes + count_bytes + widths[level] if level else 0
        fields = file.read(node, 6 + count * record_bytes + (count + 1) * pointer_bytes)
        fields.expect(b"BTIN" if level else b"BTLF", version=0)
        if fields.integer(1) != kind:
            raise FormatError("a node of another B-tree of HDF5")
        for _ in range(count):
            yield Fields(file, fields.take(record_bytes))
        for _ in range(count + 1 if level else 0):
            pending.append((fields.defined_address(), fields.integer(count_bytes), level - 1))
            fields.take(widths[level])


def _width(most: int) -> int:
    """Bytes that a number up to *most* needs."""
    return max(1, -(-most.bit_length() // 8))
