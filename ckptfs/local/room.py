"""How much of the store's disk bytes that the remote has may take. What the catalog and saves need is left alone.

Who calls: the event loop's thread. What is on its way to the disk counts as there already (`take`), since it shows in
the disk's own figures only later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

RESERVE_BYTES = 64 << 20
"""Never taken: twice what the catalog's log takes, and logs and small files go on being written ..."""
RESERVE_PARTS = 100
"""... nor is one part in so many of a larger disk, which file systems need to stay quick."""
SAVING_PARTS = 2
"""While something is being saved, one part in so many of the disk is left to it: nobody knows how long it will be."""
EVICT_PARTS, EVICT_BYTES = 4, 16 << 30
"""What is on the remote makes way for a save until, beside the reserve, one part in so many of the disk is free, or so
many bytes of a large one: several seconds' worth of the fastest disk, since nobody is told what the kernel writes."""
SLACK_PARTS = 8
"""While nothing is saved, nothing makes way for less than one part in so many of the reserve: every log that grows
takes a little of it, and what was evicted comes again when it is read."""
REFUSED_S = 5.0
"""After the disk refused a write although there seemed to be room (a quota, for one), nothing is tried for so long."""


class Room:
    """The room on the disk of *directory*; *saving* tells whether something is being saved just now."""

    def __init__(
        self,
        directory: Path,
        saving: Callable[[], bool] = lambda: False,
        *,
        reserve_bytes: int = RESERVE_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = os.fspath(directory)
        self._saving = saving
        self._least_bytes = reserve_bytes
        self._now = now
        self._coming_bytes = 0
        self._refused_until_s = float("-inf")

    def free_bytes(self) -> int:
        """What may be taken, saves or not."""
        return max(self._look()[0], 0)

    def reserve_bytes(self) -> int:
        """What is never taken."""
        return self._reserve_bytes(os.statvfs(self._directory))

    def lacking_bytes(self, *, saving: bool = False) -> int:
        """How much must make way; 0 when nothing need. *saving*: a program is about to save something."""
        disk = os.statvfs(self._directory)
        free_bytes, reserve_bytes = disk.f_bavail * disk.f_frsize, self._reserve_bytes(disk)
        ahead_bytes = min(disk.f_blocks * disk.f_frsize // EVICT_PARTS, EVICT_BYTES)
        lacking_bytes = reserve_bytes + ahead_bytes - free_bytes
        if lacking_bytes > 0 and (saving or self._saving()):
            return lacking_bytes
        lacking_bytes -= ahead_bytes
        return lacking_bytes if lacking_bytes > reserve_bytes // SLACK_PARTS else 0

    def has(self, length: int) -> bool:
        """Whether *length* bytes may be taken now, with what is being saved in mind."""
        if self._now() < self._refused_until_s:
            return False
        free_bytes, spare_bytes = self._look()
        return length <= free_bytes and (length <= spare_bytes or not self._saving())

    def take(self, length: int) -> bool:
        """As `has`; when True, they are taken until `landed`."""
        if not self.has(length):
            return False
        self._coming_bytes += length
        return True

    def demand(self, length: int) -> bool:
        """As `take`, for what must be on the disk to be written by a program: saves are no hindrance."""
        if length > self.free_bytes():
            return False
        self._coming_bytes += length
        return True

    def landed(self, length: int) -> None:
        """What was taken is on the disk, or will not come."""
        self._coming_bytes -= length

    def refused(self) -> bool:
        """The disk took less than it seemed to have room for. Whether that is news."""
        before_s, self._refused_until_s = self._refused_until_s, self._now() + REFUSED_S
        return before_s < self._now()

    def _reserve_bytes(self, disk: os.statvfs_result) -> int:
        return max(self._least_bytes, disk.f_blocks * disk.f_frsize // RESERVE_PARTS)

    def _look(self) -> tuple[int, int]:
        """Bytes to take, and those of them that no save can want."""
        disk = os.statvfs(self._directory)
        free_bytes = disk.f_bavail * disk.f_frsize - self._coming_bytes
        reserve_bytes = self._reserve_bytes(disk)
        save_bytes = disk.f_blocks * disk.f_frsize // SAVING_PARTS
        return free_bytes - reserve_bytes, free_bytes - max(reserve_bytes, save_bytes)
