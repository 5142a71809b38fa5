"""Changes that only repairs make. Each is one transaction, so that a kill leaves it done or not done."""

from __future__ import annotations

from collections.abc import Collection
from stat import S_ISDIR

from ckptfs.errors import NameMissing
from ckptfs.ids import ROOT_INODE, ChunkId, ImageId, Inode, ObjectId, Stamp
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.names import CHANGED, Names
from ckptfs.local.catalog.packs import DAMAGED, DOUBTED

LOST_NAMES = b"lost+found"
"""The directory in the mount's root for files that no name leads to."""


class Mending:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._names = Names(catalog)

    def send_again(
        self,
        pack: ObjectId,
        chunks: Collection[ChunkId],
        lost: Collection[ChunkId],
        files: Collection[Inode],
        stamp: Stamp,
        *,
        is_doubted: bool,
    ) -> None:
        """*pack* does not have *chunks* and *lost* any more, and *files*, which are whole here, are published anew.

        What is *lost*, since it is not here either, is still looked for there. The pack stays in doubt, or else is
        looked at no more; in both cases nobody's index is believed that looks there for what is here.
        """
        with self._catalog.transaction() as db:
            db.execute("UPDATE pack SET state = ? WHERE name = ?", (DOUBTED if is_doubted else DAMAGED, pack))
            db.executemany("DELETE FROM packed WHERE chunk = ?", [(chunk,) for chunk in chunks])
            db.executemany("DELETE FROM packed WHERE base = ?", [(chunk,) for chunk in (*chunks, *lost)])
            for ino in files:
                self.publish_file(ino, stamp)

    def publish_file(self, ino: Inode, stamp: Stamp) -> None:
        """The file, which is whole here, is published anew, with where its chunks lie now."""
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE manifest SET digest = NULL, remote_body = NULL"
                " WHERE id = (SELECT manifest FROM inode WHERE ino = ?)",
                (ino,),
            )
            self._names.state_changed(ino, stamp)

    def publish_directory(self, ino: Inode, stamp: Stamp) -> None:
        """What the directory says now is published anew, though no name in it changed."""
        with self._catalog.transaction() as db:
            self._names.state_changed(ino, stamp)
            db.execute("UPDATE inode SET dirty = ? WHERE ino = ?", (CHANGED, ino))

    # Names

    def drop_name(self, parent: Inode, name: bytes, stamp: Stamp) -> None:
        """A name that leads nowhere, or lies nowhere, goes."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM dirent WHERE parent = ? AND name = ?", (parent, name))
            db.execute("UPDATE inode SET dirty = ?, changed = ? WHERE ino = ?", (CHANGED, stamp, parent))

    def drop_xattrs(self, ino: Inode) -> None:
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM xattr WHERE ino = ? AND ino NOT IN (SELECT ino FROM inode)", (ino,))

    def reconnect(self, ino: Inode, now_ns: int, stamp: Stamp) -> bytes:
        """Give *ino*, which no way leads to, a name in `lost+found` of the root; the path."""
        with self._catalog.transaction() as db:
            lost = self._names.find(ROOT_INODE, LOST_NAMES)
            if lost is None:
                lost = self._names.add_inode(mode=0o40700, uid=0, gid=0, now_ns=now_ns, changed=stamp)
                self._names.bind(ROOT_INODE, LOST_NAMES, lost, stamp)
            name = b"#%d" % ino
            db.execute("DELETE FROM dirent WHERE ino = ?", (ino,))
            self._names.bind(lost, name, ino, stamp)
            for directory in (lost, ROOT_INODE):
                self._names.touch_directory(directory, now_ns, stamp)
            for each in (ino, lost, ROOT_INODE):
                self.count_links(each)
            return b"/" + LOST_NAMES + b"/" + name

    def count_links(self, ino: Inode) -> None:
        """Set the link count to what the names say."""
        try:
            row = self._names.inode(ino)
        except NameMissing:
            return
        names = len(self._names.parents(ino))
        if S_ISDIR(row.mode):
            names = 2 + sum(S_ISDIR(self._names.inode(child).mode) for _, child in self._names.entries(ino))
        self._names.update_inode(ino, nlink=names)

    # Contents

    def unseal(self, ino: Inode, stamp: Stamp) -> None:
        """The file has all its bytes here, and is to be cut and hashed, and published, again."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM location WHERE image = (SELECT image FROM inode WHERE ino = ?)", (ino,))
            self._names.state_changed(ino, stamp)
            db.execute("UPDATE inode SET manifest = NULL WHERE ino = ? AND image IS NOT NULL", (ino,))

    def forget_body(self, manifest: int) -> None:
        """The chunk list is fetched from the remote when it is needed, and where its chunks lie is learned again."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE manifest SET body = NULL WHERE id = ? AND digest IS NOT NULL", (manifest,))

    def drop_needless_manifests(self) -> None:
        """Chunk lists that no file and no cut has."""
        with self._catalog.transaction() as db:
            db.execute(
                "DELETE FROM manifest WHERE id NOT IN (SELECT manifest FROM inode WHERE manifest IS NOT NULL)"
                " AND id NOT IN (SELECT manifest FROM cut_entry WHERE manifest IS NOT NULL)"
            )

    def set_size(self, ino: Inode, manifest: int, size: int) -> None:
        with self._catalog.transaction() as db:
            db.execute("UPDATE inode SET size = ? WHERE ino = ? AND manifest = ?", (size, ino, manifest))
            db.execute("UPDATE manifest SET size = ? WHERE id = ?", (size, manifest))

    def drop_locations_behind(self, image: ImageId, size: int) -> None:
        """Nothing lies in *image* past *size*."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM location WHERE image = ? AND offset + length > ?", (image, size))

    def drop_packed(self, pack: int) -> None:
        """Nobody knows which pack row *pack* was: where its chunks lie is learned again from manifests (`scrub`)."""
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM packed WHERE pack = ? AND pack NOT IN (SELECT id FROM pack)", (pack,))

    def abandon_cut(self, cut: int) -> None:
        """What the cut had is cut again, as it is now. A head that was made of it already stays: it was whole then."""
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE inode SET dirty = ? WHERE ino IN (SELECT dir FROM cut_dir WHERE cut = ?)", (CHANGED, cut)
            )
            for table, column in (("cut_entry", "cut"), ("cut_dir", "cut"), ("cut", "id")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (cut,))

    def rebuild_indexes(self) -> None:
        """Make SQLite's own indexes anew from the tables."""
        with self._catalog.transaction() as db:
            db.execute("REINDEX")
