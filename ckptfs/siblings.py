"""Fetching the shards that follow the one being read, before anybody opens them.

A checkpoint is split over files that are read one after another, and the line to the remote is idle while the reader
works on what it has. Who reads a part of it looks the same until it stops, and must not pay for the rest. So nothing of
the next shards is fetched before half of one was read; then what its readers have earned (`ckptfs.reading`), which they
share with what is fetched ahead of them in their own file, and with readers of other files in their directory; and as
much as was read once two shards were read whole.
Fetching goes on only while nobody else waits for the remote, the set is being read, and the disk has room that no save
wants.

Who calls: the event loop's thread. `run` fetches for one set at a time, the one that was read last.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

import trio

from ckptfs.encoding.manifest import Content
from ckptfs.errors import CkptfsError
from ckptfs.handles import OpenFile
from ckptfs.ids import Inode
from ckptfs.local.images import Image
from ckptfs.local.store import Store
from ckptfs.openfiles import OpenFiles
from ckptfs.reading import Account
from ckptfs.replica import sets

log = logging.getLogger(__name__)

BEGIN_SHARE = 2
"""One part in so many of a shard is read before anything of the next is fetched ..."""
WHOLE_SHARDS = 2
"""... and when so many shards were read whole, as much is fetched ahead as was read, in them and in the next."""
_WHOLE_PARTS = 8
"""A shard counts as read whole when all but one part in so many was: what the kernel has is not asked for again."""
_STEP_BYTES = 16 << 20
"""Fetched at once: a reader who comes meanwhile has so much before it on the line, 0.13 s at 1 Gb/s."""
_IDLE_S = 5.0
"""A set of which nothing was read for so long is not being read any more."""
_REST_S = 10.0
"""After something was not to be had, or there was no room."""
_FILES = 100_000
"""Files of which it is remembered what set they belong to."""


class Source(Protocol):
    """Where bytes come from (the hydrator)."""

    async def quiet(self) -> None: ...
    def has_room(self, length: int) -> bool: ...
    async def ensure(self, image: Image, content: Content, start: int, end: int) -> None: ...
    async def record(self, image: Image) -> None: ...


@dataclass
class _Set:
    """Shards in their order, and what is known of each."""

    shards: list[Inode]
    account: Account
    active_s: float = 0.0
    read: set[Inode] = field(default_factory=set)
    """Shards of which something was read."""
    ahead: dict[Inode, int] = field(default_factory=dict)
    """Bytes that were fetched of a shard of which nothing was read yet."""
    whole: set[Inode] = field(default_factory=set)
    """Shards that were read whole."""
    here: set[Inode] = field(default_factory=set)
    """Shards of which there is nothing to fetch."""
    rests_until_s: float = 0.0

    def ahead_of(self, ino: Inode, length: int) -> None:
        """So many bytes more of a shard were fetched of which nothing was read yet."""
        self.ahead[ino] = self.ahead.get(ino, 0) + length
        self.account.unread_bytes += length

    def reached(self, ino: Inode) -> int:
        """A shard is being read now; how much of it was fetched before."""
        length = self.ahead.pop(ino, 0)
        self.account.unread_bytes -= length
        return length

    def next(self) -> Inode | None:
        """The first shard to fetch from behind the last that is being read."""
        last = max((index for index, ino in enumerate(self.shards) if ino in self.read), default=len(self.shards))
        following = (ino for ino in self.shards[last + 1 :] if ino not in self.here)
        return next(following, None)


class Siblings:
    """See the module. `read` and `opened` take what `OpenFiles` tells."""

    def __init__(self, store: Store, files: OpenFiles, source: Source) -> None:
        self._names = store.names
        self._files = files
        self._source = source
        self._newest: _Set | None = None
        """The set that was read last."""
        self._set_of: dict[Inode, _Set | None] = {}
        self._accounts: dict[Inode, Account] = {}
        """By directory: who read one file of it whole begins with the next where it ended, set or not."""
        self._news = trio.Event()

    def read(self, file: OpenFile) -> None:
        """Something of *file* was read, which was not all here when it was opened."""
        if file.content is None:
            return
        read_bytes, size = file.reading.touched_bytes, file.content.size
        if read_bytes * BEGIN_SHARE < size:
            return
        found = self._find(file)
        if found is None:
            return
        found.read.add(file.ino)
        if read_bytes >= size - size // _WHOLE_PARTS:
            found.whole.add(file.ino)
            if len(found.whole) >= WHOLE_SHARDS:
                found.account.share = 1
        found.reached(file.ino)
        self._active(found)

    def opened(self, file: OpenFile) -> None:
        """*file* was opened for reading. The kernel may read it by itself if it was fetched: it was rightly fetched."""
        if not file.image.whole:
            file.reading.account = self._account(file.ino)
        found = self._set_of.get(file.ino)
        if found is None:
            return
        if file.image.whole and file.ino in found.ahead:
            found.read.add(file.ino)
            found.account.read_bytes += found.reached(file.ino)
            found.whole.add(file.ino)
        self._active(found)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            found = self._newest
            ino = found.next() if found is not None and self._is_read(found) and found.account.left() > 0 else None
            if found is None or ino is None:
                self._news = trio.Event()
                await self._news.wait()
                continue
            try:
                await self._fetch(found, ino)
            except (CkptfsError, OSError) as error:
                log.info("inode %d is not fetched ahead: %s", ino, error)
                self._rest(found)
            except Exception:  # nobody waits for this, and the mount lives on
                log.exception("fetching inode %d ahead failed", ino)
                self._rest(found)

    # Within

    async def _fetch(self, found: _Set, ino: Inode) -> None:
        """Fetch of a shard what may be, until it is whole, being read itself, or its set is no longer read."""
        file = await self._files.borrow(ino, emptied=False)
        try:
            while True:
                await self._source.quiet()
                if not self._is_wanted(found, ino):  # that may have taken long
                    return
                span = _next_step(file, found.account.left())
                if span is None or file.content is None:
                    await self._source.record(file.image)
                    found.here.add(ino)
                    return
                start, end = span
                if start == end:
                    await self._more(found)
                    continue
                if not self._source.has_room(end - start):
                    self._rest(found)
                    return
                await self._source.ensure(file.image, file.content, start, end)
                found.ahead_of(ino, end - start)
        finally:
            self._files.give_back(file)

    def _is_wanted(self, found: _Set, ino: Inode) -> bool:
        return self._is_read(found) and found is self._newest and ino not in found.read

    async def _more(self, found: _Set) -> None:
        """Wait until more may be fetched, or the set is not read any more."""
        allowed = found.account.left()
        with trio.move_on_after(_IDLE_S):
            while found is self._newest and found.account.left() <= allowed:
                self._news = trio.Event()
                await self._news.wait()

    def _is_read(self, found: _Set) -> bool:
        now = trio.current_time()
        return now - found.active_s < _IDLE_S and now >= found.rests_until_s

    def _rest(self, found: _Set) -> None:
        found.rests_until_s = trio.current_time() + _REST_S

    def _active(self, found: _Set) -> None:
        found.active_s = trio.current_time()
        self._newest = found
        self._news.set()

    def _find(self, file: OpenFile) -> _Set | None:
        """The set that *file* is a shard of."""
        ino = file.ino
        if ino not in self._set_of:
            if len(self._set_of) > _FILES:
                self._set_of.clear()
            inos = self._shards(ino)
            found = self._set_of[ino] = _Set(inos, file.reading.account) if inos else None
            self._set_of.update((each, found) for each in inos)
        return self._set_of[ino]

    def _account(self, ino: Inode) -> Account:
        """What the readers of all files in one directory share."""
        above = self._names.parents(ino)
        if not above:  # open, and removed
            return Account()
        if len(self._accounts) > _FILES:
            self._accounts.clear()
        return self._accounts.setdefault(above[0][0], Account())

    def _shards(self, ino: Inode) -> list[Inode]:
        for parent, name in self._names.parents(ino):
            above = self._names.parents(parent)
            entries = dict(self._names.entries(parent))
            shards = sets.shards(above[0][1] if above else b"", name, entries.keys())
            if shards:
                return [entries[each] for each in shards]
        return []


def _next_step(file: OpenFile, allowed: int) -> tuple[int, int] | None:
    """What to fetch next of *file*: whole chunks, empty when not even one is *allowed*, None when all is here."""
    if file.content is None or file.image.present is None:
        return None
    missing = file.image.present.missing(0, file.content.size)
    if not missing:
        return None
    start, missing_end = missing[0]
    end = start
    offsets = file.content.offsets()
    for index in file.content.at(start, min(missing_end, start + _STEP_BYTES)):
        chunk_end = offsets[index] + file.content.chunks[index].length
        if chunk_end - start > allowed:
            break
        end = chunk_end
    return start, end
