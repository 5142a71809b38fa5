"""Evicting: when the disk has no room for a save, whole images make way of which the remote has every byte.

With `evict_after_s` also without need: what nobody used for so long, but the newest set, is on the remote alone.

Only files go that are published as they are, and whose every chunk lies in a pack that an acknowledged head reaches
(invariant 2), that is not in doubt, and that the remote says is there; only images that nobody has open or mapped, and
that no cut needs; and nothing while it is not certain that the remote answers, and is ours. Fetched ones go first, then
the least recently used, and the newest set that is safe as a whole goes last. The rows go first, durably, then the file
(`GroupSync.delete_later`), so that a kill in between loses nothing. Afterwards the file is read as one that was saved
elsewhere. See docs/decisions/eviction.md.

Who calls: the event loop's thread; `run` must be running. Whatever may have changed during an `await` is looked at
again without one, right before the rows go.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from ckptfs.config import NEVER_S
from ckptfs.encoding.keys import pack_key
from ckptfs.encoding.manifest import Content
from ckptfs.errors import CkptfsError, ObjectMissing, RemoteError
from ckptfs.ids import ImageId, Inode, ObjectId
from ckptfs.local.catalog.evictions import Evictable, Evictions
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.leases import is_unused
from ckptfs.local.room import Room
from ckptfs.local.store import Store
from ckptfs.replica.bound import BoundStore

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
"""The disk's free space is looked at: a `statvfs`, since nobody tells what the kernel writes by itself."""
_WAIT_S = 2.0
"""The longest that opening for writing waits for room ..."""
_ANSWER_S = 1.0
"""... and that the remote has to say that it is there; it counts as being there for `_TRUST_S`."""
_TRUST_S = 2.0
_REST_S, _DOUBT_S = 0.5, 5.0
"""After nothing could make way, and after the remote did not answer: until then nothing is tried, and nobody waits. In
the second case nobody waits before it has answered again."""
_STALE_S = 5.0
"""What could make way is counted again at most so often while there is no need."""
_LOOK_PARTS, _LOOK_LEAST_S, _LOOK_MOST_S = 10, 0.5, 60.0
"""What nobody used is looked for ten times in the time after which it goes, within these bounds."""
_SEEN_S = 600.0
"""So long a pack that was there is believed to be ..."""
_LOOK_S = 5.0
"""... and so long the remote has to say that it is; so many are asked for at once:"""
_LOOK_AT_ONCE = 8
_LOOK_UP = 1500
"""Chunks looked up before others may run: 5 to 10 ms."""
_USES = 10_000
"""Files of which it is remembered when they were used last; of others the image's own atime tells."""


@dataclass(frozen=True)
class _Candidate:
    found: Evictable
    bytes: int
    """On the disk."""
    read_s: float
    """The image's atime ..."""
    changed_s: float
    """... and ctime."""


