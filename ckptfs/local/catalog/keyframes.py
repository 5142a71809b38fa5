"""Keyframes: for a tensor of a series, the chunk that its deltas are against, and what they cost since.

A key (16 bytes) says which piece of which tensor it is, in which series; `ckptfs.pieces` makes it. A row is only a
hint: one that points to a chunk which is not on the remote any more, or is a delta there itself, is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs.ids import ChunkId
from ckptfs.local.catalog.catalog import Catalog, batches


@dataclass(frozen=True, slots=True)
class Keyframe:
    """A chunk that deltas may be against."""

    chunk: ChunkId
    length: int
    """Raw bytes."""
    stored: int
    """Encoded bytes of this chunk and of every delta since."""
    count: int
    """How many chunks that were."""


class Keyframes:
    """Rows by key."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Keyframe]:
        """The keyframes of *keys* that the remote has, whole and not as deltas."""
        found = {}
        for batch in batches(keys):
            for key, chunk, *rest in self._db.execute(
                "SELECT k.key, k.chunk, p.raw_length, k.stored, k.count FROM keyframe k"
                " JOIN packed p ON p.chunk = k.chunk"
                f" WHERE k.key IN ({','.join('?' * len(batch))}) AND p.base IS NULL",
                batch,
            ):
                found[key] = Keyframe(ChunkId(chunk), *rest)
        return found

    def record(self, rows: Iterable[tuple[bytes, Keyframe]]) -> None:
        """From now on these are the keyframes."""
        with self._catalog.transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO keyframe (key, chunk, stored, count) VALUES (?, ?, ?, ?)",
                [(key, each.chunk, each.stored, each.count) for key, each in rows],
            )
