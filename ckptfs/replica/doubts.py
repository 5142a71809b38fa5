"""Packs in which a reader did not find what should be there, until they are looked at again and are sound.

While a pack is in doubt, what lies in it is neither evicted nor taken to be on the remote (`Packs.known`), and `status`
does not call it safe. The remote may heal by itself (a bucket that is put back, an object restored), so each is read
again after a while, whole; making it anew is scrub's work.

Who calls: the event loop's thread.
"""

from __future__ import annotations

import logging

import trio

from ckptfs.encoding.keys import pack_key
from ckptfs.errors import RemoteError, RemoteForbidden, RemoteUnusable
from ckptfs.ids import ObjectId
from ckptfs.local.catalog.packs import Packs
from ckptfs.remote.base import ObjectStore
from ckptfs.replica.verify import FindRaw, verify_packs

log = logging.getLogger(__name__)

_RAREST = 60
"""Looks at one pack come ever more rarely, down to one in so many times the first pause: an hour."""


class Doubts:
    """See the module."""

    def __init__(self, packs: Packs) -> None:
        self._packs = packs
        self._why: dict[ObjectId, str] = {}
        self._looks: dict[ObjectId, tuple[float, float]] = {}
        """When a pack is looked at next, and how long after that again."""

    def missed(self, pack: ObjectId, error: Exception) -> None:
        """*pack* did not give what it should, twice: *error* says why. Logged once."""
        if isinstance(error, RemoteForbidden | RemoteUnusable):  # says nothing of the pack
            return
        if pack not in self._why:
            log.error("bytes that should be on the remote cannot be had: %s", error)
        self._why[pack] = str(error)
        try:
            self._packs.doubt(pack)
        except OSError as failure:  # a full disk: the next reader says it again
            log.warning("that %s is in doubt is not recorded: %s", pack_key(pack), failure)

    def told(self) -> list[dict[str, object]]:
        """As JSON: `object`, the key; `why`, what was wrong; `here`, whether bytes of this disk should be in it."""
        before = "a reader missed something in it before this mount"
        found = self._packs.doubted().items()
        return [{"object": pack_key(name), "why": self._why.get(name, before), "here": here} for name, here in found]

    async def run(self, remote: ObjectStore, find: FindRaw, every_s: float) -> None:
        """Look at what is in doubt again, *every_s* at first, until cancelled; *find* gives what deltas are against."""
        while True:
            await trio.sleep(every_s / 2)
            doubted = self._packs.doubted()
            for gone in self._why.keys() - set(doubted):
                del self._why[gone]
            for name in doubted:
                due, pause_s = self._looks.get(name, (trio.current_time() + every_s, every_s))
                if trio.current_time() >= due:
                    pause_s = min(2 * pause_s, _RAREST * every_s)
                    due = trio.current_time() + pause_s
                    await self._look(remote, name, find)
                self._looks[name] = due, pause_s
            self._looks = {name: each for name, each in self._looks.items() if name in doubted}

    async def _look(self, remote: ObjectStore, name: ObjectId, find: FindRaw) -> None:
        try:
            await verify_packs(remote, self._packs, [name], find)
        except RemoteError as error:
            log.info("%s is still in doubt: %s", pack_key(name), error)
            return
        if not self._packs.is_doubted(name):
            log.warning("%s is sound again", pack_key(name))