class Evictor:
    """See the module."""

    def __init__(
        self,
        store: Store,
        remote: BoundStore,
        room: Room,
        *,
        content: Callable[[int], Awaitable[Content]],
        is_open: Callable[[Inode], bool],
        holds: Callable[[ImageId], bool],
        let_go: Callable[[ImageId], None],
        missed: Callable[[ObjectId, Exception], None],
        newest_set: Callable[[], set[Inode]],
        after_s: float = NEVER_S,
    ) -> None:
        """*content* gives a manifest's chunks, *holds* tells of images that others need, *newest_set* goes last.

        *let_go* has an image closed that is open only until it is recorded what was fetched into it. *missed* is told
        of packs that are not there.

        What was not used for *after_s* goes though there is room; `NEVER_S`: nothing does.
        """
        self._store = store
        self._remote = remote
        self._room = room
        self._evictions, self._packs = Evictions(store.catalog), Packs(store.catalog)
        self._content, self._is_open, self._newest_set = content, is_open, newest_set
        self._holds, self._let_go, self._missed = holds, let_go, missed
        self._seen_s: dict[ObjectId, float] = {}
        """When packs were there."""
        self._after_s = after_s
        self._look_every_s = min(max(after_s / _LOOK_PARTS, _LOOK_LEAST_S), _LOOK_MOST_S)
        self._looked_for_unused_s = float("-inf")
        self._asking = trio.CapacityLimiter(1)
        self._candidates: list[_Candidate] = []
        """What could make way when it was looked for, in the order in which it goes."""
        self._looked_at_s, self._looked_commits = float("-inf"), -1
        self._used_s: OrderedDict[Inode, float] = OrderedDict()
        self._wanted, self._done = trio.Event(), trio.Event()
        self._saves_wait = False
        self._shown = True
        self._evictable_bytes = 0
        self._doubts = False
        self._rests_until_s = float("-inf")

    # Asking

    async def make_room(self) -> None:
        """Before a program saves: return when there is room, nothing can make way, or after a short while."""
        if self._doubts or self._rests() or not self._room.lacking_bytes(saving=True):
            return
        self._saves_wait = True
        self._wanted.set()
        done = self._done
        with trio.move_on_after(_WAIT_S):
            await done.wait()
        if not done.is_set():
            self._doubt("room was not made in time")

    def used(self, ino: Inode) -> None:
        """Somebody had *ino* open until now."""
        self._used_s[ino] = time.time()
        self._used_s.move_to_end(ino)
        if len(self._used_s) > _USES:
            self._used_s.popitem(last=False)

    def shown(self, disk: os.statvfs_result) -> os.statvfs_result:
        """*disk* as a program should see it: what can make way is free, the reserve is not."""
        self._shown = True
        evictable = 0 if self._doubts else self._evictable_bytes // disk.f_frsize
        free = min(disk.f_bfree + evictable, disk.f_blocks)
        available = disk.f_bavail + evictable - self._room.reserve_bytes() // disk.f_frsize
        values = list(disk)
        values[3], values[4] = free, max(0, min(available, free))
        return os.statvfs_result(values)

    # Running

    async def run(self) -> None:
        """Make room when there is need, until cancelled."""
        while True:
            with trio.move_on_after(_LOOK_EVERY_S):
                await self._wanted.wait()
            self._wanted = trio.Event()
            saving, self._saves_wait = self._saves_wait, False
            try:
                if self._rests():
                    pass
                elif self._doubts or self._room.lacking_bytes(saving=saving):
                    await self._make_way(saving=saving)
                elif self._is_time_for_unused():
                    await self._give_up_unused()
                elif self._shown and self._is_stale():
                    await self._look()
            except Exception as error:  # nobody's request; the mount lives on
                log.exception("making room on the disk failed")
                self._doubt(str(error))
            self._done.set()
            self._done = trio.Event()

    # Within

    def _rests(self) -> bool:
        return trio.current_time() < self._rests_until_s

    def _rest(self, pause_s: float) -> None:
        self._rests_until_s = trio.current_time() + pause_s

    def _doubt(self, why: str) -> None:
        if not self._doubts:
            log.warning("nothing makes way on the disk for now: %s", why)
        self._doubts = True
        self._rest(_DOUBT_S)

    async def _make_way(self, *, saving: bool) -> None:
        if not await self._remote_answers():
            return
        looked = False
        while lacking_bytes := self._room.lacking_bytes(saving=saving):
            freed_bytes = await self._free(lacking_bytes)
            if freed_bytes:
                await self._store.sync.sync()  # rows first, then the files
                log.info("%d bytes that the remote has made way on the disk", freed_bytes)
            elif looked or self._looked_commits == self._store.catalog.commits:
                self._rest(_REST_S)
                return
            else:
                await self._look()
                looked = True

    async def _free(self, wanted_bytes: int) -> int:
        """Give up images until *wanted_bytes* are free, as soon as that is synced; how many bytes those are."""
        freed_bytes, in_use = 0, []
        while self._candidates and freed_bytes < wanted_bytes:
            candidate = self._candidates.pop(0)
            if self._is_free(candidate.found):
                freed_bytes += await self._evict(candidate)
            else:
                in_use.append(candidate)
        self._candidates[:0] = in_use
        return freed_bytes

    def _is_time_for_unused(self) -> bool:
        since_s = trio.current_time() - self._looked_for_unused_s
        return self._after_s != NEVER_S and since_s >= self._look_every_s

    async def _give_up_unused(self) -> None:
        """Evict what nobody used for as long as was asked for, but the newest set."""
        self._looked_for_unused_s = trio.current_time()
        if not await self._remote_answers():
            return
        await self._look()
        newest, since_s = self._newest_set(), time.time() - self._after_s
        freed_bytes, stay = 0, []
        for candidate in self._candidates:
            ino = candidate.found.ino
            used_s = max(self._used_s.get(ino, 0.0), candidate.read_s, candidate.changed_s)
            if used_s > since_s or ino in newest or not self._is_free(candidate.found):
                stay.append(candidate)
            else:
                freed_bytes += await self._evict(candidate)
        self._candidates = stay
        if freed_bytes:
            await self._store.sync.sync()
            log.info("%d bytes that were not used for long are on the remote alone now", freed_bytes)

    async def _remote_answers(self) -> bool:
        """Whether the remote that the store is bound to is there, now."""
        with trio.move_on_after(_ANSWER_S):
            try:
                await trio.to_thread.run_sync(
                    self._remote.recognise, _TRUST_S, limiter=self._asking, abandon_on_cancel=True
                )
                self._doubts = False
                return True
            except RemoteError as error:
                self._doubt(f"the remote is in doubt ({error})")
                return False
        self._doubt("the remote does not answer")
        return False

    def _is_stale(self) -> bool:
        changed = self._store.catalog.commits != self._looked_commits
        return changed and trio.current_time() - self._looked_at_s >= _STALE_S

    async def _look(self) -> None:
        self._shown = False
        self._looked_at_s, self._looked_commits = trio.current_time(), self._store.catalog.commits
        found = await trio.to_thread.run_sync(self._look_blocking)
        newest = self._newest_set()
        found.sort(
            key=lambda each: (
                each.found.ino in newest,
                not each.found.fetched,
                max(self._used_s.get(each.found.ino, 0.0), each.read_s),
            )
        )
        self._candidates = found
        self._evictable_bytes = sum(each.bytes for each in found if not self._is_open(each.found.ino))

    def _look_blocking(self) -> list[_Candidate]:
        candidates = []
        for each in self._evictions.look():
            try:
                status = self._store.images.status(each.image)
            except FileNotFoundError:  # deleted since
                continue
            if status.st_blocks:
                candidates.append(_Candidate(each, status.st_blocks * 512, status.st_atime, status.st_ctime))
        return candidates

    async def _evict(self, candidate: _Candidate) -> int:
        """Give up an image, if that may be; how many bytes the disk gets back once that is synced."""
        found = candidate.found
        try:
            if not self._evictions.is_still(found) or not await self._is_reached(found.manifest):
                return 0
        except CkptfsError as error:
            log.info("image %016x stays: %s", found.image, error)
            return 0
        if not (self._evictions.is_still(found) and self._is_free(found)):  # nothing awaits from here on
            return 0
        self._evictions.evict(found)
        self._store.sync.delete_later(found.image)
        self._evictable_bytes = max(0, self._evictable_bytes - candidate.bytes)
        return candidate.bytes

    async def _is_reached(self, manifest: int) -> bool:
        """Whether an acknowledged head reaches a pack with each chunk of *manifest*, no reader missed it there, and the
        packs are there.

        Raises ContentUnavailable.
        """
        content = await self._content(manifest)
        packs: set[ObjectId] = set()
        for start in range(0, len(content.chunks), _LOOK_UP):
            chunks = {chunk.id for chunk in content.chunks[start : start + _LOOK_UP]}
            if self._packs.reached(chunks) != chunks:
                return False
            packs.update(at.pack for at in self._packs.placed_with_bases(chunks).values())
            await trio.lowlevel.checkpoint()
        return await self._are_there(packs)

    async def _are_there(self, packs: set[ObjectId]) -> bool:
        """Whether the remote says that it has *packs*: another writer's may be known from its manifests alone."""
        now = time.monotonic()
        unseen = [each for each in packs if now - self._seen_s.get(each, float("-inf")) > _SEEN_S]
        limiter = trio.CapacityLimiter(_LOOK_AT_ONCE)

        async def look(pack: ObjectId) -> None:
            key = pack_key(pack)
            ask = partial(self._remote.size, key)
            try:
                size = await trio.to_thread.run_sync(ask, limiter=limiter, abandon_on_cancel=True)
            except RemoteError as error:
                log.info("what lies in %s stays on the disk: %s", key, error)
                return
            if size is None:
                self._missed(pack, ObjectMissing(f"{self._remote.url}: {key} is gone", key=key))
            else:
                self._seen_s[pack] = now

        with trio.move_on_after(_LOOK_S):
            async with trio.open_nursery() as nursery:
                for pack in unseen:
                    nursery.start_soon(look, pack)
        are_there = all(now - self._seen_s.get(each, float("-inf")) <= _SEEN_S for each in packs)
        if not are_there:
            self._looked_commits = -1  # to be looked for again, though nothing changes here
        return are_there

    def _is_free(self, found: Evictable) -> bool:
        """Whether no program and no work of ours has the image open or mapped; `let_go` is asked to close it first."""
        if self._is_open(found.ino) or self._holds(found.image):
            return False
        self._let_go(found.image)
        return is_unused(self._store.images.file(found.image))
