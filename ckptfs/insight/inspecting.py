"""One file: its tensors, its chunks, and where they are; of a file that is not sealed, how it would be cut."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptfs.config import Tuning
from ckptfs.encoding.codec import CODECS
from ckptfs.encoding.manifest import TensorSpan
from ckptfs.errors import IsADirectory
from ckptfs.formats.base import FileSource
from ckptfs.formats.cutting import pieces
from ckptfs.formats.recognise import recognise
from ckptfs.insight.dcpnames import with_names
from ckptfs.insight.sealed import Sealed, sealed
from ckptfs.local.images import data_spans

BOTH, HERE, REMOTE, MIXED, NOWHERE = "both", "this disk", "remote", "parts on each", "nowhere"


@dataclass(frozen=True)
class ChunkView:
    """A chunk, or what would become one."""

    offset: int
    size_bytes: int
    dtype: str | None
    digest: str | None = None
    """In hex; None in a file that is not sealed."""
    where: str | None = None
    codec: str | None = None
    """On the remote; None where that does not have it."""
    encoded_bytes: int | None = None


@dataclass(frozen=True)
class TensorView:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    chunks: int
    where: str | None
    encoded_bytes: int | None
    """On the remote, where that has all of it; a chunk that it shares with others counts by its share."""


@dataclass(frozen=True)
class FileView:
    """What there is to know of one file."""

    size_bytes: int
    hole_bytes: int
    is_sealed: bool
    """Whether the chunks are those of a mount, or only how it would be cut."""
    where: str | None
    encoded_bytes: int
    """Of the chunks that are on the remote, each once."""
    tensors: tuple[TensorView, ...]
    chunks: tuple[ChunkView, ...]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: str, tuning: Tuning | None = None) -> FileView:
    """What is in the file at *path*; outside a mount cut as *tuning* says. Raises OSError, IsADirectory."""
    if os.path.isdir(path):
        raise IsADirectory(f"{path} is a directory; inspect looks into a file, du and diff into directories")
    size = os.stat(path).st_size
    known = sealed(path)
    if known is not None and known.content.size == size:
        return _sealed_view(path, known)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        source = FileSource(fd)
        tensors = recognise(source)
        spans = data_spans(fd, source.size)
        chunks = [
            ChunkView(each.start, each.end - each.start, each.dtype)
            for each in pieces(source.size, tensors, spans, tuning or Tuning(), source.read)
        ]
    finally:
        os.close(fd)
    seen = [TensorSpan(each.name, each.dtype, each.shape, each.start, each.end) for each in tensors]
    return _view(source.size, False, with_names(path, seen), chunks)


def _sealed_view(path: str, known: Sealed) -> FileView:
    content = known.content
    chunks = []
    for offset, chunk in zip(content.offsets(), content.chunks, strict=True):
        place = known.places[chunk.id]
        where = _where(known.whole or place.here, place.encoded_bytes is not None)
        codec = None if place.codec is None else CODECS.get(place.codec, f"codec {place.codec}")
        chunks.append(ChunkView(offset, chunk.length, chunk.dtype, chunk.id.hex(), where, codec, place.encoded_bytes))
    return _view(content.size, True, with_names(path, content.tensors), chunks)


def _view(size: int, is_sealed: bool, tensors: Sequence[TensorSpan], chunks: Sequence[ChunkView]) -> FileView:
    starts = [chunk.offset for chunk in chunks]
    once = {chunk.digest: chunk.encoded_bytes or 0 for chunk in chunks}
    return FileView(
        size,
        size - sum(chunk.size_bytes for chunk in chunks),
        is_sealed,
        _common(chunk.where for chunk in chunks) if is_sealed else None,
        sum(once.values()),
        tuple(_tensor(each, chunks, starts) for each in tensors),
        tuple(chunks),
    )


def _tensor(tensor: TensorSpan, chunks: Sequence[ChunkView], starts: Sequence[int]) -> TensorView:
    first = max(bisect_right(starts, tensor.start) - 1, 0)
    last = bisect_left(starts, tensor.end)
    overlapping = [
        each for each in chunks[first:last] if each.offset < tensor.end and each.offset + each.size_bytes > tensor.start
    ]
    encoded = 0.0
    for each in overlapping:
        shared = min(each.offset + each.size_bytes, tensor.end) - max(each.offset, tensor.start)
        encoded += (each.encoded_bytes or 0) * shared / each.size_bytes
    is_remote = bool(overlapping) and all(each.encoded_bytes is not None for each in overlapping)
    return TensorView(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        tensor.start,
        tensor.end - tensor.start,
        len(overlapping),
        _common(each.where for each in overlapping),
        round(encoded) if is_remote else None,
    )


def _where(is_here: bool, is_remote: bool) -> str:
    if is_here:
        return BOTH if is_remote else HERE
    return REMOTE if is_remote else NOWHERE


def _common(places: Iterable[str | None]) -> str | None:
    """Where all of it is; `MIXED` when a part is only here and another only there."""
    found = set(places)
    if len(found) == 1:
        return found.pop()
    if not found or None in found:
        return None
    if NOWHERE in found:
        return NOWHERE
    return MIXED if {HERE, REMOTE} <= found else (found - {BOTH}).pop()
