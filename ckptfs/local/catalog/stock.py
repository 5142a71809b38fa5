"""What a store holds and what it believes to be on the remote, for who looks whether that is so. Queries only."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from ckptfs.ids import FileId, ImageId, Inode, ObjectId
from ckptfs.local.catalog.catalog import SELF
from ckptfs.local.catalog.cuts import CutEntry, entry_of_row

_UNDER = """
WITH RECURSIVE tree(ino) AS (
    SELECT ?1
    UNION
    SELECT d.ino FROM tree JOIN dirent d ON d.parent = tree.ino WHERE d.ino IS NOT NULL
)
"""

_ENTRY = """
SELECT d.name, d.ino, i.manifest, d.stamp, 0, i.file_id, coalesce(i.changed, 0), i.mode, i.uid, i.gid, i.rdev, i.size,
    i.mtime_ns, i.ctime_ns, i.atime_ns, i.target, i.tree, i.tree_body,
    (SELECT json_group_array(json_array(hex(name), hex(value))) FROM
        (SELECT name, value FROM xattr WHERE ino = d.ino ORDER BY name))
FROM dirent d LEFT JOIN inode i ON i.ino = d.ino WHERE d.parent = ? ORDER BY d.name
"""
"""The columns of `cuts.entry_of_row`."""


@dataclass(frozen=True)
class StockFile:
    """A sealed file version, and the image in which it lies here."""

    ino: Inode | None
    """None: only a cut has it, an earlier version that is still to be published."""
    image: ImageId | None
    whole: bool
    manifest: int
    size: int
    digest: ObjectId | None
    """Of its manifest on the remote, where it is an object of its own; None where it is inlined or not published."""
    published: bool


@dataclass(frozen=True)
class StockTree:
    """A directory whose published tree is what its rows say, and an object of its own."""

    ino: Inode
    file_id: FileId
    digest: ObjectId


@dataclass(frozen=True)
class StockHead:
    """A head's bytes as the remote should have them."""

    own: bool
    seq: int
    body: bytes


class Stock:
    def __init__(self, db: sqlite3.Connection) -> None:
        """*db* is a catalog's connection; one that only reads will do."""
        self._db = db

    def files(self, top: Inode) -> list[StockFile]:
        """Sealed files at or below *top*, by inode."""
        rows = self._db.execute(
            _UNDER + "SELECT i.ino, i.image, coalesce(im.whole, 0) = 1, m.id, m.size,"
            " CASE WHEN m.remote_body IS NULL THEN m.digest END, m.digest IS NOT NULL"
            " FROM tree JOIN inode i USING (ino)"
            " JOIN manifest m ON m.id = i.manifest LEFT JOIN image im ON im.id = i.image ORDER BY i.ino",
            (top,),
        )
        return [_file(row) for row in rows]

    def cut_files(self) -> list[StockFile]:
        """Sealed versions that only cuts have: they are still to be published."""
        rows = self._db.execute(
            "SELECT DISTINCT NULL, c.image, im.whole = 1, m.id, m.size, NULL, m.digest IS NOT NULL FROM cut_entry c"
            " JOIN manifest m ON m.id = c.manifest JOIN image im ON im.id = c.image"
            " WHERE NOT EXISTS (SELECT 1 FROM inode WHERE image = c.image)"
        )
        return [_file(row) for row in rows]

    def cut_name(self, image: ImageId) -> tuple[Inode, bytes] | None:
        """Where a cut has *image*: (directory, name)."""
        row = self._db.execute("SELECT dir, name FROM cut_entry WHERE image = ? LIMIT 1", (image,)).fetchone()
        return (Inode(row[0]), row[1]) if row else None

    def trees(self, top: Inode) -> list[StockTree]:
        """Directories at or below *top* that are as they were published, in an object of their own."""
        rows = self._db.execute(
            _UNDER + "SELECT i.ino, i.file_id, i.tree FROM tree JOIN inode i USING (ino)"
            " WHERE i.tree IS NOT NULL AND i.tree_body IS NULL AND i.dirty = 0 AND i.expanded = 1",
            (top,),
        )
        return [StockTree(Inode(row[0]), FileId(row[1]), ObjectId(row[2])) for row in rows]

    def unexpanded(self, top: Inode) -> list[Inode]:
        """Directories at or below *top* that nobody looked into yet."""
        rows = self._db.execute(
            _UNDER + "SELECT i.ino FROM tree JOIN inode i USING (ino) WHERE i.expanded = 0", (top,)
        )
        return [Inode(row[0]) for row in rows]

    def entries(self, directory: Inode) -> list[CutEntry]:
        """What *directory* says now, tombstones included, ordered by name."""
        return [entry_of_row(row) for row in self._db.execute(_ENTRY, (directory,))]

    def heads(self) -> list[StockHead]:
        """The newest head of every writer that is known to be on the remote."""
        rows = self._db.execute(
            "SELECT writer, seq, body FROM head h WHERE acked = 1 AND seq ="
            " (SELECT max(seq) FROM head WHERE writer = h.writer AND acked = 1)"
        )
        return [StockHead(row[0] == SELF, row[1], row[2]) for row in rows]

    def packs(self) -> dict[ObjectId, int]:
        """Every pack that should be on the remote, and how many bytes it has at least."""
        rows = self._db.execute(
            "SELECT name, coalesce((SELECT max(offset + length) FROM packed WHERE pack = pack.id), 0) FROM pack"
            " WHERE state > 0 OR EXISTS (SELECT 1 FROM packed WHERE pack = pack.id)"
        )
        return {ObjectId(row[0]): row[1] for row in rows}

    def objects(self) -> tuple[set[ObjectId], set[ObjectId]]:
        """Digests of the manifests and of the trees that the present state needs, as objects of their own."""
        manifests = self._db.execute("SELECT digest FROM manifest WHERE digest IS NOT NULL AND remote_body IS NULL")
        trees = self._db.execute(
            "SELECT tree FROM inode WHERE tree IS NOT NULL AND tree_body IS NULL AND dirty = 0 AND nlink > 0"
        )
        return {ObjectId(row[0]) for row in manifests}, {ObjectId(row[0]) for row in trees}


def _file(row: tuple[int | None, int | None, int, int, int, bytes | None, int]) -> StockFile:
    ino, image, whole, manifest, size, digest, published = row
    return StockFile(
        None if ino is None else Inode(ino),
        None if image is None else ImageId(image),
        bool(whole),
        manifest,
        size,
        None if digest is None else ObjectId(digest),
        bool(published),
    )
