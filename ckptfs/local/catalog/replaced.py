"""Versions of files that were replaced, and are kept until what replaced them was flushed once (invariant 4).

The catalog's log may reach the disk before a new file's bytes do. After a power cut the new version then is empty or
partial, and the old one must still be there. So a row here lives from the replacement until the new image's flush;
the rows that are left after a power cut are undone.

A rename over a name keeps the inode that had the name; a file that is emptied and written anew keeps its old content in
a nameless inode of its own. Neither is anybody's to see, and neither is purged while its row is here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckptfs.ids import ImageId, Inode, Stamp
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.cuts import Cuts
from ckptfs.local.catalog.names import InodeRow, Names


@dataclass(frozen=True)
class Undone:
    """A replacement that was taken back."""

    path: bytes
    image: ImageId
    """What had replaced it, and is nobody's now."""


class Replaced:
    def __init__(self, catalog: Catalog, names: Names, contents: Contents) -> None:
        self._catalog = catalog
        self._db = catalog.db
        self._names = names
        self._contents = contents

    # Keeping; all join the caller's transaction

    def by_rename(self, parent: Inode, name: bytes, image: ImageId, old: Inode, *, is_durable: bool) -> list[Inode]:
        """*image* takes the name, unflushed, from *old*, or from what *old* itself had not durably replaced.

        Returns what is kept no longer.
        """
        with self._catalog.transaction() as db:
            dropped = self._drop("image = ? AND name IS NULL", image)  # what the file was under the name it had before
            taken = db.execute(
                "UPDATE replaced SET image = ? WHERE parent = ? AND name = ?", (image, parent, name)
            ).rowcount
            if not taken and is_durable:
                db.execute(
                    "INSERT INTO replaced (old, image, parent, name) VALUES (?, ?, ?, ?)", (old, image, parent, name)
                )
            return dropped

    def by_content(self, row: InodeRow, image: ImageId, *, is_durable: bool) -> bool:
        """The file *row* begins anew with *image*, unflushed. Whether its old image lives on for that."""
        with self._catalog.transaction() as db:
            if row.image is not None:
                moved = db.execute("UPDATE replaced SET image = ? WHERE image = ?", (image, row.image)).rowcount
                if moved or not is_durable:
                    return False
            self.by_copy(row, row.image, image)
            return True

    def by_copy(self, row: InodeRow, copy: ImageId | None, image: ImageId) -> None:
        """The file *row* is emptied in place, in *image*; what it was is in the durable *copy*, or elsewhere."""
        with self._catalog.transaction() as db:
            old = self._names.add_inode(
                mode=row.mode, uid=row.uid, gid=row.gid, now_ns=row.ctime_ns, changed=row.changed, size=row.size,
                image=copy, manifest=row.manifest, nlink=0, mtime_ns=row.mtime_ns, atime_ns=row.atime_ns,
            )  # fmt: skip
            db.execute("INSERT INTO replaced (old, image) VALUES (?, ?)", (old, image))

    def name_gone(self, parent: Inode, name: bytes) -> list[Inode]:
        """The name means nothing any more, or something that is durable. Returns what is kept no longer."""
        return self._drop("parent = ? AND name = ?", parent, name)

    # Ending

    def images(self) -> set[ImageId]:
        """Images that replaced something and were not flushed yet."""
        return {ImageId(row[0]) for row in self._db.execute("SELECT DISTINCT image FROM replaced")}

    def flushed(self, images: Iterable[ImageId]) -> list[Inode]:
        """*images* are on the disk, or nobody's any more. Returns what is kept no longer."""
        with self._catalog.transaction():
            return [old for image in images for old in self._drop("image = ?", image)]

    def keeps(self, old: Inode) -> bool:
        return self._db.execute("SELECT 1 FROM replaced WHERE old = ? LIMIT 1", (old,)).fetchone() is not None

    def undo(self, doubtful: Collection[ImageId] | None, now_ns: int, stamp: Stamp) -> list[Undone]:
        """Let every name mean what was replaced; with *doubtful* only where one of these images replaced it."""
        rows = self._db.execute("SELECT old, image, parent, name FROM replaced").fetchall()
        undone: list[Undone] = []
        with self._catalog.transaction() as db:
            for old, image, parent, name in rows:
                if doubtful is not None and image not in doubtful:
                    continue
                new = db.execute("SELECT ino FROM inode WHERE image = ?", (image,)).fetchone()
                if new is not None:
                    undone += self._undo(Inode(old), Inode(new[0]), ImageId(image), parent, name, now_ns, stamp)
            for each in undone:
                Cuts(self._catalog).leave_out(each.image)
                db.execute("DELETE FROM replaced WHERE image = ?", (each.image,))
            if doubtful is None:
                db.execute("DELETE FROM replaced")
        return undone

    # Within

    def _undo(
        self,
        old: Inode,
        new: Inode,
        image: ImageId,
        parent: Inode | None,
        name: bytes | None,
        now_ns: int,
        stamp: Stamp,
    ) -> list[Undone]:
        if parent is None or name is None:
            if self._names.inode(new).nlink == 0:
                return []
            path = self._names.path(new)
            before = self._names.inode(old)
            self._names.update_inode(
                new, image=before.image, manifest=before.manifest, size=before.size, mtime_ns=before.mtime_ns
            )
            self._names.update_inode(old, image=None, manifest=None)
            self._names.state_changed(new, stamp)
            return [Undone(path, image)]
        if self._names.find(parent, name) != new:
            return []
        path = self._names.path(parent).rstrip(b"/") + b"/" + name
        self._names.bind(parent, name, old, stamp)
        self._names.update_inode(old, nlink=self._names.inode(old).nlink + 1)
        self._names.update_inode(new, nlink=self._names.inode(new).nlink - 1)
        self._names.state_changed(old, stamp)
        self._names.touch_directory(parent, now_ns, stamp)
        return [Undone(path, image)]

    def _drop(self, which: str, *values: object) -> list[Inode]:
        """Rows for which *which* holds, an expression of ours."""
        olds = [Inode(row[0]) for row in self._db.execute(f"SELECT old FROM replaced WHERE {which}", values)]
        if olds:
            with self._catalog.transaction() as db:
                db.execute(f"DELETE FROM replaced WHERE {which}", values)
        return olds
