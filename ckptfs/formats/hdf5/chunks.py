"""The indexes of chunked datasets: VII of the specification, and the B-tree of version 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ckptfs.errors import FormatError
from ckptfs.formats.hdf5.arrays import extensible_array, fixed_array
from ckptfs.formats.hdf5.file import Fields, File
from ckptfs.formats.hdf5.trees import children_v1, records_v2

_SINGLE, _IMPLICIT, _FIXED_ARRAY, _EXTENSIBLE_ARRAY, _TREE = 1, 2, 3, 4, 5

CHUNKS_MOST = 500_000
"""In one dataset: 65 MB of memory. Those behind are cut by content."""


def chunks_of_tree(file: File, address: int, counts: Sequence[int], dims: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(number, address) of each chunk by the version 1 B-tree at *address*.

    Chunks are numbered in row-major order; *counts* says how many there are along each dimension, *dims* how many
    elements a chunk has.
    """
    rank = len(dims)
    for key, child in children_v1(file, address, 1, 8 + 8 * (rank + 1)):
        offsets = [int.from_bytes(key[8 + 8 * axis : 16 + 8 * axis], "little") for axis in range(rank)]
        yield _number([offset // size for offset, size in zip(offsets, dims, strict=True)], counts), child


def chunks_of_index(
    file: File, fields: Fields, flags: int, counts: Sequence[int], most: Sequence[int], chunk_bytes: int
) -> Iterator[tuple[int, int]]:
    """(number, address) of each chunk by the index that a layout message of version 4 describes from *fields* on.

    *most* is what *counts* may grow to: arrays number chunks by it.
    """
    kind = fields.integer(1)
    if kind == _SINGLE:
        if flags & 2:
            raise FormatError("a chunk of HDF5 with filters")
        address = fields.address()
        if address is not None:
            yield 0, address
    elif kind == _IMPLICIT:
        address = fields.defined_address()
        for number in range(min(math.prod(most), CHUNKS_MOST)):
            yield from _renumbered(number, address + number * chunk_bytes, counts, most)
    elif kind == _FIXED_ARRAY:
        fields.take(1)
        for number, chunk in fixed_array(file, fields.defined_address(), CHUNKS_MOST):
            yield from _renumbered(number, chunk, counts, most)
    elif kind == _EXTENSIBLE_ARRAY:
        fields.take(5)
        for number, chunk in extensible_array(file, fields.defined_address(), CHUNKS_MOST):
            yield from _renumbered(number, chunk, counts, most, first=most.index(max(most)))
    elif kind == _TREE:
        fields.take(6)
        for record in records_v2(file, fields.defined_address(), 10):
            address = record.defined_address()
            yield _number([record.integer(8) for _ in counts], counts), address
    else:
        raise FormatError("an index of chunks of HDF5 that is not read")


def _number(place: Sequence[int], counts: Sequence[int]) -> int:
    number = 0
    for at, count in zip(place, counts, strict=True):
        if at >= count:
            raise FormatError("a chunk outside its dataset")
        number = number * count + at
    return number


def _renumbered(
    number: int, address: int, counts: Sequence[int], most: Sequence[int], first: int = 0
) -> Iterator[tuple[int, int]]:
    """(number by *counts*, address) of the chunk that has *number* by *most*; nothing where it is outside.

    By *most*, dimension *first* counts slowest, which is the one that may grow without an end.
    """
    place = [0] * len(counts)
    for axis in reversed([first, *(axis for axis in range(len(counts)) if axis != first)]):
        number, place[axis] = divmod(number, most[axis])
    if all(at < count for at, count in zip(place, counts, strict=True)):
        yield _number(place, counts), address
