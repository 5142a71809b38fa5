"""Which tensors a file holds. Chooses the reader by the first bytes; the readers know the formats."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from ckptfs.errors import FormatError
from ckptfs.formats import (
    flaxmsgpack,
    gguf,
    numpy,
    ocdbt,
    safetensors,
    tararchive,
    torchlegacy,
    torchzip,
    ziparchive,
)
from ckptfs.formats.base import MAX_TENSORS, Budget, Member, Source, Tensor, Window, joined, tidy
from ckptfs.formats.hdf5 import reader as hdf5

log = logging.getLogger(__name__)

MAX_MEMBER_BYTES = 64 << 20
"""Read of all members of an archive together, to find the tensors in them."""

_HEAD_BYTES = tararchive.MAGIC_AT + len(tararchive.MAGIC)


def recognise(source: Source) -> list[Tensor]:
    """The tensors of the file, in file order, disjoint and inside it; [] when it is unknown or damaged.

    Never raises for what the bytes are; an OSError of *source* passes through. Takes seconds and some 150 MB at worst,
    whatever the file claims; milliseconds for a real one.
    """
    return _read_or_nothing(source, is_member=False)


def _read_or_nothing(source: Source, is_member: bool) -> list[Tensor]:
    try:
        return _read(source, is_member)
    except OSError:
        raise
    except Exception as error:
        # Not FormatError alone: a file is cut by content when its description cannot be used, for whatever reason
        # (RecursionError and MemoryError of a parser among them). A save must never fail for how its bytes look.
        log.debug("not a format that can be read: %s", error)
    return []


def _read(source: Source, is_member: bool) -> list[Tensor]:
    head = source.read(0, _HEAD_BYTES)
    if head.startswith(numpy.MAGIC):
        return numpy.read_tensors(source)
    if head.startswith(ziparchive.LOCAL_MAGIC):
        archives = ziparchive.read_archives(source)
        members = [member for each in archives for member in each]
        if any(member.name.endswith("/data.pkl") for member in members):
            return torchzip.read_members(source, archives)
        return [] if is_member else _read_members(source, members)
    if head.endswith(tararchive.MAGIC) and len(head) == _HEAD_BYTES:
        return [] if is_member else _read_members(source, tararchive.read_members(source))
    if torchlegacy.MAGIC in head[: torchlegacy.MAGIC_WITHIN]:
        return torchlegacy.read_tensors(source)
    if head.startswith(gguf.MAGIC):
        return gguf.read_tensors(source)
    if head.startswith((ocdbt.FRAME, ocdbt.NODE)):
        return ocdbt.read_tensors(source)
    if head[8:9] == b"{":
        return safetensors.read_tensors(source)
    if hdf5.begins(source, head):
        return hdf5.read_tensors(source)
    if head and flaxmsgpack.begins(head[0]):
        return flaxmsgpack.read_tensors(source)
    return []


def _read_members(source: Source, members: Iterable[Member]) -> list[Tensor]:
    """The tensors of every stored member that its own reader understands; of archives in archives, only torch's."""
    budget = Budget(source, MAX_MEMBER_BYTES)
    tensors: list[Tensor] = []
    for member in members:
        if not member.stored:
            continue
        found = _read_or_nothing(Window(budget, member.start, member.end), is_member=True)
        name = member.name.removesuffix(".npy")
        tensors += (_moved(tensor, name, member.start) for tensor in found)
        if len(tensors) > MAX_TENSORS:
            raise FormatError("too many tensors in one archive")
    return tidy(tensors, source.size)


def _moved(tensor: Tensor, name: str, start: int) -> Tensor:
    name = joined(name, tensor.name) if tensor.name else name
    return replace(tensor, name=name, start=start + tensor.start, end=start + tensor.end)
