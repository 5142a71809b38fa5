"""Tensors of torch.distributed.checkpoint (DCP): its archives number them, the metadata beside these names them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ckptfs.encoding.manifest import TensorSpan
from ckptfs.formats import dcpmetadata
from ckptfs.formats.base import Tensor

NamesIn = Callable[[str], Mapping[str, Sequence[dcpmetadata.Stored]]]
T = TypeVar("T", Tensor, TensorSpan)


def names_in(directory: str) -> Mapping[str, Sequence[dcpmetadata.Stored]]:
    """What lies in each file of a DCP checkpoint, by offset; nothing where its metadata is missing. Raises OSError."""
    try:
        with open(os.path.join(directory, dcpmetadata.FILE_NAME), "rb") as file:
            found = dcpmetadata.stored(file.read(dcpmetadata.MAX_BYTES))
    except FileNotFoundError:
        return {}
    by_file: dict[str, list[dcpmetadata.Stored]] = {}
    for each in sorted(found, key=lambda each: each.start):
        by_file.setdefault(each.file, []).append(each)
    return by_file


def with_names(path: str, tensors: Sequence[T], names_in: NamesIn = names_in) -> list[T]:
    """*tensors* of the file at *path*, named by the metadata beside it if it is a file of DCP.

    Raises OSError when that cannot be read. *names_in* may remember directories: a checkpoint has many files.
    """
    if not path.endswith(".distcp"):
        return list(tensors)
    directory, file = os.path.split(path)
    there = names_in(directory).get(file, [])
    return [_with_name(tensor, there) for tensor in tensors]


def _with_name(tensor: T, there: Sequence[dcpmetadata.Stored]) -> T:
    at = bisect_right(there, tensor.start, key=lambda each: each.start) - 1
    if at < 0 or tensor.end > there[at].end:
        return tensor
    return replace(tensor, name=there[at].name)
