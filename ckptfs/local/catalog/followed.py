"""Others' heads as far as they were followed: rows of `head` with acked = 1 that are not our own.

Only each writer's newest is kept. A sequence never goes down. Own heads are `heads`' work.
"""

from __future__ import annotations

from ckptfs.ids import WriterId
from ckptfs.local.catalog.catalog import SELF, Catalog


class Followed:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    def newest(self) -> dict[WriterId, int]:
        """The highest sequence of every other writer whose state is in the tree."""
        rows = self._db.execute(
            "SELECT uuid, max(seq) FROM head JOIN writer ON writer.id = head.writer WHERE head.writer != ?"
            " GROUP BY head.writer",
            (SELF,),
        )
        return {WriterId(row[0]): row[1] for row in rows}

    def body(self, writer: int) -> bytes | None:
        """The object's bytes of the newest followed head of writer row *writer*."""
        row = self._db.execute(
            "SELECT body FROM head WHERE writer = ? AND acked = 1 ORDER BY seq DESC LIMIT 1", (writer,)
        ).fetchone()
        return row[0] if row else None

    def bodies(self) -> list[bytes]:
        """Of every other writer, the bytes of its newest followed head."""
        rows = self._db.execute(
            "SELECT body, max(seq) FROM head WHERE writer != ? AND acked = 1 GROUP BY writer", (SELF,)
        )
        return [row[0] for row in rows]

    def own_sequence(self) -> int:
        """The highest own sequence, acknowledged or not; 0 before the first."""
        row = self._db.execute("SELECT max(seq) FROM head WHERE writer = ?", (SELF,)).fetchone()
        return row[0] or 0

    def remember(self, writer: int, seq: int, body: bytes) -> None:
        """Head *seq* of *writer* is now in the tree; older ones are forgotten. No effect when a newer one is known."""
        with self._catalog.transaction() as db:
            row = db.execute("SELECT max(seq) FROM head WHERE writer = ?", (writer,)).fetchone()
            if row[0] is not None and row[0] > seq:
                return
            db.execute("DELETE FROM head WHERE writer = ? AND seq < ?", (writer, seq))
            db.execute("INSERT OR IGNORE INTO head (writer, seq, body, acked) VALUES (?, ?, ?, 1)", (writer, seq, body))
