"""Packs on the remote and the chunks in them, as far as this store knows.

A row is made only after the remote acknowledged the pack, or after a followed head was seen to reach it (invariant 7).
Putting packs is `replica.upload`'s work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptfs.encoding.manifest import Placed
from ckptfs.encoding.pack import PackedChunk
from ckptfs.ids import ChunkId, ObjectId
from ckptfs.local.catalog.catalog import Catalog, batches
from ckptfs.local.catalog.contents import Contents

DAMAGED, ACKNOWLEDGED, VERIFIED, DOUBTED = 0, 1, 2, 3
"""Values of pack.state."""

_DOUBTFUL = (
    f"(pack.state = {DOUBTED} OR (packed.base IS NOT NULL AND packed.base IN (SELECT other.chunk FROM pack AS its"
    f" JOIN packed AS other ON other.pack = its.id WHERE its.state = {DOUBTED})))"
)
"""Of a row of packed JOIN pack: the chunk, or what it is a delta against, is where a reader did not find it."""

_LEARNED = 0
"""pack.head of a pack that another writer's head names."""


class Packs:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db
        self._contents = Contents(catalog)

    def known(self, chunks: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of *chunks* that the remote has."""
        return self._chunks_where(chunks, "TRUE")

    def reached(self, chunks: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of *chunks* that lie in a pack which an acknowledged head, ours or one that we followed, reaches, and
        where no reader missed them."""
        return self._chunks_where(chunks, f"pack.head IS NOT NULL AND NOT {_DOUBTFUL}")

    def doubtful(self, chunks: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of *chunks* that somebody missed in their packs, or that are against such."""
        return self._chunks_where(chunks, _DOUBTFUL)

    def doubt(self, name: ObjectId) -> None:
        """A reader did not find in pack *name* what should be there.

        Nothing that should lie in it is evicted until it is `verified`.
        """
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE pack SET state = ? WHERE name = ? AND state <> ?", (DOUBTED, name, DOUBTED)
            )

    def doubted(self) -> dict[ObjectId, bool]:
        """Packs in doubt, in the order in which they came, and whether bytes of this disk should be in each."""
        here = "JOIN location ON location.chunk ="
        rows = self._db.execute(
            f"SELECT name, EXISTS (SELECT 1 FROM packed {here} packed.chunk WHERE packed.pack = pack.id)"
            f" OR EXISTS (SELECT 1 FROM packed JOIN packed AS delta ON delta.base = packed.chunk {here} delta.chunk"
            f" WHERE packed.pack = pack.id) FROM pack WHERE state = {DOUBTED} ORDER BY id"
        )
        return {ObjectId(row[0]): bool(row[1]) for row in rows}

    def placed(self, chunks: Iterable[ChunkId]) -> dict[ChunkId, Placed]:
        """Where the remote has *chunks*; those that it lacks are left out."""
        found: dict[ChunkId, Placed] = {}
        for batch in batches(chunks):
            marks = ",".join("?" * len(batch))
            for row in self._db.execute(
                "SELECT packed.chunk, pack.name, packed.offset, packed.length, packed.codec, packed.base FROM packed"
                f" JOIN pack ON pack.id = packed.pack WHERE packed.chunk IN ({marks})",
                batch,
            ):
                base = None if row[5] is None else ChunkId(row[5])
                found[ChunkId(row[0])] = Placed(ObjectId(row[1]), row[2], row[3], row[4], base)
        return found

    def placed_with_bases(self, chunks: Iterable[ChunkId]) -> dict[ChunkId, Placed]:
        """The same with the chunks that deltas among them are against."""
        found = self.placed(chunks)
        bases = {place.base for place in found.values() if place.base is not None}
        return found | self.placed(bases - found.keys())

    def bases_among(self, chunks: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of *chunks* that some delta on the remote is against."""
        return self._found(chunks, "SELECT DISTINCT base FROM packed WHERE base IN ({marks})")

    def acknowledged(self, name: ObjectId, chunks: Sequence[PackedChunk], *, verified: bool) -> None:
        """The remote has pack *name*, which no head names yet. A chunk that is known elsewhere stays where it was."""
        self._add(name, chunks, VERIFIED if verified else ACKNOWLEDGED, None)

    def learned(self, packs: Mapping[ObjectId, Sequence[PackedChunk]]) -> None:
        """Another writer's head reaches these packs."""
        with self._catalog.transaction():
            for name, chunks in packs.items():
                self._add(name, chunks, ACKNOWLEDGED, _LEARNED)

    def unnamed(self) -> list[ObjectId]:
        """Acknowledged packs that no head names yet, in the order in which they came."""
        return [ObjectId(row[0]) for row in self._db.execute("SELECT name FROM pack WHERE head IS NULL ORDER BY id")]

    def chunks(self, name: ObjectId) -> tuple[PackedChunk, ...]:
        """The chunks that are looked for in pack *name*, by offset."""
        return tuple(
            PackedChunk(ChunkId(row[0]), *row[1:])
            for row in self._db.execute(
                "SELECT chunk, offset, length, raw_length, codec, base FROM packed"
                " WHERE pack = (SELECT id FROM pack WHERE name = ?) ORDER BY offset",
                (name,),
            )
        )

    def named(self, packs: Iterable[ObjectId], seq: int) -> None:
        """Own head *seq* names *packs*."""
        with self._catalog.transaction() as db:
            db.executemany(
                "UPDATE pack SET head = ? WHERE name = ? AND head IS NULL", [(seq, name) for name in packs]
            )

    def forget(self, name: ObjectId) -> None:
        """The remote lost pack *name*: its chunks are to be sent again, and so are deltas against them."""
        with self._catalog.transaction() as db:
            db.execute(
                "DELETE FROM packed WHERE base IN"
                " (SELECT chunk FROM packed WHERE pack = (SELECT id FROM pack WHERE name = ?))",
                (name,),
            )
            db.execute("DELETE FROM packed WHERE pack = (SELECT id FROM pack WHERE name = ?)", (name,))
            db.execute("DELETE FROM pack WHERE name = ?", (name,))

    def any_unverified(self) -> bool:
        """Whether the bytes of any pack at all were not compared yet, or are in doubt."""
        states = (ACKNOWLEDGED, DOUBTED)
        return self._db.execute("SELECT 1 FROM pack WHERE state IN (?, ?) LIMIT 1", states).fetchone() is not None

    def unverified_of(self, chunks: Iterable[bytes]) -> list[ObjectId]:
        """Packs with some of *chunks*, or what they are against, whose bytes were not compared yet or are in doubt."""
        found: dict[ObjectId, None] = {}
        for batch in batches(chunks):
            marks = ",".join("?" * len(batch))
            for row in self._db.execute(
                f"WITH own AS (SELECT chunk, base FROM packed WHERE chunk IN ({marks}))"
                " SELECT DISTINCT pack.name FROM packed JOIN pack ON pack.id = packed.pack"
                " WHERE packed.chunk IN (SELECT chunk FROM own UNION SELECT base FROM own) AND pack.state IN (?, ?)",
                (*batch, ACKNOWLEDGED, DOUBTED),
            ):
                found[ObjectId(row[0])] = None
        return list(found)

    def verified(self, name: ObjectId) -> None:
        """The remote's bytes of pack *name* were compared and are right."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE pack SET state = ? WHERE name = ?", (VERIFIED, name))

    def stored_bytes(self) -> int:
        """Encoded bytes of every chunk that is known to be on the remote."""
        return int(self._db.execute("SELECT coalesce(sum(length), 0) FROM packed").fetchone()[0])

    def _add(self, name: ObjectId, chunks: Sequence[PackedChunk], state: int, head: int | None) -> None:
        with self._catalog.transaction() as db:
            db.execute("INSERT OR IGNORE INTO pack (name, state, head) VALUES (?, ?, ?)", (name, state, head))
            pack, known_state = db.execute("SELECT id, state FROM pack WHERE name = ?", (name,)).fetchone()
            if known_state in (DAMAGED, DOUBTED) and head == _LEARNED:
                # Who names it does not know. What is here is sent again, and not looked for there.
                here = self._contents.located([chunk.id for chunk in chunks], besides=None)
                chunks = [chunk for chunk in chunks if chunk.id not in here]
            elif known_state in (DAMAGED, DOUBTED):
                db.execute("UPDATE pack SET state = ?, head = ? WHERE id = ?", (state, head, pack))
            db.executemany(
                "INSERT OR IGNORE INTO packed (chunk, pack, offset, length, raw_length, codec, base)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(c.id, pack, c.offset, c.length, c.raw_length, c.codec, c.base) for c in chunks],
            )

    def _chunks_where(self, chunks: Iterable[ChunkId], condition: str) -> set[ChunkId]:
        joined = "SELECT packed.chunk FROM packed JOIN pack ON pack.id = packed.pack"
        return self._found(chunks, f"{joined} WHERE packed.chunk IN ({{marks}}) AND {condition}")

    def _found(self, chunks: Iterable[ChunkId], query: str) -> set[ChunkId]:
        """What *query*, with a place for the marks of some of *chunks*, gives for all of them."""
        found: set[ChunkId] = set()
        for batch in batches(chunks):
            rows = self._db.execute(query.format(marks=",".join("?" * len(batch))), batch)
            found.update(ChunkId(row[0]) for row in rows)
        return found
