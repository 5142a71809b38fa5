"""The archives that torch.save writes: which tensors they hold and where.

Source: torch/serialization.py (`_save`, "zipfile-based file format") and caffe2/serialize/inline_container.h of
https://github.com/pytorch/pytorch. A ZIP archive of stored members `<name>/data.pkl` (the objects), `<name>/data/<key>`
(one storage each, padded to 64 bytes), `<name>/byteorder` and more. TorchScript archives add `<name>/constants/<key>`
with `constants.pkl`. A .distcp of torch.distributed.checkpoint is many such archives, one behind the other.
"""

from __future__ import annotations

import math

from ckptfs.formats.base import BITS, UNKNOWN, Source, Tensor, read_exactly, tidy
from ckptfs.formats.torchpickle import StorageUse, storage_uses
from ckptfs.formats.ziparchive import Member

MAX_PICKLE_BYTES = 16 << 20
"""A longer data.pkl holds something else than tensors' descriptions, and is not read."""


def read_members(source: Source, archives: list[list[Member]]) -> list[Tensor]:
    """The storages of every archive, each as one tensor, in file order. A storage that nobody describes has dtype
    `UNKNOWN` and one dimension of bytes; members that are compressed are left out."""
    tensors: list[Tensor] = []
    budget = MAX_PICKLE_BYTES  # for all archives of the file together
    for at, members in enumerate(archives):
        prefix = f"{at}/" if len(archives) > 1 else ""
        by_name = {member.name: member for member in members if member.stored}
        for folder in ("data", "constants"):
            pickle = next((member for name, member in by_name.items() if name.endswith(f"/{folder}.pkl")), None)
            if pickle is None:
                continue
            root = pickle.name[: -len(f"{folder}.pkl")]
            uses: dict[str, StorageUse] = {}
            length = pickle.end - pickle.start
            order = by_name.get(f"{root}byteorder")
            if length <= budget and (order is None or source.read(order.start, 3) != b"big"):
                budget -= length
                uses = {use.key: use for use in storage_uses(read_exactly(source, pickle.start, length))}
            records = f"{root}{folder}/"
            for name, member in by_name.items():
                if name.startswith(records):
                    key = name[len(records) :]
                    tensors.append(_tensor(prefix, key, member, uses.get(key)))
    return tidy(tensors, source.size)


def _tensor(prefix: str, key: str, member: Member, use: StorageUse | None) -> Tensor:
    length = member.end - member.start
    bits = BITS.get(use.dtype) if use is not None else None
    if use is None or bits is None or length * 8 % bits:
        return Tensor(f"{prefix}{key}", UNKNOWN, (length,), member.start, member.end)
    shape = use.shape
    if shape is None or math.prod(shape) * bits != length * 8:
        shape = (length * 8 // bits,)  # the first tensor is a view of a part of the storage
    return Tensor(prefix + (use.name or key), use.dtype, shape, member.start, member.end)
