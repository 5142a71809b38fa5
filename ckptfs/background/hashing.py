"""Hash a closed image: flush, find the boundaries, hash each chunk. Blocking.

How a file is cut is `ckptfs.formats`' work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from ckptfs.config import Tuning, usable_cores
from ckptfs.encoding.manifest import Chunk, Content, TensorSpan, encode_content
from ckptfs.errors import FormatError
from ckptfs.formats.base import FileSource, Piece
from ckptfs.formats.cutting import pieces
from ckptfs.formats.recognise import recognise
from ckptfs.ids import DIGEST_BYTES, ChunkId, digest
from ckptfs.local.images import begin_writing_out, data_spans
from ckptfs.spans import SpanSet

_PIECES_AT_ONCE = 64
"""Cut before they are hashed, side by side; no more of their bytes than threads are in memory."""


_HOLES_MOST = 1 << 20
"""A file with more of them is taken as if it had none: nobody would read a manifest that lists them all."""


class Hashed(NamedTuple):
    """A content in few objects, cheap to hand over and to take parts of."""

    size: int
    encoded: bytes
    """As `encode_content` gives it."""
    ids: bytes
    """The chunks' ids, one after the other."""
    lengths: list[int]
    offsets: list[int]

    def located(self, start: int, count: int) -> list[tuple[ChunkId, int, int]]:
        """(chunk, offset, length) of *count* chunks from number *start* on."""
        numbers = range(start, min(start + count, len(self.lengths)))
        return [
            (ChunkId(self.ids[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]), self.offsets[number], length)
            for number, length in zip(numbers, self.lengths[numbers.start : numbers.stop], strict=True)
        ]


def hash_images(
    paths: Sequence[tuple[int, str]], tuning: Sequence[Any]
) -> tuple[list[tuple[int, Hashed]], list[tuple[int, str]]]:
    """(image, what it holds) of each of *paths*, and (image, why) of those that the disk failed to give.

    *tuning* is `dataclasses.astuple` of a Tuning. An image that was deleted or truncated meanwhile is in neither.
    """
    found: list[tuple[int, Hashed]] = []
    failed: list[tuple[int, str]] = []
    if len(paths) > 1:
        begin_writing_out(path for _, path in paths)
    for image, path in paths:
        try:
            found.append((image, hash_image(path, Tuning(*tuning))))
        except (FileNotFoundError, FormatError):  # deleted while it waited; truncated: its close submits it again
            pass
        except Exception as error:
            failed.append((image, f"{type(error).__name__}: {error}"))
    return found, failed


def hash_image(path: str, tuning: Tuning) -> Hashed:
    """What the image at *path* holds, flushed. Raises OSError; FormatError when the file shrank meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        size = os.fstat(fd).st_size
        spans = data_spans(fd, size)
        if len(spans) > _HOLES_MOST:
            spans = [(0, size)]
        source = FileSource(fd, size)
        tensors = recognise(source)
        content = Content(
            size=size,
            holes=tuple(SpanSet(spans).missing(0, size)),
            chunks=tuple(_chunks(source, pieces(size, tensors, spans, tuning, source.read))),
            tensors=tuple(TensorSpan(each.name, each.dtype, each.shape, each.start, each.end) for each in tensors),
        )
    finally:
        os.close(fd)
    return Hashed(
        size,
        encode_content(content),
        b"".join(chunk.id for chunk in content.chunks),
        [chunk.length for chunk in content.chunks],
        list(content.offsets()),
    )


def _chunks(source: FileSource, cut: Iterable[Piece]) -> Iterator[Chunk]:
    def chunk(piece: Piece) -> Chunk:
        data = source.read(piece.start, piece.end - piece.start)
        return Chunk(ChunkId(digest(data)), piece.end - piece.start, piece.dtype)

    left = iter(cut)
    while some := list(islice(left, _PIECES_AT_ONCE)):
        yield from map(chunk, some) if len(some) == 1 else _hashers().map(chunk, some)


@cache
def _hashers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(usable_cores(), "hash")
