"""The archives that torch.save writes: which tensors they hold and where.

Source: torch/serialization.py (`_save`, "zipfile-based file format") and caffe2/serialize/inline_container.h of
https://github.com/pytorch/pytorch. A ZIP archive of stored members `<name>/data.pkl` (the objects), `<name>/data/<key>`
(one storage each, padded to 64 bytes), `<name>/byteorder` and more. TorchScript archives add `<name>/constants/<key>`
with `constants.pkl`. A .distcp of torch.distributed.checkpoint is many such archives, one behind the other.
"""

from __future__ import annotations

from dataclasses import replace

from ckptfs.formats.base import UNKNOWN, Member, Source, Tensor, read_exactly, tidy
from ckptfs.formats.torchpickle import StorageUse, storage, storage_uses

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
                    use = uses.get(key, StorageUse(key, UNKNOWN, UNKNOWN, "", None))
                    tensors.append(storage(replace(use, name=prefix + (use.name or key)), member.start, member.end))
    return tidy(tensors, source.size)
