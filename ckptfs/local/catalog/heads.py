"""Heads in the catalog: this store's own from before the first PUT on, and how far other writers' were followed.

A head's bytes are committed here (and synced by the caller with `Catalog.sync_wal`) before they are put, and are put
again unchanged until they are acknowledged; so a sequence never names two states. The newest acknowledged row of each
writer stays: the next sequence and the version vector come from it. Following others is `replica.follow`'s work.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.ids import WriterId
from ckptfs.local.catalog.catalog import SELF, Catalog

_GIVEN_UP = "sequence_given_up"


@dataclass(frozen=True)
class HeadRow:
    """One of this store's heads."""

    seq: int
    body: bytes
    """The object's bytes."""


class Heads:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    def next_seq(self) -> int:
        """One above every sequence that this writer has committed."""
        row = self._db.execute("SELECT coalesce(max(seq), 0) FROM head WHERE writer = ?", (SELF,)).fetchone()
        given_up = self._catalog.get_setting(_GIVEN_UP)
        return max(int(row[0]), int(given_up or 0)) + 1

    def commit(self, seq: int, body: bytes) -> None:
        """Reserve *seq* for *body* for ever. Not durable before the next `Catalog.sync_wal`."""
        with self._catalog.transaction() as db:
            db.execute("INSERT INTO head (writer, seq, body, acked) VALUES (?, ?, ?, 0)", (SELF, seq, body))

    def unacknowledged(self) -> HeadRow | None:
        """The head that was committed and may or may not have reached the remote."""
        return self._own(0)

    def newest(self) -> HeadRow | None:
        """This writer's newest acknowledged head."""
        return self._own(1)

    def acknowledged(self, seq: int) -> None:
        """The remote has head *seq*; the ones before it are not needed here any more."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE head SET acked = 1 WHERE writer = ? AND seq = ?", (SELF, seq))
            db.execute("DELETE FROM head WHERE writer = ? AND seq < ?", (SELF, seq))

    def give_up(self, seq: int) -> None:
        """Head *seq* was committed, never reached the remote, and never will: its sequence stays unused."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM head WHERE writer = ? AND seq = ? AND acked = 0", (SELF, seq))
            self._catalog.set_setting(_GIVEN_UP, seq)

    def vector(self) -> dict[WriterId, int]:
        """The highest sequence of every writer that the tree here has merged; of this store's own, acknowledged."""
        return {
            WriterId(row[0]): row[1]
            for row in self._db.execute(
                "SELECT writer.uuid, max(head.seq) FROM head JOIN writer ON writer.id = head.writer"
                " WHERE head.acked = 1 GROUP BY head.writer"
            )
        }

    def _own(self, acked: int) -> HeadRow | None:
        row = self._db.execute(
            "SELECT seq, body FROM head WHERE writer = ? AND acked = ? ORDER BY seq DESC LIMIT 1", (SELF, acked)
        ).fetchone()
        return HeadRow(*row) if row else None
