"""Others' trees in the catalog: which tree each writer has for a directory, and rows as merging reads and writes them.

`source` is also the list of what is still to be done: a row with merged = 0 of an expanded directory waits to be
merged, also after a restart. The rules of merging belong to `ckptfs.replica.merge`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.ids import FileId, ImageId, Inode, ObjectId, Stamp
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.names import CHANGED, CLEAN

Origin = tuple[int, int]
"""(writer row, sequence) of the head by which an entry, as it is, was published or learned."""


@dataclass(frozen=True)
class SourceRow:
    """One row of `source`; see schema.py."""

    dir: Inode
    writer: int
    seq: int
    digest: ObjectId
    body: bytes | None
    merged: bool


@dataclass(frozen=True)
class BoundRow:
    """One row of `dirent` with its origin; `ino` None is a tombstone, `origin` None is pending here."""

    name: bytes
    ino: Inode | None
    stamp: Stamp
    origin: Origin | None


@dataclass(frozen=True)
class TreeState:
    """What is known of a directory's published tree."""

    digest: ObjectId | None
    body: bytes | None
    dirty: int
    expanded: bool


@dataclass(frozen=True)
class HeldRow:
    """A name and what it means, as `encoding.tree.Entry` would say it."""

    name: bytes
    ino: Inode | None
    stamp: Stamp
    file_id: FileId | None
    version: tuple[object, ...]
    """Comparable with `Entry.version`; meaningless for a tombstone."""
    tree: ObjectId | None
    dirty: int | None


