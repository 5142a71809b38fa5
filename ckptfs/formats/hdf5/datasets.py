"""Datasets: type, shape, and where their elements lie. IV.A.2.b, d, i of the specification.

A chunked dataset becomes as few tensors as it has runs of chunks that follow each other in the file as they do in the
dataset. One that is chunked along its first dimension only and lies in one run is the very bytes that it would be
unchunked. Filtered (compressed) chunks are left to be cut by content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ckptfs.errors import FormatError
from ckptfs.formats.base import UNKNOWN, Tensor, described
from ckptfs.formats.hdf5.chunks import CHUNKS_MOST, chunks_of_index, chunks_of_tree
from ckptfs.formats.hdf5.file import Fields, File
from ckptfs.formats.hdf5.objects import DATASPACE, DATATYPE, FILTERS, LAYOUT, Message

_FLOATS = {
    (2, 5, 10): "float16", (2, 8, 7): "bfloat16", (4, 8, 23): "float32", (8, 11, 52): "float64",
    (1, 4, 3): "float8_e4m3fn", (1, 5, 2): "float8_e5m2",
}  # fmt: skip
"""By bytes, bits of the exponent, bits of the mantissa."""
_CONTIGUOUS, _CHUNKED = 1, 2
_RANK_MOST = 32


@dataclass(frozen=True)
class _Space:
    shape: tuple[int, ...]
    most: tuple[int, ...]
    """What it may grow to."""


def read_dataset(file: File, name: str, messages: list[Message]) -> Iterator[Tensor]:
    """The tensors of the dataset with these messages; nothing when it is a group, empty, or compact."""
    by_kind = {message.kind: Fields(file, message.data) for message in messages}
    layout = by_kind.get(LAYOUT)
    if layout is None:
        return
    version, kind = layout.integer(1), layout.integer(1)
    if version not in (3, 4, 5):
        raise FormatError("a layout of HDF5 of an unknown version")
    space = _space(by_kind[DATASPACE]) if DATASPACE in by_kind else None
    dtype = _dtype(by_kind[DATATYPE]) if DATATYPE in by_kind else UNKNOWN
    if kind == _CONTIGUOUS:
        address, length = layout.address(), layout.length()
        if address is not None and length:
            start = file.base + address
            yield described(name, dtype, space.shape if space else (length,), start, start + length)
    elif kind == _CHUNKED and space is not None and FILTERS not in by_kind:
        flags = layout.integer(1) if version > 3 else 0
        rank = layout.integer(1) - 1
        address = layout.address() if version == 3 else None
        width = 4 if version == 3 else layout.integer(1)
        dims = tuple(layout.integer(width) for _ in range(rank))
        item = layout.integer(width)
        chunk_bytes = math.prod(dims) * item
        if rank != len(space.shape) or not chunk_bytes:
            raise FormatError("chunks of HDF5 that do not fit their dataset")
        counts, most = (
            [-(-size // step) for size, step in zip(sizes, dims, strict=True)] for sizes in (space.shape, space.most)
        )
        if version > 3:
            chunks = chunks_of_index(file, layout, flags, counts, most, chunk_bytes)
        elif address is not None:
            chunks = chunks_of_tree(file, address, counts, dims)
        else:
            return
        yield from _runs(file, name, dtype, space.shape, dims, item, chunks)


def _runs(
    file: File,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    item: int,
    chunks: Iterable[tuple[int, int]],
) -> Iterator[Tensor]:
    """Tensors of the chunks, each given as (number, address), that follow each other both in dataset and file."""
    found = sorted(islice(chunks, CHUNKS_MOST))
    chunk_bytes = math.prod(dims) * item
    is_slab = dims[1:] == shape[1:]
    at = 0
    while at < len(found):
        first, address = found[at]
        count = 1
        while at + count < len(found) and found[at + count] == (first + count, address + count * chunk_bytes):
            count += 1
        at += count
        start = file.base + address
        if is_slab:
            rows = min(count * dims[0], shape[0] - first * dims[0]) if shape else 1
            if rows > 0:
                length = rows * math.prod(shape[1:]) * item
                yield described(name, dtype, (rows, *shape[1:]), start, start + length)
        else:
            yield described(name, dtype, (count * math.prod(dims),), start, start + count * chunk_bytes)


def _space(fields: Fields) -> _Space:
    version, rank, flags = fields.integer(1), fields.integer(1), fields.integer(1)
    if version not in (1, 2) or rank > _RANK_MOST:
        raise FormatError("a dataspace of HDF5 that is not read")
    fields.take(5 if version == 1 else 1)
    shape = tuple(fields.length() for _ in range(rank))
    most = tuple(fields.length() for _ in range(rank)) if flags & 1 else shape
    return _Space(shape, most)


def _dtype(fields: Fields) -> str:
    kind = fields.integer(1) & 15
    bits = fields.integer(3)
    size = fields.integer(4)
    if kind == 0 and not bits & 1 and size in (1, 2, 4, 8):
        return f"{'int' if bits & 8 else 'uint'}{8 * size}"
    if kind == 1 and not bits & 0x41:
        fields.take(5)
        exponent = fields.integer(1)
        fields.take(1)
        return _FLOATS.get((size, exponent, fields.integer(1)), UNKNOWN)
    if kind == 5 and size in (1, 2):  # how numpy, and so h5py, saves types that it does not know
        return f"void{8 * size}"
    if kind == 8:  # an enumeration, such as h5py's booleans, is what it enumerates
        return _dtype(Fields(fields.file, fields.take(fields.left)))
    return UNKNOWN
