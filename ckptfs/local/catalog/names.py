"""Inodes, directory entries and extended attributes: the tree as it is now, tombstones included.

Every function that changes something joins the caller's transaction or makes its own, and marks the directories whose
published trees it outdates. Semantics (which errors, which times) belong to `ckptfs.filesystem`.
"""

from __future__ import annotations

from dataclasses import dataclass
from stat import S_ISDIR
from typing import NamedTuple

from ckptfs.errors import NameMissing
from ckptfs.ids import FileId, ImageId, Inode, Stamp, new_file_id
from ckptfs.local.catalog.catalog import Catalog

CLEAN, MERGED, CHANGED = 0, 1, 2
"""Values of inode.dirty."""

_READ_ROWS = 256
"""Kept while nothing changes: one request asks for the same rows again and again."""

_INODE = (
    "inode.ino, file_id, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns, target, image, manifest,"
    " changed, dirty, expanded, (SELECT whole FROM image WHERE id = inode.image)"
)


class InodeRow(NamedTuple):
    """One row of `inode`; see schema.py for each column."""

    ino: Inode
    file_id: FileId
    mode: int
    uid: int
    gid: int
    rdev: int
    nlink: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes | None
    image: ImageId | None
    manifest: int | None
    changed: Stamp
    dirty: int
    expanded: int
    image_whole: int | None
    """`whole` of the image."""


@dataclass(frozen=True)
class DirentRow:
    """One name in a directory; `ino` None is a tombstone."""

    name: bytes
    ino: Inode | None
    stamp: Stamp