class Sources:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    # Rows of source

    def put(self, directory: Inode, writer: int, seq: int, digest: ObjectId, body: bytes | None) -> bool:
        """*writer*'s head *seq* has this tree for *directory*. Whether it is another tree than the one before."""
        with self._catalog.transaction() as db:
            row = db.execute("SELECT digest FROM source WHERE dir = ? AND writer = ?", (directory, writer)).fetchone()
            if row and row[0] == digest:
                db.execute("UPDATE source SET seq = max(seq, ?) WHERE dir = ? AND writer = ?", (seq, directory, writer))
                return False
            db.execute(
                "INSERT OR REPLACE INTO source (dir, writer, seq, digest, body, merged) VALUES (?, ?, ?, ?, ?, 0)",
                (directory, writer, seq, digest, body),
            )
            return True

    def of(self, directory: Inode) -> list[SourceRow]:
        """Every writer's tree of *directory*."""
        rows = self._db.execute(
            "SELECT dir, writer, seq, digest, body, merged FROM source WHERE dir = ? ORDER BY writer", (directory,)
        )
        return [_source(row) for row in rows]

    def get(self, directory: Inode, writer: int) -> SourceRow | None:
        row = self._db.execute(
            "SELECT dir, writer, seq, digest, body, merged FROM source WHERE dir = ? AND writer = ?",
            (directory, writer),
        ).fetchone()
        return _source(row) if row else None

    def waiting(self, limit: int) -> list[SourceRow]:
        """Trees that wait to be merged into expanded directories."""
        rows = self._db.execute(
            "SELECT dir, writer, seq, digest, source.body, merged FROM source JOIN inode ON ino = dir"
            " WHERE merged = 0 AND expanded = 1 LIMIT ?",
            (limit,),
        )
        return [_source(row) for row in rows]

    def set_merged(self, directory: Inode, writer: int, digest: ObjectId) -> None:
        """The tree *digest* was merged; no effect when another one came meanwhile."""
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE source SET merged = 1 WHERE dir = ? AND writer = ? AND digest = ?", (directory, writer, digest)
            )

    def drop(self, directory: Inode, writer: int) -> None:
        """*writer* no longer has *directory*."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM source WHERE dir = ? AND writer = ?", (directory, writer))

    def forget_directory(self, directory: Inode) -> None:
        """*directory* is removed: its sources and tombstones go."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM source WHERE dir = ?", (directory,))
            db.execute("DELETE FROM dirent WHERE parent = ?", (directory,))

    def was_here(self, directory: FileId) -> bool:
        """Whether this store ever had the directory."""
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM inode WHERE file_id = ?1) OR EXISTS (SELECT 1 FROM removed_dir WHERE"
            " file_id = ?1)",
            (directory,),
        ).fetchone()
        return bool(row[0])

    # Rows of dirent

    def row(self, directory: Inode, name: bytes) -> BoundRow | None:
        row = self._db.execute(
            "SELECT name, ino, stamp, origin_writer, origin_seq FROM dirent WHERE parent = ? AND name = ?",
            (directory, name),
        ).fetchone()
        return _bound(row) if row else None

    def is_pending(self, ino: Inode) -> bool:
        """Whether a name of *ino*, or its state, was changed here and is not published."""
        row = self._db.execute("SELECT 1 FROM dirent WHERE ino = ? AND origin_seq IS NULL LIMIT 1", (ino,)).fetchone()
        return row is not None

    def rows(self, directory: Inode) -> list[BoundRow]:
        """Everything that *directory* says of names, tombstones included, ordered by name."""
        rows = self._db.execute(
            "SELECT name, ino, stamp, origin_writer, origin_seq FROM dirent WHERE parent = ? ORDER BY name",
            (directory,),
        )
        return [_bound(row) for row in rows]

    def set_row(self, directory: Inode, name: bytes, ino: Inode | None, stamp: Stamp, origin: Origin | None) -> None:
        writer, seq = origin or (None, None)
        with self._catalog.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO dirent (parent, name, ino, stamp, origin_writer, origin_seq)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (directory, name, ino, stamp, writer, seq),
            )

    def remove_row(self, directory: Inode, name: bytes) -> None:
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM dirent WHERE parent = ? AND name = ?", (directory, name))

    # Published trees of directories

    def tree(self, directory: Inode) -> TreeState | None:
        """None when the inode is gone."""
        row = self._db.execute(
            "SELECT tree, tree_body, dirty, expanded FROM inode WHERE ino = ?", (directory,)
        ).fetchone()
        return TreeState(row[0], row[1], row[2], bool(row[3])) if row else None

    def holds(self, directory: Inode) -> list[HeldRow]:
        """Everything that *directory* says, in order of names, to be compared with a tree."""
        xattrs: dict[int, list[tuple[bytes, bytes]]] = {}
        for ino, name, value in self._db.execute(
            "SELECT ino, name, value FROM xattr WHERE ino IN (SELECT ino FROM dirent WHERE parent = ?)"
            " ORDER BY ino, name",
            (directory,),
        ):
            xattrs.setdefault(ino, []).append((name, value))
        rows = self._db.execute(
            "SELECT name, dirent.ino, stamp, file_id, changed, ctime_ns, mtime_ns, inode.size, mode, uid, gid,"
            " coalesce(digest, x''), coalesce(target, x''), tree, dirty"
            " FROM dirent LEFT JOIN inode USING (ino) LEFT JOIN manifest ON manifest.id = inode.manifest"
            " WHERE parent = ? ORDER BY name",
            (directory,),
        )
        return [
            HeldRow(row[0], row[1], row[2], row[3], (*row[4:13], tuple(xattrs.get(row[1], ()))), row[13], row[14])
            for row in rows
        ]

    def set_tree(self, directory: Inode, digest: ObjectId, body: bytes | None) -> None:
        """*directory* holds exactly what tree *digest* says."""
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE inode SET tree = ?, tree_body = ?, dirty = ? WHERE ino = ?", (digest, body, CLEAN, directory)
            )

    def set_expanded(self, directory: Inode, expanded: bool) -> None:
        with self._catalog.transaction() as db:
            db.execute("UPDATE inode SET expanded = ? WHERE ino = ?", (int(expanded), directory))

    def outdate(self, directory: Inode, *, changed: bool = False) -> None:
        """*directory* differs from its published tree since a merge, and so do all above it.

        With *changed* it holds something that is to be published, as if it had been made here.
        """
        with self._catalog.transaction() as db:
            if changed:
                db.execute("UPDATE inode SET dirty = ? WHERE ino = ?", (CHANGED, directory))
            db.execute(
                "WITH RECURSIVE above (ino) AS (SELECT ? UNION SELECT parent FROM dirent JOIN above USING (ino))"
                " UPDATE inode SET dirty = 1 WHERE dirty = 0 AND ino IN (SELECT ino FROM above)",
                (directory,),
            )

    def replace_xattrs(self, ino: Inode, xattrs: tuple[tuple[bytes, bytes], ...]) -> None:
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM xattr WHERE ino = ?", (ino,))
            db.executemany("INSERT INTO xattr (ino, name, value) VALUES (?, ?, ?)", [(ino, *pair) for pair in xattrs])

    def content_of(self, ino: Inode) -> tuple[ImageId | None, int | None, ObjectId | None]:
        """(image, manifest row, the manifest's digest where it was published)."""
        row = self._db.execute(
            "SELECT image, manifest, digest FROM inode LEFT JOIN manifest ON manifest.id = inode.manifest"
            " WHERE ino = ?",
            (ino,),
        ).fetchone()
        return (row[0], row[1], row[2]) if row else (None, None, None)


def _source(row: tuple[int, int, int, bytes, bytes | None, int]) -> SourceRow:
    return SourceRow(Inode(row[0]), row[1], row[2], ObjectId(row[3]), row[4], bool(row[5]))


def _bound(row: tuple[bytes, int | None, int, int | None, int | None]) -> BoundRow:
    origin = (row[3], row[4]) if row[3] is not None and row[4] is not None else None
    return BoundRow(row[0], None if row[1] is None else Inode(row[1]), Stamp(row[2]), origin)
