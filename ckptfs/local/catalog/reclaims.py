"""Bytes that are on this disk twice: which image gives up its copy of a chunk, and who needs that of another.

Of two files with a chunk in common the one that was changed earlier gives up its range, and reads from the other. What
an image gave up is a row of `reclaimed`, until its bytes are here again: an image that has the last copy of such a
chunk is needed (`Contents.image_is_needed`), also when its own file is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.ids import ImageId, Inode, Stamp
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.reader import open_reader

_TWICE = """
FROM location l WHERE l.image = {image} AND EXISTS (
    SELECT 1 FROM location o JOIN inode newer ON newer.image = o.image
    WHERE o.chunk = l.chunk AND o.image <> l.image AND newer.manifest IS NOT NULL AND newer.nlink > 0
      AND newer.changed > {changed} AND newer.changed <= {until})
"""
_ALONE = """
    NOT EXISTS (SELECT 1 FROM inode other WHERE other.image = i.image AND other.ino <> i.ino)
    AND NOT EXISTS (SELECT 1 FROM cut_entry WHERE image = i.image)
"""


@dataclass(frozen=True)
class Twice:
    """A sealed file's image, some of which a newer file has too."""

    image: ImageId
    ino: Inode
    changed: Stamp
    bytes: int


class Reclaims:
    """Reads and changes rows; the bytes are `ckptfs.reclaiming`'s business."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    def look(self, until: Stamp, *, published: bool) -> list[Twice]:
        """Images with bytes that a file changed not after *until* has too, the most first.

        *published*: only of files that the remote has. For a worker thread: it reads many rows, on its own connection.
        """
        db = open_reader(self._catalog.path)
        try:
            twice = _TWICE.format(image="i.image", changed="i.changed", until="?1")
            rows = db.execute(
                f"SELECT * FROM (SELECT i.image, i.ino, i.changed, (SELECT coalesce(sum(l.length), 0) {twice}) AS bytes"
                " FROM inode i JOIN manifest m ON m.id = i.manifest JOIN image im ON im.id = i.image"
                f" WHERE im.whole >= 0 AND i.nlink > 0 AND (m.digest IS NOT NULL OR NOT ?2) AND {_ALONE})"
                " WHERE bytes > 0 ORDER BY bytes DESC",
                (until, published),
            ).fetchall()
        finally:
            db.close()
        return [Twice(ImageId(image), Inode(ino), Stamp(changed), size) for image, ino, changed, size in rows]

    def sparse(self) -> list[tuple[ImageId, Inode | None, int]]:
        """Images that are not whole, and those that no file has any more but somebody needs: what may be freed of them.

        (image, its file, bytes that are located in it). For a worker thread.
        """
        db = open_reader(self._catalog.path)
        try:
            rows = db.execute(
                "SELECT im.id, i.ino, (SELECT coalesce(sum(length), 0) FROM location WHERE image = im.id)"
                " FROM image im LEFT JOIN inode i ON i.image = im.id"
                " WHERE NOT EXISTS (SELECT 1 FROM cut_entry WHERE image = im.id)"
                " AND ((im.whole = 0 AND i.manifest IS NOT NULL) OR (im.whole >= 0 AND i.ino IS NULL))"
            ).fetchall()
        finally:
            db.close()
        return [(ImageId(image), None if ino is None else Inode(ino), size) for image, ino, size in rows]

    def give_up(self, found: Twice, until: Stamp, start: int, most: int) -> int | None:
        """Up to *most* rows of what *found* has twice from *start* on go.

        Where to go on; None when that was all, or the file is not as it was found.
        """
        still = self._db.execute(
            "SELECT 1 FROM inode i"
            f" WHERE i.ino = ? AND i.image = ? AND i.changed = ? AND i.manifest IS NOT NULL AND {_ALONE}",
            (found.ino, found.image, found.changed),
        ).fetchone()
        if still is None:
            return None
        twice = _TWICE.format(image="?1", changed="?2", until="?3")
        rows = self._db.execute(
            f"SELECT l.chunk, l.offset {twice} AND l.offset >= ?4 ORDER BY l.offset LIMIT ?5",
            (found.image, found.changed, until, start, most),
        ).fetchall()
        if rows:
            with self._catalog.transaction() as db:
                db.execute("UPDATE image SET whole = 0 WHERE id = ?", (found.image,))
                db.executemany(
                    "INSERT OR IGNORE INTO reclaimed (chunk, image) VALUES (?, ?)",
                    [(chunk, found.image) for chunk, _ in rows],
                )
                db.executemany(
                    "DELETE FROM location WHERE image = ? AND chunk = ? AND offset = ?",
                    [(found.image, chunk, offset) for chunk, offset in rows],
                )
        return rows[-1][1] + 1 if len(rows) == most else None

    def drop_unneeded(self, donor: ImageId) -> None:
        """*donor* is no file's any more: rows of chunks that nobody lacks, or that are elsewhere too, go."""
        with self._catalog.transaction() as db:
            db.execute(
                "DELETE FROM location WHERE image = ?1 AND ("
                " NOT EXISTS (SELECT 1 FROM reclaimed r WHERE r.chunk = location.chunk AND r.image <> ?1)"
                " OR EXISTS (SELECT 1 FROM location o WHERE o.chunk = location.chunk AND o.image <> ?1))",
                (donor,),
            )

    def is_donor(self, image: ImageId) -> bool:
        """Whether chunks are located in *image*, and neither a file nor a cut has it."""
        row = self._db.execute(
            "SELECT 1 FROM image WHERE id = ?1 AND whole >= 0 AND EXISTS (SELECT 1 FROM location WHERE image = ?1)"
            " AND NOT EXISTS (SELECT 1 FROM inode WHERE image = ?1)"
            " AND NOT EXISTS (SELECT 1 FROM cut_entry WHERE image = ?1)",
            (image,),
        ).fetchone()
        return row is not None
