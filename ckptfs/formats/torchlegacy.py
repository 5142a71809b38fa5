"""The files that torch.save wrote before ZIP archives, and still writes when asked to: which tensors they hold.

Source: torch/serialization.py (`_legacy_save`) and torch/csrc/generic/serialization.cpp (`THPStorage_writeFileRaw`) of
https://github.com/pytorch/pytorch. Five pickles follow each other: a magic number, a protocol version, facts about the
machine, the objects, the sorted keys of the storages. Then in this order, for each storage, eight bytes that count its
elements, and the elements, little-endian.
"""

from __future__ import annotations

import io

from ckptfs.errors import FormatError
from ckptfs.formats.base import BITS, MAX_TENSORS, Source, Tensor, read_exactly, tidy
from ckptfs.formats.torchpickle import Pickle, read_pickle, storage

MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""Opcode LONG1 with the magic number, and STOP; before it stand the pickle's protocol and, from 4 on, a frame."""

MAGIC_WITHIN = 24
"""Bytes of the file in which it lies."""

MAX_PICKLE_BYTES = 16 << 20
"""Of all five pickles. Longer ones hold something else than tensors' descriptions; such a file is not read."""


def read_tensors(source: Source) -> list[Tensor]:
    """The storages, each as one tensor, in file order; FormatError when this is no such file."""
    pickles = io.BytesIO(source.read(0, MAX_PICKLE_BYTES))
    for _ in range(3):
        _whole(pickles)
    uses = {use.key: use for use in _whole(pickles).uses}
    keys = _whole(pickles).items
    if len(keys) > MAX_TENSORS:
        raise FormatError("too many storages in one file")
    tensors = []
    at = pickles.tell()
    for key in keys:
        count = int.from_bytes(read_exactly(source, at, 8), "little")
        use = uses.get(key) if isinstance(key, str) else None
        if use is None:  # how long an element is was not told, and so not where the next storage begins
            raise FormatError("a storage that no tensor uses")
        start = at + 8
        tensors.append(storage(use, start, start + count * BITS.get(use.storage_dtype, 8) // 8))
        at = tensors[-1].end
    return tidy(tensors, source.size)


def _whole(pickles: io.BytesIO) -> Pickle:
    pickle = read_pickle(pickles)
    if not pickle.is_whole:
        raise FormatError("a pickle that is cut off, or does what those of torch never do")
    return pickle
