"""Tombstones: how many there are, and dropping those that everybody has merged."""

from __future__ import annotations

from collections.abc import Mapping

from ckptfs.ids import WriterId
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.names import CLEAN, MERGED


class Tombstones:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    def published(self) -> int:
        """Tombstones that some acknowledged head has."""
        row = self._db.execute(
            "SELECT count(*) FROM dirent WHERE ino IS NULL AND origin_seq IS NOT NULL"
        ).fetchone()
        return int(row[0])

    def drop(self, merged: Mapping[WriterId, int]) -> int:
        """Drop those that came with a head of *writer* up to the sequence that everybody has merged; returns how many.

        The directories' trees are outdated by that, but nothing that anybody could see has changed: they are
        published with the next real change.
        """
        dropped = 0
        with self._catalog.transaction() as db:
            for writer, seq in merged.items():
                which = (self._catalog.writer_row(writer), seq)
                condition = "ino IS NULL AND origin_writer = ? AND origin_seq <= ?"
                db.execute(
                    f"UPDATE inode SET dirty = {MERGED} WHERE dirty = {CLEAN}"
                    f" AND ino IN (SELECT parent FROM dirent WHERE {condition})",
                    which,
                )
                dropped += db.execute(f"DELETE FROM dirent WHERE {condition}", which).rowcount
        return dropped
