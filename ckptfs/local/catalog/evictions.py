"""Which images could be given up, since the remote has all that is in them. Who may need one is looked at elsewhere.

A file's bytes are safe when every name of it is, as it is now, in a head that was acknowledged or followed, and every
chunk lies in a pack that such a head reaches (`Packs.reached`).
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from ckptfs.ids import ImageId, Inode
from ckptfs.local.catalog.catalog import SELF, Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.reader import open_reader

_SAFE = """
SELECT i.image, i.ino, i.manifest, max(im.whole = 0 OR d.origin_writer IS NOT ?1)
FROM inode i JOIN manifest m ON m.id = i.manifest JOIN image im ON im.id = i.image JOIN dirent d ON d.ino = i.ino
WHERE m.digest IS NOT NULL AND i.image {which}
  AND NOT EXISTS (SELECT 1 FROM cut_entry WHERE image = i.image)
  AND NOT EXISTS (SELECT 1 FROM inode other WHERE other.image = i.image AND other.ino <> i.ino)
GROUP BY i.ino HAVING count(*) = count(d.origin_seq)
"""


@dataclass(frozen=True)
class Evictable:
    """An image whose file is published as it is."""

    image: ImageId
    ino: Inode
    manifest: int
    fetched: bool
    """The bytes came from the remote, or another machine saved them."""


class Evictions:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._contents = Contents(catalog)

    def look(self) -> list[Evictable]:
        """Every image whose file is published. For a worker thread: it reads many rows, on a connection of its own."""
        db = open_reader(self._catalog.path)
        try:
            return [_evictable(row) for row in db.execute(_SAFE.format(which="IS NOT NULL"), (SELF,))]
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error
        finally:
            db.close()

    def is_still(self, found: Evictable) -> bool:
        """Whether *found* is published and needed by nothing else, now."""
        rows = self._catalog.db.execute(_SAFE.format(which="= ?2"), (SELF, found.image)).fetchall()
        return [_evictable(row) for row in rows] == [found]

    def evict(self, found: Evictable) -> None:
        """The file has no bytes here any more. Delete the image's file when that is durable (invariant 2)."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE inode SET image = NULL WHERE ino = ? AND image = ?", (found.ino, found.image))
            self._contents.drop_image(found.image)


def _evictable(row: tuple[int, int, int, int]) -> Evictable:
    image, ino, manifest, fetched = row
    return Evictable(ImageId(image), Inode(ino), manifest, bool(fetched))
