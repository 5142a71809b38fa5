"""Reclaiming: where two files have bytes in common, the one that was changed earlier gives up its copy on this disk.

So the newest checkpoint stays one whole file at the disk's own speed, and earlier ones shrink to what is theirs alone;
a file that gave up ranges reads them from the newer one's image. When that one goes, its image lives on without a name
as long as another lacks what only it has.

Only sealed files give up ranges, of which no program has the image open or mapped, and no cut needs it; with a remote
only published ones. The rows go first, durably, and only while another image has the chunk; then the ranges are punched
(invariant 2). Nobody can open a file while that happens. What a kill leaves allocated is found by the next look.

Who calls: the event loop's thread. Looking for candidates and punching are in threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext

import trio

from ckptfs.ids import Clock, ImageId, Inode, Stamp
from ckptfs.local.catalog.reclaims import Reclaims, Twice
from ckptfs.local.images import punch
from ckptfs.local.leases import is_unused
from ckptfs.local.store import Store
from ckptfs.openfiles import OpenFiles
from ckptfs.spans import Span

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_LOOK_PARTS = 10
"""Looking for what is here twice reads all locations: so often at most, and ten times in the time after which a file
gives up what is, if something was committed since."""
_IN_USE_S = 5.0
"""No event tells that a map is gone."""
_ROWS_AT_ONCE = 500
"""Rows in one transaction: 5 to 10 ms."""
_WORTH_BYTES = 256 << 10
"""Less is not worth punching, nor making a file one that we have to serve ourselves."""
_EVER = Stamp((1 << 62) - 1)


class Reclaimer:
    """See the module. *holds* tells of images that work of ours has open, *published* asks for files on the remote."""

    def __init__(
        self, store: Store, files: OpenFiles, *, after_s: float, published: bool, holds: Callable[[ImageId], bool]
    ) -> None:
        self._store = store
        self._files = files
        self._after_s = after_s
        self._published = published
        self._holds = holds
        self._reclaims = Reclaims(store.catalog)
        self._commits = -1
        self._again_at = 0.0
        """When to look again although nothing was committed."""
        self._in_use = False
        """Whether something that may go was left because somebody uses it."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            commits, now = self._store.catalog.commits, trio.current_time()
            if commits != self._commits or now >= self._again_at:
                self._again_at = float("inf") if commits == self._commits else now + self._after_s + _LOOK_EVERY_S
                await self.reclaim()
                self._commits = self._store.catalog.commits
                if self._in_use:
                    self._again_at = min(self._again_at, now + max(_IN_USE_S, self._after_s / _LOOK_PARTS))
            await trio.sleep(max(_LOOK_EVERY_S, self._after_s / _LOOK_PARTS))

    async def reclaim(self) -> int:
        """Free what may be freed now; how many bytes that were. Raises OSError."""
        until = _EVER
        if self._after_s:
            until = Stamp(int((time.time() - self._after_s) * 1000) << Clock.COUNTER_BITS)
        candidates = await trio.to_thread.run_sync(lambda: self._reclaims.look(until, published=self._published))
        self._in_use = False
        for found in candidates:
            if found.bytes < _WORTH_BYTES:
                continue
            if self._is_free(found.ino, found.image):
                await self._give_up(found, until)
            else:
                self._in_use = True
        freed_bytes = 0
        for image, ino, located_bytes in await trio.to_thread.run_sync(self._reclaims.sparse):
            freed_bytes += await self._trim(image, ino, located_bytes)
        return freed_bytes

    # Within

    def _is_free(self, ino: Inode | None, image: ImageId) -> bool:
        if (ino is not None and self._files.get(ino) is not None) or self._holds(image) or image in self._store.unowned:
            return False
        return not self._files.is_being_written(image) and is_unused(self._store.images.file(image))

    async def _give_up(self, found: Twice, until: Stamp) -> None:
        start: int | None = 0
        while start is not None and self._is_free(found.ino, found.image):
            start = self._reclaims.give_up(found, until, start, _ROWS_AT_ONCE)
            await trio.lowlevel.checkpoint()

    async def _trim(self, image: ImageId, ino: Inode | None, located_bytes: int) -> int:
        """Free what is in an image and of no use any more; how many bytes that were."""
        if not self._is_free(ino, image):
            return 0
        if ino is None:
            if not self._thin_out(image):
                return 0
            located_bytes = sum(length for _, length in self._store.contents.locations_in(image))
        try:
            before = self._store.images.status(image)
        except FileNotFoundError:
            return 0
        if before.st_blocks * 512 < located_bytes + _WORTH_BYTES:
            return 0
        with self._files.reserved(ino) if ino is not None else nullcontext(True) as is_ours:
            if not is_ours:
                return 0
            await self._store.sync.sync()  # also what an earlier round, which failed, has left
            if not self._is_free(ino, image):
                return 0
            located = [(at, at + length) for at, length in self._store.contents.locations_in(image)]
            await trio.to_thread.run_sync(punch, self._store.images.file(image), _gaps(located, before.st_size))
        try:
            freed_bytes = 512 * (before.st_blocks - self._store.images.status(image).st_blocks)
        except FileNotFoundError:
            return 0
        if freed_bytes > 0:
            log.info("image %016x gave up %d bytes that newer files have", image, freed_bytes)
        return max(freed_bytes, 0)

    def _thin_out(self, donor: ImageId) -> bool:
        """Drop rows of a nameless image that nobody needs, and the image when none is left; whether one is."""
        if not self._reclaims.is_donor(donor):
            return False
        self._reclaims.drop_unneeded(donor)
        if not self._store.contents.others_need(donor):
            self._store.contents.drop_image(donor)
            self._store.sync.delete_later(donor)
            return False
        return True


def _gaps(located: list[Span], size: int) -> list[Span]:
    """What of ``[0, size)`` is in none of *located*, which are ordered."""
    gaps, at = [], 0
    for start, end in [*located, (size, size)]:
        if at < start:
            gaps.append((at, start))
        at = max(at, end)
    return gaps
