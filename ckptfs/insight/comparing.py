"""How two checkpoints differ, tensor by tensor, in any mix of formats. Reads piece by piece, in bounded memory.

Files are read as any program reads them. What a mount has sealed of both sides is compared by its digests first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ckptfs.config import Tuning, usable_cores
from ckptfs.encoding.codec import delta_shares
from ckptfs.formats.base import BITS, UNKNOWN, FileSource, Tensor, read_exactly
from ckptfs.formats.recognise import recognise
from ckptfs.insight.dcpnames import names_in, with_names
from ckptfs.insight.elements import Floats, element_bytes, values
from ckptfs.insight.listing import files_below
from ckptfs.insight.matching import Named, match
from ckptfs.insight.sealed import Sealed, sealed

IDENTICAL, CHANGED, NEW, GONE = "identical", "changed", "new", "gone"

_PIECE_BYTES = Tuning().piece_bytes
"""What is compared, and encoded for a try, at once: as long as the chunks that a delta would be made of."""

_BLOCK_ELEMENTS = 16 << 10
"""Numbers at once: fresh memory for a whole piece of float64 costs as much as looking at it."""

Tell = Callable[[int, int], None]
"""Called now and then with how many bytes were compared, of how many."""


@dataclass(frozen=True)
class Difference:
    """One tensor, or one file in which no tensors are known."""

    state: str
    file: bytes
    """Below the checkpoint on the second side; of what is gone, on the first."""
    name: str | None
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    was: tuple[str, tuple[int, ...]] | None = None
    """Type and shape on the first side, where they are others."""
    equal: float | None = None
    """Share of elements that are the same; None where the shapes differ."""
    moved: float | None = None
    """Norm of the difference over the norm before, of elements that are finite in both; None where there is none."""
    encoded_bytes: int | None = None
    """About what the changed pieces would take, compressed ..."""
    delta_bytes: int | None = None
    """... and as deltas, where these are less."""

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "file": os.fsdecode(self.file)}


@dataclass(frozen=True)
class Comparison:
    differences: tuple[Difference, ...]
    """In the order of the second side; what is gone comes last."""
    prefix: str
    """What was taken away from names of one side to match them."""

    def document(self) -> dict[str, Any]:
        return {
            "tensors": [each.document() for each in self.differences],
            "prefix": self.prefix,
            "summary": {
                state: {"tensors": len(chosen), "bytes": sum(each.size_bytes for each in chosen)}
                for state in (IDENTICAL, CHANGED, NEW, GONE)
                for chosen in [[each for each in self.differences if each.state == state]]
            },
        }


class _Part(NamedTuple):
    """A tensor, or a whole file, of one side."""

    path: str
    file: bytes
    tensor: Tensor
    is_file: bool
    sealed: Sealed | None

    @property
    def named(self) -> Named:
        return Named(self.file, None if self.is_file else self.tensor.name, self.tensor.dtype, self.tensor.shape)

    @property
    def size(self) -> int:
        return self.tensor.end - self.tensor.start


def compare(before: str, after: str, tell: Tell = lambda done, of: None) -> Comparison:
    """How *after*, a file or directory, differs from *before*. Raises OSError; FormatError when a file shrinks."""
    ours, theirs = _parts(before), _parts(after)
    found = match([part.named for part in ours], [part.named for part in theirs])
    total, done = sum(theirs[each].size for _, each in found.pairs), 0
    by_number: dict[int, Difference] = {each: _alone(NEW, theirs[each]) for each in found.new}
    with ThreadPoolExecutor(usable_cores(), "compare") as threads:
        for old, new in found.pairs:
            by_number[new] = _compared(ours[old], theirs[new], threads)
            done += theirs[new].size
            tell(done, total)
    in_order = [by_number[each] for each in sorted(by_number)]
    return Comparison((*in_order, *(_alone(GONE, ours[each]) for each in found.gone)), found.prefix)


def _parts(top: str) -> list[_Part]:
    """What lies in *top*: tensors in file order, files by path."""
    found: list[_Part] = []
    names = cache(names_in)
    for path, file in files_below(top):
        size = os.stat(path).st_size
        known = sealed(path)
        if known is not None and known.content.size == size:
            tensors = [Tensor(*each) for each in map(astuple, known.content.tensors)]
        else:
            known, tensors = None, _recognised(path)
        tensors = with_names(path, tensors, names)
        found += [_Part(path, file, tensor, False, known) for tensor in tensors]
        if not tensors:
            found.append(_Part(path, file, Tensor("", UNKNOWN, (size,), 0, size), True, known))
    return found


def _recognised(path: str) -> list[Tensor]:
    with open(path, "rb", buffering=0) as file:
        return recognise(FileSource(file.fileno()))


def _alone(state: str, part: _Part) -> Difference:
    named = part.named
    return Difference(state, part.file, named.name, named.dtype, named.shape, part.size)


def _compared(old: _Part, new: _Part, threads: ThreadPoolExecutor) -> Difference:
    is_alike = (old.tensor.dtype, old.tensor.shape) == (new.tensor.dtype, new.tensor.shape) and old.size == new.size
    found = _alone(CHANGED, new)
    if is_alike and _same_digests(old, new):
        return replace(found, state=IDENTICAL, equal=1.0, moved=0.0)
    if not is_alike:
        found = replace(found, was=(old.tensor.dtype, old.tensor.shape))
        if not _is_cast(old, new):
            return found
    sums = _Sums()
    for piece in _pieces(old, new, threads):
        sums.add(piece)
    if is_alike and sums.differing == 0:
        return replace(found, state=IDENTICAL, equal=1.0, moved=0.0)
    return replace(
        found,
        equal=1 - sums.differing / max(sums.elements, 1),
        moved=sums.moved,
        encoded_bytes=round(sums.encoded) if is_alike else None,
        delta_bytes=round(sums.delta) if is_alike else None,
    )


def _is_cast(old: _Part, new: _Part) -> bool:
    """Whether both hold the same elements, in types that can be compared by value."""
    widths = [BITS.get(each.tensor.dtype, 0) / 8 for each in (old, new)]
    return (
        old.tensor.shape == new.tensor.shape
        and all(
            width >= 1 and values(b"", each.tensor.dtype) is not None
            for width, each in zip(widths, (old, new), strict=True)
        )
        and old.size * widths[1] == new.size * widths[0]
        and old.tensor.dtype.startswith("complex") == new.tensor.dtype.startswith("complex")
    )


def _same_digests(old: _Part, new: _Part) -> bool:
    if old.sealed is None or new.sealed is None:
        return False
    ours = old.sealed.digests(old.tensor.start, old.tensor.end)
    return ours is not None and ours == new.sealed.digests(new.tensor.start, new.tensor.end)


@dataclass
class _Sums:
    """What was seen of a tensor so far."""

    elements: int = 0
    differing: int = 0
    squares: float = 0.0
    """Of the elements before ..."""
    squares_moved: float = 0.0
    """... and of what they moved by."""
    are_numbers: bool = True
    encoded: float = 0.0
    delta: float = 0.0

    def add(self, other: _Sums) -> None:
        self.elements += other.elements
        self.differing += other.differing
        self.squares += other.squares
        self.squares_moved += other.squares_moved
        self.are_numbers &= other.are_numbers
        self.encoded += other.encoded
        self.delta += other.delta

    @property
    def moved(self) -> float | None:
        """The ratio of the norms; None where there is none."""
        if not self.are_numbers or not self.squares:
            return None
        ratio = math.sqrt(self.squares_moved / self.squares)
        return ratio if math.isfinite(ratio) else None


def _pieces(old: _Part, new: _Part, threads: ThreadPoolExecutor) -> Iterator[_Sums]:
    """Each piece of the pair, compared side by side."""
    widths = element_bytes(old.tensor.dtype), element_bytes(new.tensor.dtype)
    step = max(_PIECE_BYTES // max(widths), 1)
    count = -(-new.size // widths[1])
    with open(old.path, "rb", buffering=0) as old_file, open(new.path, "rb", buffering=0) as new_file:
        sources = FileSource(old_file.fileno()), FileSource(new_file.fileno())

        def compare_piece(at: int) -> _Sums:
            data = [
                _read(source, part, at * width, min(step * width, part.size - at * width))
                for source, part, width in zip(sources, (old, new), widths, strict=True)
            ]
            return _look(data[0], old.tensor.dtype, data[1], new.tensor.dtype)

        yield from threads.map(compare_piece, range(0, count, step))


def _read(source: FileSource, part: _Part, start: int, length: int) -> bytes:
    """*length* bytes from *start* of *part*. Raises OSError, which names the file, and FormatError when it shrank."""
    try:
        return read_exactly(source, part.tensor.start + start, length)
    except OSError as error:
        raise OSError(error.errno, error.strerror, part.path) from error


def _look(old: bytes, old_dtype: str, new: bytes, new_dtype: str) -> _Sums:
    """What there is to say of two pieces of as many elements."""
    found = _Sums()
    widths = element_bytes(old_dtype), element_bytes(new_dtype)
    views = memoryview(old), memoryview(new)
    for at in range(0, len(new) // widths[1], _BLOCK_ELEMENTS):
        before, after = (
            values(view[at * width : (at + _BLOCK_ELEMENTS) * width], dtype)
            for view, width, dtype in zip(views, widths, (old_dtype, new_dtype), strict=True)
        )
        if before is None or after is None:
            found.are_numbers = False
            break
        _measure(found, before, after, counts=old_dtype != new_dtype)
    if old_dtype == new_dtype:  # equal then means the same bits
        found.elements, found.differing = _differing(old, new, widths[1])
        if found.differing:
            alone, delta = delta_shares(new, old, new_dtype if new_dtype != UNKNOWN else None)
            found.encoded = alone * len(new)
            found.delta = min(alone, delta) * len(new)
    return found


def _measure(found: _Sums, before: Floats, after: Floats, *, counts: bool) -> None:
    """Add the squares, and with *counts* how many values differ, to *found*."""
    if counts:
        found.elements += len(after)
        found.differing += int(np.count_nonzero((before != after) & ~(np.isnan(before) & np.isnan(after))))
    with np.errstate(all="ignore"):
        moved = after - before
        squares, squares_moved = _squares(before), _squares(moved)
        if not math.isfinite(squares + squares_moved):  # rare, and so not looked for in each element
            finite = np.isfinite(before) & np.isfinite(after)
            before, moved = np.where(finite, before, 0), np.where(finite, moved, 0)
            squares, squares_moved = _squares(before), _squares(moved)
    found.squares += squares
    found.squares_moved += squares_moved


def _squares(numbers: Floats) -> float:
    """Their sum. Not by `np.dot`: BLAS has threads of its own, which wait for each other beside ours."""
    return float(np.einsum("i,i", numbers, numbers))


def _differing(old: bytes, new: bytes, width: int) -> tuple[int, int]:
    """How many elements of *width* bytes there are, and how many differ."""
    word = min(width, 8)
    differ = np.frombuffer(old, f"u{word}") != np.frombuffer(new, f"u{word}")
    if width > word:
        differ = differ.reshape(-1, width // word).any(axis=1)
    return len(differ), int(np.count_nonzero(differ))
