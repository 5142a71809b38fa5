"""How long programs that save waited for us: the time between a request to create, write, flush or close a file and its
answer. What the kernel does without us (writes under passthrough, its page cache) is not in it.

Kept in memory since the mount, for the files that were saved last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptfs.ids import Inode

_REMEMBERED = 10_000


@dataclass(frozen=True)
class Blocked:
    """Of some files together."""

    files: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    """The longest single request."""


class SaveTimes:
    """Adds up requests by file."""

    def __init__(self) -> None:
        self._files: OrderedDict[Inode, tuple[float, float]] = OrderedDict()
        """Seconds in all, and of the longest request; who was saved last comes last."""

    @contextmanager
    def blocking(self, ino: Inode) -> Iterator[None]:
        """Whoever saves *ino* waits for this block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.waited(ino, time.monotonic() - started)

    def waited(self, ino: Inode, seconds: float) -> None:
        """Whoever saves *ino* waited so long for one request."""
        before, longest = self._files.pop(ino, (0.0, 0.0))
        self._files[ino] = before + seconds, max(longest, seconds)
        if len(self._files) > _REMEMBERED:
            self._files.popitem(last=False)

    def of(self, inos: set[Inode]) -> Blocked:
        """What is known of *inos*."""
        known = [times for ino, times in self._files.items() if ino in inos]
        return Blocked(
            len(known), sum(seconds for seconds, _ in known), max((longest for _, longest in known), default=0.0)
        )
