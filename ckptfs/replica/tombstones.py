"""Dropping tombstones that everybody has merged, so that a run that rotates checkpoints for months keeps small trees.

A tombstone may go when the version vector of every current head covers the head that published it: whoever still has
the name has merged its removal, or learned the name from a head that the current ones cover, and then its absence
says the same (`entries`). Which heads are current is looked up first, with one check of the remote.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.head import Head, current_heads, decode_head
from ckptfs.ids import WriterId
from ckptfs.local.catalog.followed import Followed
from ckptfs.local.catalog.heads import Heads
from ckptfs.local.catalog.tombstones import Tombstones
from ckptfs.local.store import Store
from ckptfs.replica.follow import Follower

log = logging.getLogger(__name__)

WORTH_A_LOOK = 256
"""Tombstones below this number cost less than the request that would tell whether they may go."""
_LOOK_EVERY_S = 300.0


class TombstoneCollector:
    """Looks now and then, while there is something to drop."""

    def __init__(self, store: Store, follower: Follower, *, worth_a_look: int = WORTH_A_LOOK) -> None:
        self._catalog = store.catalog
        self._follower = follower
        self._followed = Followed(store.catalog)
        self._heads = Heads(store.catalog)
        self._tombstones = Tombstones(store.catalog)
        self._worth_a_look = worth_a_look

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(_LOOK_EVERY_S)
            if self._tombstones.published() >= self._worth_a_look:
                await self.collect()

    async def collect(self) -> int:
        """Drop what may go now; returns how many. Nothing goes while the remote does not tell who is there."""
        if not await self._follower.catch_up():
            return 0
        dropped = self._tombstones.drop(merged_by_all(self._known_heads()))
        if dropped:
            log.info("%d removed names are known to every writer and forgotten", dropped)
        return dropped

    def _known_heads(self) -> list[Head]:
        bodies = [self._followed.body(self._catalog.writer_row(writer)) for writer in self._followed.newest()]
        own = self._heads.newest()
        bodies.append(own.body if own is not None else None)
        return [decode_head(open_object(body)) for body in bodies if body is not None]


def merged_by_all(heads: Sequence[Head]) -> dict[WriterId, int]:
    """Per writer the highest sequence that the current ones among *heads* have all merged."""
    current = current_heads(heads)
    writers = {head.writer for head in heads}.union(*(head.vector for head in heads))
    merged = {
        writer: min(head.seq if head.writer == writer else head.vector.get(writer, 0) for head in current)
        for writer in writers
    }
    return {writer: seq for writer, seq in merged.items() if seq}
