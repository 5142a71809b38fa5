"""How one directory's rows are copied into a cut. Which directories, and when, belongs to `cuts` and above."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from stat import S_ISDIR, S_ISREG
from typing import Any, Protocol

from ckptfs.encoding.tree import Entry, encode_entry
from ckptfs.ids import FileId, ImageId, Inode, ObjectId, Stamp


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


_COLUMNS = (
    "d.name, d.ino, d.stamp, i.file_id, i.mode, i.uid, i.gid, i.rdev, i.size, i.mtime_ns, i.ctime_ns, i.atime_ns,"
    " i.changed, i.target, i.image, i.manifest, i.tree, i.tree_body, i.expanded, m.digest"
)


@dataclass(frozen=True)
class _Row:
    """A directory entry joined with its inode and manifest; all but the first three are NULL for a tombstone."""

    name: bytes
    ino: Inode | None
    stamp: Stamp
    file_id: FileId
    mode: int
    uid: int
    gid: int
    rdev: int
    size: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int
    changed: Stamp
    target: bytes | None
    image: ImageId | None
    manifest: int | None
    tree: ObjectId | None
    tree_body: bytes | None
    expanded: int
    digest: ObjectId | None


class CutCopier:
    """Copies one directory after another into a cut."""

    def __init__(
        self,
        cut: int,
        execute: Callable[..., Any],
        unfinished: Collection[Inode],
        held: Collection[Inode],
        status: Callable[[Inode, ImageId], ImageStatus],
        provisional: Callable[[Inode], Provisional | None],
    ) -> None:
        self._cut = cut
        self._execute = execute
        self._unfinished = unfinished
        self._held = held
        self._status = status
        self._provisional = provisional
        self.copied: set[Inode] = set()
        self.outdated: set[Inode] = set()
        """Copied directories in which something was left out."""

    def copy(self, directory: Inode) -> list[Inode]:
        """Copy one directory; returns directories in it that were never published."""
        self._execute(
            "INSERT INTO cut_dir (cut, dir, file_id, tree, tree_body)"
            " SELECT ?, ino, file_id, tree, tree_body FROM inode WHERE ino = ?",
            (self._cut, directory),
        )
        xattrs: dict[int, list[tuple[bytes, bytes]]] = {}
        for ino, name, value in self._execute(
            "SELECT x.ino, x.name, x.value FROM xattr x WHERE x.ino IN (SELECT ino FROM dirent WHERE parent = ?)"
            " ORDER BY x.name",
            (directory,),
        ):
            xattrs.setdefault(ino, []).append((name, value))
        rows = self._execute(
            f"SELECT {_COLUMNS} FROM dirent d LEFT JOIN inode i ON i.ino = d.ino LEFT JOIN manifest m"
            " ON m.id = i.manifest WHERE d.parent = ?",
            (directory,),
        ).fetchall()
        new: list[Inode] = []
        for row in rows:
            self._copy_entry(directory, _Row(*row), tuple(xattrs.get(row[1], ())), new)
        return new

    def _copy_entry(
        self, directory: Inode, row: _Row, xattrs: tuple[tuple[bytes, bytes], ...], new: list[Inode]
    ) -> None:
        if row.ino is None:
            self._add(directory, row, None, None, Entry(row.name, row.stamp))
            return
        image, manifest = row.image, row.manifest
        size, mtime_ns, ctime_ns = row.size, row.mtime_ns, row.ctime_ns
        tree: tuple[ObjectId | None, bytes | None] = (None, None)
        if S_ISDIR(row.mode):
            tree = self._subtree(row)
            if row.ino in self._held:
                self.outdated.add(directory)
                if tree[0] is None:
                    return
            elif tree[0] is None:
                new.append(row.ino)
        elif S_ISREG(row.mode):
            if row.ino in self._unfinished and manifest is None:
                seal = self._provisional(row.ino)
                if seal is None:
                    self.outdated.add(directory)
                    self._add(directory, row, None, None, None)
                    return
                image, manifest, size = seal.image, seal.manifest, seal.size
                mtime_ns, ctime_ns = seal.mtime_ns, max(ctime_ns, seal.ctime_ns)
            elif manifest is None:
                now = self._status(row.ino, row.image or ImageId(0))
                size, mtime_ns, ctime_ns = now.size, now.mtime_ns, max(ctime_ns, now.ctime_ns)
            elif row.digest is not None:
                image = None  # published already: its bytes are not needed here
        entry = Entry(
            name=row.name,
            stamp=row.stamp,
            file_id=row.file_id,
            mode=row.mode,
            uid=row.uid,
            gid=row.gid,
            rdev=row.rdev,
            size=size,
            mtime_ns=mtime_ns,
            ctime_ns=ctime_ns,
            atime_ns=row.atime_ns,
            changed=row.changed,
            target=row.target,
            xattrs=xattrs,
            tree=tree[0],
            tree_body=tree[1],
        )
        self._add(directory, row, image, manifest, entry)

    def _subtree(self, row: _Row) -> tuple[ObjectId | None, bytes | None]:
        """What was published of a directory. One that was not looked at yet is what its newest source says."""
        if not row.expanded:
            source = self._execute(
                "SELECT digest, body FROM source WHERE dir = ? ORDER BY merged, seq DESC LIMIT 1", (row.ino,)
            ).fetchone()
            if source is not None:
                return source[0], source[1]
        return row.tree, row.tree_body

    def _add(
        self, directory: Inode, row: _Row, image: ImageId | None, manifest: int | None, entry: Entry | None
    ) -> None:
        self._execute(
            "INSERT INTO cut_entry (cut, dir, name, ino, image, manifest, stamp, changed, entry)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._cut,
                directory,
                row.name,
                row.ino,
                image,
                manifest,
                row.stamp,
                row.changed or 0,
                encode_entry(entry) if entry is not None else None,
            ),
        )
