"""How fast a scrub goes, how far it is, and how much of everything it looks at."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

import trio


@dataclass
class Scrubbing:
    """How far a scrub is, in bytes that it reads, here and from the remote."""

    total_bytes: int = 0
    done_bytes: int = 0
    files: int = 0
    done_files: int = 0
    found: int = 0
    """Things that are wrong, so far."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the rate so far; None while there is none."""
        elapsed = time.monotonic() - self.started_s
        if not self.done_bytes or elapsed < 1.0:
            return None
        return max(0, self.total_bytes - self.done_bytes) / (self.done_bytes / elapsed)


class Pace:
    """Chooses what is looked at, and waits so that no more than a rate is read."""

    def __init__(self, progress: Scrubbing, rate_bytes_s: float | None, sample: float) -> None:
        """*sample* is the share that is looked at, 0 to 1, chosen anew by each scrub."""
        self.progress = progress
        self._rate_bytes_s = rate_bytes_s
        self._sample = sample
        self._random = random.Random()
        self._free_at = -math.inf

    def chooses(self) -> bool:
        """Whether the next one is looked at."""
        return self._sample >= 1 or self._random.random() < self._sample

    async def spend(self, length: int) -> None:
        """Return when *length* more bytes may be read."""
        now = trio.current_time()
        if self._rate_bytes_s is not None:
            await trio.sleep(max(0.0, self._free_at - now))
            self._free_at = max(self._free_at, now) + length / self._rate_bytes_s
        await trio.lowlevel.checkpoint()

    def did(self, length: int) -> None:
        self.progress.done_bytes += length
