"""How one directory's rows are copied into a cut. Which directories, and when, belongs to `cuts` and above.

SQLite copies the rows (2 µs each: a directory of 10,000 entries holds the loop up for 20 ms); Python looks at the few
that need more: files that are not sealed, subdirectories, extended attributes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from ckptfs.ids import ImageId, Inode


@dataclass(frozen=True)
class ImageStatus:
    """What an unsealed file's image says of it at this moment."""

    size: int
    mtime_ns: int
    ctime_ns: int


class Provisional(Protocol):
    """The last seal of a file that is still open for writing: a log (`replica.logs`)."""

    @property
    def image(self) -> ImageId: ...
    @property
    def manifest(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mtime_ns(self) -> int: ...
    @property
    def ctime_ns(self) -> int: ...


_COPY = """
INSERT INTO cut_entry (cut, dir, name, ino, image, manifest, stamp, changed, kept, file_id, mode, uid, gid, rdev, size,
    mtime_ns, ctime_ns, atime_ns, target, tree, tree_body)
SELECT ?1, d.parent, d.name, d.ino, CASE WHEN m.digest IS NULL THEN i.image END, i.manifest, d.stamp,
    coalesce(i.changed, 0), 0, i.file_id, i.mode, i.uid, i.gid, i.rdev, i.size, i.mtime_ns, i.ctime_ns, i.atime_ns,
    i.target, i.tree, i.tree_body
FROM dirent d LEFT JOIN inode i ON i.ino = d.ino LEFT JOIN manifest m ON m.id = i.manifest WHERE d.parent = ?2
"""

IS_DIRECTORY = "mode & 61440 = 16384"
"""S_ISDIR in SQL."""


class CutCopier:
    """Copies one directory after another into a cut."""

    def __init__(
        self,
        cut: int,
        db: sqlite3.Connection,
        unfinished: Collection[Inode],
        held: Collection[Inode],
        status: Callable[[Inode, ImageId], ImageStatus],
        provisional: Callable[[Inode], Provisional | None],
    ) -> None:
        self._cut = cut
        self._db = db
        self._unfinished = unfinished
        self._held = held
        self._status = status
        self._provisional = provisional
        self.copied: set[Inode] = set()
        self.outdated: set[Inode] = set()
        """Copied directories in which something was left out."""

    def copy(self, directory: Inode) -> list[Inode]:
        """Copy one directory; returns directories in it that were never published."""
        self._db.execute(
            "INSERT INTO cut_dir (cut, dir, file_id, tree, tree_body)"
            " SELECT ?, ino, file_id, tree, tree_body FROM inode WHERE ino = ?",
            (self._cut, directory),
        )
        self._db.execute(_COPY, (self._cut, directory))
        self._copy_xattrs(directory)
        self._copy_unsealed(directory)
        return self._subdirectories(directory)

    def _copy_xattrs(self, directory: Inode) -> None:
        found: dict[bytes, list[tuple[str, str]]] = {}
        for name, key, value in self._db.execute(
            "SELECT d.name, x.name, x.value FROM dirent d JOIN xattr x ON x.ino = d.ino WHERE d.parent = ?"
            " ORDER BY d.name, x.name",
            (directory,),
        ):
            found.setdefault(name, []).append((key.hex(), value.hex()))
        for name, xattrs in found.items():
            self._update(directory, name, xattrs=json.dumps(xattrs).encode())

    def _copy_unsealed(self, directory: Inode) -> None:
        """Files whose content is in their image alone: as they are at this moment, or as their log was last sealed."""
        rows = self._db.execute(
            "SELECT name, ino, image, ctime_ns FROM cut_entry"
            " WHERE cut = ? AND dir = ? AND image IS NOT NULL AND manifest IS NULL",
            (self._cut, directory),
        ).fetchall()
        found: list[tuple[object, ...]] = []
        for name, ino, image, ctime_ns in rows:
            seal = self._provisional(ino) if ino in self._unfinished else None
            if seal is not None:
                times = (seal.size, seal.mtime_ns, max(ctime_ns, seal.ctime_ns))
                found.append((seal.image, seal.manifest, *times, self._cut, directory, name))
            elif ino in self._unfinished:
                self.outdated.add(directory)
                self._update(directory, name, kept=1, image=None)
            else:
                now = self._status(ino, image)
                times = (now.size, now.mtime_ns, max(ctime_ns, now.ctime_ns))
                found.append((image, None, *times, self._cut, directory, name))
        self._db.executemany(
            "UPDATE cut_entry SET image = ?, manifest = ?, size = ?, mtime_ns = ?, ctime_ns = ?"
            " WHERE cut = ? AND dir = ? AND name = ?",
            found,
        )

    def _subdirectories(self, directory: Inode) -> list[Inode]:
        new: list[Inode] = []
        rows = self._db.execute(
            "SELECT c.name, c.ino, c.tree IS NOT NULL, i.expanded FROM cut_entry c JOIN inode i ON i.ino = c.ino"
            f" WHERE c.cut = ? AND c.dir = ? AND c.{IS_DIRECTORY}",
            (self._cut, directory),
        ).fetchall()
        for name, ino, published, expanded in rows:
            if not expanded:  # nobody looked at it yet: it is what its newest source says
                source = self._db.execute(
                    "SELECT digest, body FROM source WHERE dir = ? ORDER BY merged, seq DESC LIMIT 1", (ino,)
                ).fetchone()
                if source is not None:
                    self._update(directory, name, tree=source[0], tree_body=source[1])
                    continue
            if ino in self._held:
                self.outdated.add(directory)
                if not published:
                    self._db.execute(
                        "DELETE FROM cut_entry WHERE cut = ? AND dir = ? AND name = ?", (self._cut, directory, name)
                    )
            elif not published:
                new.append(ino)
        return new

    def _update(self, directory: Inode, name: bytes, **columns: object) -> None:
        """Set *columns* of one entry. Column names are ours."""
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self._db.execute(
            f"UPDATE cut_entry SET {assignments} WHERE cut = ? AND dir = ? AND name = ?",
            (*columns.values(), self._cut, directory, name),
        )
