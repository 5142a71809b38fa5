"""Which tensor lies where in a checkpoint of torch.distributed.checkpoint: its `.metadata`, read without running it.

Source: torch/distributed/checkpoint/metadata.py (`Metadata`, `MetadataIndex`) and filesystem.py (`_StorageInfo`) of
https://github.com/pytorch/pytorch. A pickle of dataclasses: `storage_data` maps the name of a tensor, and where in it a
shard begins, to the file, offset and length of the archive that holds the shard. Whatever the pickle names becomes an
object of ours that holds what it was made of: nothing is imported and nothing called.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from typing import Any, NamedTuple

from ckptfs.formats.base import MAX_NAME

FILE_NAME = ".metadata"
MAX_BYTES = 64 << 20
"""A longer one is not read: some hundred thousand shards."""


class Stored(NamedTuple):
    """A tensor, or a shard of one, in a file beside the metadata."""

    file: str
    start: int
    end: int
    name: str
    """With the shard's place in it where there are several: `layer.weight[1024,0]`."""


def stored(metadata: bytes) -> list[Stored]:
    """What *metadata* says, as far as it is understood; nothing when it is damaged or something else."""
    try:
        root = _Reader(io.BytesIO(metadata)).load()
        places = [(key.state, place.state) for key, place in root.state["storage_data"].items()]
        several = Counter(str(key["fqn"]) for key, _ in places)
        return [
            Stored(
                str(place["relative_path"]),
                int(place["offset"]),
                int(place["offset"]) + int(place["length"]),
                _name(str(key["fqn"]), key.get("offset"), is_shard=several[str(key["fqn"])] > 1),
            )
            for key, place in places
        ]
    except Exception:  # a pickle that is none, or hostile, can raise anything
        return []


def _name(tensor: str, offset: Any, *, is_shard: bool) -> str:
    where = f"[{','.join(str(int(each)) for each in offset.arguments[0])}]" if is_shard and offset is not None else ""
    return tensor[: MAX_NAME - len(where)] + where


class _Inert:
    """Stands for an object of any class, or for what any function returned."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: object, **named: object) -> _Inert:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Inert]:
        return _Inert
