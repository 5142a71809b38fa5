"""The superblock, and the way from it to every dataset: II of the specification."""

from __future__ import annotations

from ckptfs.errors import FormatError
from ckptfs.formats.base import MAX_TENSORS, Budget, Source, Tensor, joined, tidy
from ckptfs.formats.hdf5.datasets import read_dataset
from ckptfs.formats.hdf5.file import Fields, File
from ckptfs.formats.hdf5.objects import read_links, read_messages

SIGNATURE = b"\x89HDF\r\n\x1a\n"

MAX_BYTES = 64 << 20
"""Read of the structures of one file: headers of 100,000 datasets, and indexes of a million chunks."""

_LAST_START = 1 << 16
"""A superblock lies at the beginning or at 512, 1024, 2048 ...: behind what somebody else wants to have there, as
MATLAB does. Nobody is known to have more than that."""


def begins(source: Source, head: bytes) -> bool:
    """Whether a superblock lies somewhere near the beginning of the file, whose first bytes are *head*."""
    return head.startswith(SIGNATURE) or (source.size >= 1024 and _start(source) is not None)


def read_tensors(source: Source) -> list[Tensor]:
    """The datasets' bytes in file order; FormatError when this is no HDF5 file. What cannot be read is left out."""
    start = _start(source)
    if start is None:
        raise FormatError("no HDF5 file")
    file, root = _superblock(Budget(source, MAX_BYTES), start)
    tensors: list[Tensor] = []
    seen = {root}
    pending = [("", root)]
    while pending and len(tensors) < MAX_TENSORS:
        name, address = pending.pop()
        try:
            messages = read_messages(file, address)
            tensors += read_dataset(file, name, messages)
            for label, target in read_links(file, messages):
                if target not in seen and len(seen) < 2 * MAX_TENSORS:
                    seen.add(target)
                    pending.append((joined(name, label), target))
        except FormatError:
            continue
    return tidy(_disjoint(tensors, source.size)[:MAX_TENSORS], source.size)


def _start(source: Source) -> int | None:
    at = 0
    while at <= min(_LAST_START, source.size - len(SIGNATURE)):
        if source.read(at, len(SIGNATURE)) == SIGNATURE:
            return at
        at = at * 2 or 512
    return None


def _superblock(source: Source, start: int) -> tuple[File, int]:
    """The file, and the address of its root group's object header."""
    data = source.read(start, 128)
    version = data[8] if len(data) > 8 else -1
    if version in (0, 1):
        sizes, at = data[13:15], 24 if version == 0 else 28
    elif version in (2, 3):
        sizes, at = data[9:11], 12
    else:
        raise FormatError("an HDF5 superblock of an unknown version")
    if len(sizes) < 2 or not {*sizes} <= {2, 4, 8}:
        raise FormatError("an HDF5 superblock that makes no sense")
    file = File(source, 0, *sizes)
    fields = Fields(file, data[at:])
    base = fields.defined_address()
    fields.take(2 * file.address_bytes)
    if version < 2:
        fields.take(2 * file.address_bytes)  # driver information; the name of the root group
    return File(source, base, *sizes), fields.defined_address()


def _disjoint(tensors: list[Tensor], size: int) -> list[Tensor]:
    """*tensors* without those that leave the file or overlap an earlier one."""
    kept = []
    at = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if at <= tensor.start <= tensor.end <= size:
            kept.append(tensor)
            at = tensor.end
    return kept
