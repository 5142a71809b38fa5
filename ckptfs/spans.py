"""Half-open ranges of bytes, and sets of them. Pure values; knows nothing of files.

A span is ``(start, end)`` with ``start < end``. A `SpanSet` keeps disjoint spans in order and merges neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Span = tuple[int, int]


class SpanSet:
    """A set of byte offsets as ordered, disjoint, non-touching spans."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in spans:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Include ``[start, end)``; nothing happens when it is empty."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Exclude ``[start, end)``."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return
        left = (self._starts[first], start)
        right = (end, self._ends[last - 1])
        kept = [span for span in (left, right) if span[0] < span[1]]
        self._starts[first:last] = [span[0] for span in kept]
        self._ends[first:last] = [span[1] for span in kept]

    def covers(self, start: int, end: int) -> bool:
        """Whether all of ``[start, end)`` is in the set; True when it is empty."""
        if start >= end:
            return True
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._ends[at] >= end

    def missing(self, start: int, end: int) -> list[Span]:
        """The parts of ``[start, end)`` that are not in the set, in order."""
        gaps: list[Span] = []
        at = bisect_right(self._ends, start)
        while start < end:
            if at == len(self._starts) or self._starts[at] >= end:
                gaps.append((start, end))
                break
            if self._starts[at] > start:
                gaps.append((start, self._starts[at]))
            start = self._ends[at]
            at += 1
        return gaps

    @property
    def total(self) -> int:
        """How many bytes the set holds."""
        return sum(self._ends) - sum(self._starts)

    def lacks(self, start: int, end: int) -> int:
        """How many offsets of ``[start, end)`` are not in the set."""
        return sum(last - first for first, last in self.missing(start, end))

    def run(self, offset: int) -> Span:
        """The span that *offset* is in, or ends; an empty one at *offset* when there is none."""
        at = bisect_right(self._starts, offset) - 1
        if at < 0 or self._ends[at] < offset:
            return offset, offset
        return self._starts[at], self._ends[at]

    def __iter__(self) -> Iterator[Span]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpanSet) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"SpanSet({list(self)!r})"
