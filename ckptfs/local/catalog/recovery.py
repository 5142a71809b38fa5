"""What opening a store asks of its catalog: the root, the clock, who we are, and images that went missing."""

from __future__ import annotations

import os
import time

from ckptfs.encoding.manifest import decode_content
from ckptfs.errors import FormatError
from ckptfs.ids import ROOT_FILE_ID, ROOT_INODE, ImageId, Stamp, WriterId
from ckptfs.local.catalog.catalog import SELF, Catalog


class Recovery:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    def ensure_root(self) -> None:
        """A fresh catalog gets its root directory, owned by whoever runs this."""
        if self._db.execute("SELECT 1 FROM inode WHERE ino = ?", (ROOT_INODE,)).fetchone():
            return
        now_ns = time.time_ns()
        with self._catalog.transaction() as db:
            db.execute(
                "INSERT INTO inode (ino, file_id, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, changed)"
                " VALUES (?, ?, ?, ?, ?, 2, ?, ?, ?, 0)",
                (ROOT_INODE, ROOT_FILE_ID, 0o40755, os.getuid(), os.getgid(), now_ns, now_ns, now_ns),
            )

    def newest_stamp(self) -> Stamp:
        """No stamp in the catalog is above this one."""
        row = self._db.execute(
            "SELECT max(coalesce((SELECT max(changed) FROM inode), 0), coalesce((SELECT max(stamp) FROM dirent), 0))"
        ).fetchone()
        return Stamp(row[0])

    def own_id(self) -> WriterId | None:
        row = self._db.execute("SELECT uuid FROM writer WHERE id = ?", (SELF,)).fetchone()
        return WriterId(row[0]) if row else None

    def become(self, writer: WriterId) -> None:
        """Be *writer* from now on. What was published under the old id counts as another writer's; what was pending
        stays pending; an unacknowledged head is not put again, since its key may be somebody else's by now."""
        with self._catalog.transaction() as db:
            if self.own_id() is not None:
                (other,) = db.execute("SELECT max(id) + 1 FROM writer").fetchone()
                db.execute("UPDATE writer SET id = ? WHERE id = ?", (other, SELF))
                for table, column in (("dirent", "origin_writer"), ("head", "writer"), ("source", "writer")):
                    db.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (other, SELF))
                db.execute("DELETE FROM head WHERE acked = 0")
            db.execute("INSERT INTO writer (id, uuid) VALUES (?, ?)", (SELF, writer))

    def forget_lost_image(self, image: ImageId) -> bool:
        """The file of *image* is gone: a sealed file loses its bytes here. Returns whether an unsealed one needs it."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM location WHERE image = ?", (image,))
            db.execute("UPDATE inode SET image = NULL WHERE image = ? AND manifest IS NOT NULL", (image,))
            unsealed = db.execute("SELECT 1 FROM inode WHERE image = ?", (image,)).fetchone() is not None
            if not unsealed:
                db.execute("DELETE FROM image WHERE id = ?", (image,))
        return unsealed

    def restore_image_row(self, image: ImageId) -> bool:
        """*image* is on the disk without a row. Makes one if a file or a cut needs it; whether one does.

        A sealed file's is whole only if every chunk is said to lie in it: what is not is looked for elsewhere.
        """
        row = self._db.execute(
            "SELECT m.body FROM (SELECT manifest FROM inode WHERE image = ?1 UNION ALL SELECT manifest FROM cut_entry"
            " WHERE image = ?1) c LEFT JOIN manifest m ON m.id = c.manifest LIMIT 1",
            (image,),
        ).fetchone()
        if row is None:
            return False
        whole = row[0] is None
        if row[0] is not None:
            located = set(self._db.execute("SELECT chunk, offset FROM location WHERE image = ?", (image,)))
            try:
                content = decode_content(row[0])
                whole = located >= {(each.id, at) for each, at in zip(content.chunks, content.offsets(), strict=True)}
            except FormatError:
                pass  # damaged, too: what is located is all that is known to be right
        with self._catalog.transaction() as db:
            db.execute("INSERT INTO image (id, whole) VALUES (?, ?)", (image, int(whole)))
        return True

    def forget_unneeded_manifests(self) -> None:
        """Those that a power cut left between the end of what needed them and their own: two transactions."""
        with self._catalog.transaction() as db:
            db.execute(
                "DELETE FROM manifest WHERE NOT EXISTS (SELECT 1 FROM inode WHERE inode.manifest = manifest.id)"
                " AND NOT EXISTS (SELECT 1 FROM cut_entry WHERE cut_entry.manifest = manifest.id)"
            )

    def disown(self, image: ImageId) -> None:
        """*image* is no file's any more, and its file goes to lost+found, as that of any without a row."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM location WHERE image = ?", (image,))
            db.execute("UPDATE inode SET image = NULL WHERE image = ?", (image,))
            db.execute("DELETE FROM image WHERE id = ?", (image,))
