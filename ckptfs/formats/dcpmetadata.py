"""Which tensor lies where in a checkpoint of torch.distributed.checkpoint, by its `.metadata`.

Source: torch/distributed/checkpoint/metadata.py (`Metadata`, `MetadataIndex`) and filesystem.py (`_StorageInfo`) of
https://github.com/pytorch/pytorch. A pickle of dataclasses: `storage_data` maps the name of a tensor, and where in it a
shard begins, to the file, offset and length of the archive that holds the shard. It is read as other pickles of torch
are: without running it.
"""

from __future__ import annotations

import io
from collections import Counter
from typing import NamedTuple

from ckptfs.formats.base import MAX_NAME
from ckptfs.formats.torchpickle import entries, read_pickle, size

FILE_NAME = ".metadata"
MAX_BYTES = 64 << 20
"""A longer one is not read. Of some 20,000 shards the pickle reader has had enough."""


class Stored(NamedTuple):
    """A tensor, or a shard of one, in a file beside the metadata."""

    file: str
    start: int
    end: int
    name: str
    """With the shard's place in it where there are several: `layer.weight[1024,0]`."""


def stored(metadata: bytes) -> list[Stored]:
    """What *metadata* says, as far as it is understood. Never raises for what the bytes are."""
    places = [
        (_attributes(key), _attributes(place))
        for root in read_pickle(io.BytesIO(metadata)).items
        for name, value in entries(root)
        if name == "storage_data"
        for key, place in entries(value)
    ]
    several = Counter(key.get("fqn") for key, _ in places if isinstance(key.get("fqn"), str))
    found = []
    for key, place in places:
        name, file, start, length = key.get("fqn"), *map(place.get, ("relative_path", "offset", "length"))
        if isinstance(name, str) and isinstance(file, str) and type(start) is type(length) is int:
            where = size(key.get("offset")) if several[name] > 1 else None
            found.append(Stored(file, start, start + length, _name(name, where)))
    return found


def _attributes(value: object) -> dict[str, object]:
    return {name: each for name, each in entries(value) if isinstance(name, str)}


def _name(tensor: str, where: tuple[int, ...] | None) -> str:
    suffix = "" if where is None else f"[{','.join(map(str, where))}]"
    return tensor[: max(MAX_NAME - len(suffix), 0)] + suffix