class Names:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db
        self._read: dict[Inode, InodeRow] = {}
        self._read_at = -1

    # Inodes

    def inode(self, ino: Inode) -> InodeRow:
        """Raises NameMissing when there is no such inode."""
        if self._read_at != self._catalog.version or len(self._read) > _READ_ROWS:
            self._read.clear()
            self._read_at = self._catalog.version
        found = self._read.get(ino)
        if found is not None:
            return found
        row = self._db.execute(f"SELECT {_INODE} FROM inode WHERE ino = ?", (ino,)).fetchone()
        if row is None:
            raise NameMissing(f"inode {ino} no longer exists")
        self._read[ino] = InodeRow._make(row)
        return self._read[ino]

    def move_names(self, ino: Inode) -> Inode:
        """Every name of file *ino*, its identity and its state go to a new inode; *ino* is left nameless and empty."""
        with self._catalog.transaction() as db:
            row = db.execute("SELECT file_id FROM inode WHERE ino = ?", (ino,)).fetchone()
            db.execute("UPDATE inode SET file_id = ? WHERE ino = ?", (new_file_id(), ino))
            new = Inode(self._catalog.new_inode())
            db.execute(
                "INSERT INTO inode (ino, file_id, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns,"
                " target, image, manifest, changed) SELECT ?, ?, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns,"
                " ctime_ns, target, image, manifest, changed FROM inode WHERE ino = ?",
                (new, row[0], ino),
            )
            db.execute("UPDATE dirent SET ino = ? WHERE ino = ?", (new, ino))
            db.execute("UPDATE xattr SET ino = ? WHERE ino = ?", (new, ino))
            db.execute("UPDATE inode SET nlink = 0, image = NULL, manifest = NULL WHERE ino = ?", (ino,))
            return new

    def inode_by_file_id(self, file_id: FileId) -> InodeRow | None:
        row = self._db.execute(f"SELECT {_INODE} FROM inode WHERE file_id = ?", (file_id,)).fetchone()
        return InodeRow._make(row) if row else None

    def add_inode(
        self,
        *,
        mode: int,
        uid: int,
        gid: int,
        now_ns: int,
        changed: Stamp,
        rdev: int = 0,
        size: int = 0,
        target: bytes | None = None,
        image: ImageId | None = None,
        manifest: int | None = None,
        nlink: int | None = None,
        file_id: FileId | None = None,
        mtime_ns: int | None = None,
        ctime_ns: int | None = None,
        atime_ns: int | None = None,
        expanded: bool = True,
        dirty: int = CLEAN,
    ) -> Inode:
        """A new inode without a name. A directory starts with nlink 2, anything else with 1 (or *nlink*)."""
        with self._catalog.transaction() as db:
            ino = Inode(self._catalog.new_inode())
            db.execute(
                "INSERT INTO inode (ino, file_id, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns,"
                " target, image, manifest, changed, expanded, dirty) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    ino,
                    file_id or new_file_id(),
                    mode,
                    uid,
                    gid,
                    rdev,
                    nlink if nlink is not None else (2 if S_ISDIR(mode) else 1),
                    size,
                    now_ns if atime_ns is None else atime_ns,
                    now_ns if mtime_ns is None else mtime_ns,
                    now_ns if ctime_ns is None else ctime_ns,
                    target,
                    image,
                    manifest,
                    changed,
                    int(expanded),
                    dirty,
                ),
            )
            return ino

    def update_inode(self, ino: Inode, **columns: object) -> None:
        """Set *columns* of one inode. Column names are ours, never a user's."""
        assignments = ", ".join(f"{name} = ?" for name in columns)
        with self._catalog.transaction() as db:
            db.execute(f"UPDATE inode SET {assignments} WHERE ino = ?", (*columns.values(), ino))

    def state_changed(self, ino: Inode, stamp: Stamp) -> None:
        """The content or attributes of *ino* changed here: its names are pending again, and their directories dirty."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE inode SET changed = ? WHERE ino = ?", (stamp, ino))
            db.execute("UPDATE dirent SET origin_writer = NULL, origin_seq = NULL WHERE ino = ?", (ino,))
            db.execute(
                "UPDATE inode SET dirty = 2 WHERE dirty < 2 AND ino IN (SELECT parent FROM dirent WHERE ino = ?)",
                (ino,),
            )

    def touch_directory(self, ino: Inode, now_ns: int, stamp: Stamp) -> None:
        """An entry of directory *ino* changed: mtime and ctime move, its tree is outdated, and so is its parent's."""
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE inode SET mtime_ns = ?, ctime_ns = ?, changed = ?, dirty = 2 WHERE ino = ?",
                (now_ns, now_ns, stamp, ino),
            )
            db.execute(
                "UPDATE inode SET dirty = 2 WHERE dirty < 2 AND ino ="
                " (SELECT parent FROM dirent WHERE ino = ? LIMIT 1)",
                (ino,),
            )

    def orphans(self) -> list[Inode]:
        return [Inode(row[0]) for row in self._db.execute("SELECT ino FROM inode WHERE nlink = 0")]

    def remove_inode(self, ino: Inode) -> None:
        """Forget a nameless inode, its attributes, and (for a directory) its tombstones. Raises NameMissing."""
        row = self.inode(ino)
        with self._catalog.transaction() as db:
            if S_ISDIR(row.mode):
                db.execute("INSERT OR IGNORE INTO removed_dir VALUES (?)", (row.file_id,))
                db.execute("DELETE FROM dirent WHERE parent = ?", (ino,))
                db.execute("DELETE FROM source WHERE dir = ?", (ino,))
            db.execute("DELETE FROM inode WHERE ino = ?", (ino,))
            db.execute("DELETE FROM xattr WHERE ino = ?", (ino,))

    # Directory entries

    def find(self, parent: Inode, name: bytes) -> Inode | None:
        """The inode of a live name; None for no name or a tombstone."""
        row = self._db.execute("SELECT ino FROM dirent WHERE parent = ? AND name = ?", (parent, name)).fetchone()
        return Inode(row[0]) if row and row[0] is not None else None

    def find_row(self, parent: Inode, name: bytes) -> DirentRow | None:
        row = self._db.execute(
            "SELECT name, ino, stamp FROM dirent WHERE parent = ? AND name = ?", (parent, name)
        ).fetchone()
        return DirentRow(*row) if row else None

    def child(self, parent: Inode, name: bytes) -> InodeRow:
        """The inode behind a live name in one query. Raises NameMissing."""
        row = self._db.execute(
            f"SELECT {_INODE} FROM inode WHERE ino = (SELECT ino FROM dirent WHERE parent = ? AND name = ?)",
            (parent, name),
        ).fetchone()
        if row is None:
            raise NameMissing(f"no entry {name!r} in directory {parent}")
        return InodeRow._make(row)

    def entries(self, parent: Inode) -> list[tuple[bytes, Inode]]:
        """Live entries of a directory, ordered by name."""
        return [
            (row[0], Inode(row[1]))
            for row in self._db.execute(
                "SELECT name, ino FROM dirent WHERE parent = ? AND ino IS NOT NULL ORDER BY name", (parent,)
            )
        ]

    def rows(self, parent: Inode, first: bytes, last: bytes) -> dict[bytes, InodeRow]:
        """The inodes behind the live names from *first* to *last* of a directory."""
        return {
            name: InodeRow._make(row)
            for name, *row in self._db.execute(
                f"SELECT name, {_INODE} FROM dirent JOIN inode ON inode.ino = dirent.ino"
                " WHERE parent = ? AND name BETWEEN ? AND ?",
                (parent, first, last),
            )
        }

    def is_empty(self, parent: Inode) -> bool:
        row = self._db.execute(
            "SELECT 1 FROM dirent WHERE parent = ? AND ino IS NOT NULL LIMIT 1", (parent,)
        ).fetchone()
        return row is None

    def bind(self, parent: Inode, name: bytes, ino: Inode, stamp: Stamp) -> None:
        """Let *name* mean *ino* from *stamp* on. Link counts and directory times are the caller's."""
        with self._catalog.transaction() as db:
            db.execute(
                "INSERT INTO dirent (parent, name, ino, stamp) VALUES (?, ?, ?, ?) ON CONFLICT (parent, name) DO UPDATE"
                " SET ino = excluded.ino, stamp = excluded.stamp, origin_writer = NULL, origin_seq = NULL",
                (parent, name, ino, stamp),
            )

    def unbind(self, parent: Inode, name: bytes, stamp: Stamp, *, tombstone: bool) -> None:
        """Remove a name; with *tombstone* remember that it was removed at *stamp*, for other writers."""
        with self._catalog.transaction() as db:
            if tombstone:
                db.execute(
                    "UPDATE dirent SET ino = NULL, stamp = ?, origin_writer = NULL, origin_seq = NULL"
                    " WHERE parent = ? AND name = ?",
                    (stamp, parent, name),
                )
            else:
                db.execute("DELETE FROM dirent WHERE parent = ? AND name = ?", (parent, name))

    def parents(self, ino: Inode) -> list[tuple[Inode, bytes]]:
        """Every live name of *ino*: (directory, name). A directory has one, the root none."""
        return [
            (Inode(row[0]), row[1]) for row in self._db.execute("SELECT parent, name FROM dirent WHERE ino = ?", (ino,))
        ]

    def path(self, ino: Inode) -> bytes:
        """One absolute path of *ino* inside the mount; b"/" for the root. Raises NameMissing when it has none."""
        parts: list[bytes] = []
        while ino != 1:
            found = self.parents(ino)
            if not found:
                raise NameMissing(f"inode {ino} has no name")
            ino, name = found[0]
            parts.append(name)
        return b"/" + b"/".join(reversed(parts))

    def ancestors(self, directory: Inode) -> list[Inode]:
        """*directory*'s parent, its parent ... up to the root; empty for the root or a nameless directory."""
        found: list[Inode] = []
        while directory != 1:
            parents = self.parents(directory)
            if not parents:
                break
            directory = parents[0][0]
            found.append(directory)
        return found

    # Extended attributes

    def xattrs(self, ino: Inode) -> dict[bytes, bytes]:
        return dict(self._db.execute("SELECT name, value FROM xattr WHERE ino = ? ORDER BY name", (ino,)).fetchall())

    def xattr(self, ino: Inode, name: bytes) -> bytes | None:
        row = self._db.execute("SELECT value FROM xattr WHERE ino = ? AND name = ?", (ino, name)).fetchone()
        return row[0] if row else None

    def set_xattr(self, ino: Inode, name: bytes, value: bytes) -> None:
        with self._catalog.transaction() as db:
            db.execute("INSERT OR REPLACE INTO xattr (ino, name, value) VALUES (?, ?, ?)", (ino, name, value))

    def remove_xattr(self, ino: Inode, name: bytes) -> bool:
        """Whether there was one."""
        with self._catalog.transaction() as db:
            return db.execute("DELETE FROM xattr WHERE ino = ? AND name = ?", (ino, name)).rowcount > 0
