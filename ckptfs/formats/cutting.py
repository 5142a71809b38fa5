"""Where one file's bytes are cut into chunks. Decides boundaries; hashes and stores nothing.

Two ways:

- *By tensors*, where they are known: a tensor of at least `Tuning.small_bytes` starts a piece and is cut at fixed steps
  of `piece_bytes` counted from its own start, so that the same tensor gives the same pieces in whatever file it lies.
  A long one is also cut `rim_bytes` and `edge_bytes` from its ends: who reads a header beside it, or its neighbour
  through a map, also touches pages of this one, and fetches no more than that of it.
  What is between such tensors (headers, padding, small tensors) is gathered into pieces of at most `piece_bytes`, cut
  before a small tensor or behind one; a single gap longer than that is cut by content.
- *By content*, otherwise: FastCDC (Xia et al., "The Design of Fast Content-Defined Chunking for Data Deduplication
  Based Storage Systems", IEEE TPDS 2020), average `cdc_bytes`, from a quarter to four times that. The average doubles
  until there are at most about `cdc_chunks`, counted by the file's size: versions of one file are cut alike.

Boundaries are stored nowhere but in manifests, so a change here costs deduplication against older files, never
correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pyfastcdc import FastCDC

from ckptfs.config import Tuning
from ckptfs.errors import FormatError
from ckptfs.formats.base import UNKNOWN, Piece, Tensor
from ckptfs.spans import Span

Read = Callable[[int, int], bytes]
"""`Source.read`: the bytes at (offset, length)."""


def cut(
    size: int, tensors: Sequence[Tensor], data_spans: Sequence[Span], tuning: Tuning, read: Read, start: int = 0
) -> list[Piece]:
    """The pieces of `[start, size)`, in order; together they are exactly *data_spans* in that range.

    *data_spans* is the file without the application's holes: ordered, disjoint, within the size. Every hole ends a
    piece; the steps of a tensor go on being counted from the tensor's start. *start* is where an earlier seal of a
    growing file ended. *read* is used for cutting by content only, in windows of some MiB.

    The result depends on the arguments and the bytes alone. FormatError when the file is shorter than *size*.
    """
    return list(pieces(size, tensors, data_spans, tuning, read, start))


def pieces(
    size: int, tensors: Sequence[Tensor], data_spans: Sequence[Span], tuning: Tuning, read: Read, start: int = 0
) -> Iterator[Piece]:
    """As `cut`, one at a time."""
    regions = _regions(size, tensors, tuning)
    region = next(regions)
    for span_start, span_end in data_spans:
        at, span_end = max(span_start, start), min(span_end, size)
        while at < span_end:
            while region.end <= at:
                region = next(regions)
            end = min(region.end, span_end)
            yield from region.pieces(at, end, tuning, read)
            at = end


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor long enough for pieces of its own."""

    start: int
    end: int
    dtype: str | None

    def pieces(self, at: int, end: int, tuning: Tuning, read: Read) -> Iterator[Piece]:
        while at < end:
            behind = min(self._behind(at, tuning), end)
            yield Piece(at, behind, self.dtype)
            at = behind

    def _behind(self, at: int, tuning: Tuning) -> int:
        """Where the piece ends that *at* is in."""
        step = tuning.piece_bytes
        behind = self.start + ((at - self.start) // step + 1) * step
        if self.end - self.start < 2 * step:
            return min(behind, self.end)
        edge = min(tuning.edge_bytes, step // 2)
        rim = min(tuning.rim_bytes, edge // 2)
        fixed = (self.start + rim, self.start + edge, self.end - edge, self.end - rim, self.end)
        next_fixed = min(cut for cut in fixed if cut > at)
        return min(behind, next_fixed) if behind <= self.end - 2 * edge else next_fixed  # none shorter than an edge


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Everything between two such tensors; *marks* are the starts and ends of the small tensors in it, and its end."""

    end: int
    marks: tuple[int, ...]

    def pieces(self, at: int, end: int, tuning: Tuning, read: Read) -> Iterator[Piece]:
        most = tuning.piece_bytes
        begun = at  # where the piece being gathered starts
        for mark in self.marks:
            mark = min(mark, end)
            if mark <= at:
                continue
            if mark - begun > most and at > begun:
                yield Piece(begun, at, None)
                begun = at
            if mark - begun > most:
                yield from _by_content(at, mark, _average(mark - at, tuning), read)
                begun = mark
            at = mark
        if at > begun:
            yield Piece(begun, at, None)


@dataclass(frozen=True, slots=True)
class _Opaque:
    """A file about which nothing is known."""

    end: int

    def pieces(self, at: int, end: int, tuning: Tuning, read: Read) -> Iterator[Piece]:
        return _by_content(at, end, _average(self.end, tuning), read)


def _regions(size: int, tensors: Sequence[Tensor], tuning: Tuning) -> Iterator[_Whole | _Gathered | _Opaque]:
    """The regions that tile `[0, size)`, in order."""
    at = begun = 0  # where the search is; where the bytes that are being gathered start
    marks: list[int] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start < at or tensor.end > size or tensor.start >= tensor.end:
            continue  # empty, or not from `recognise`: pieces must cover the file whatever the caller believes
        at = tensor.end
        if tensor.end - tensor.start < tuning.small_bytes:
            marks += (tensor.start, tensor.end)
            continue
        if tensor.start > begun:
            yield _Gathered(tensor.start, (*marks, tensor.start))
        yield _Whole(tensor.start, tensor.end, None if tensor.dtype == UNKNOWN else tensor.dtype)
        begun, marks = tensor.end, []
    if at == 0:
        yield _Opaque(size)
    elif begun < size:
        yield _Gathered(size, (*marks, size))


def _average(size: int, tuning: Tuning) -> int:
    """The average chunk of *size* bytes that are cut by content."""
    average = max(tuning.cdc_bytes, 256)
    while size > average * tuning.cdc_chunks:
        average *= 2
    return min(average, 4 << 20)  # the range that pyfastcdc takes


def _by_content(start: int, end: int, average: int, read: Read) -> Iterator[Piece]:
    """Content-defined pieces of `[start, end)`, in memory of about twice the window."""
    smallest, largest = max(average // 4, 64), max(average * 4, 1024)
    # Level 1 normalisation and the paper's gear table, spelled out: another default would move every boundary.
    cutter = FastCDC(average, min_size=smallest, max_size=largest, normalized_chunking=1, seed=0)
    window_bytes = max(2 * largest, min(16 * largest, 8 << 20))  # short chunks: fewer calls; long ones: less memory
    window = b""
    at = start  # offset of the window in the file
    while at < end:
        have = at + len(window)
        if have < end:
            wanted = min(window_bytes, end - have)
            more = read(have, wanted)
            if len(more) != wanted:
                raise FormatError(f"the file became shorter than {end} bytes while it was cut")
            window += more
            have += wanted
        used = 0
        for chunk in cutter.cut_buf(window):
            # A boundary depends on the next `largest` bytes: with fewer at hand, only the end of the range decides.
            if have < end and len(window) - used < largest:
                break
            yield Piece(at + used, at + used + chunk.length, None)
            used += chunk.length
        at += used
        window = window[used:]
