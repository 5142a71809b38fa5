"""Changes that only repairs make. Each is one transaction, so that a kill leaves it done or not done."""

from __future__ import annotations

from collections.abc import Collection

from ckptfs.ids import ChunkId, Inode, ObjectId, Stamp
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.names import Names
from ckptfs.local.catalog.packs import DAMAGED


class Mending:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._names = Names(catalog)

    def send_again(
        self, pack: ObjectId, chunks: Collection[ChunkId], files: Collection[Inode], stamp: Stamp
    ) -> None:
        """*pack* does not have *chunks* any more, and *files*, which are whole here, are to be published anew.

        Nobody's index is believed from now on that looks for something in that pack.
        """
        with self._catalog.transaction() as db:
            db.execute("UPDATE pack SET state = ? WHERE name = ?", (DAMAGED, pack))
            db.executemany("DELETE FROM packed WHERE chunk = ?", [(chunk,) for chunk in chunks])
            for ino in files:
                db.execute(
                    "UPDATE manifest SET digest = NULL, remote_body = NULL"
                    " WHERE id = (SELECT manifest FROM inode WHERE ino = ?)",
                    (ino,),
                )
                self._names.state_changed(ino, stamp)
