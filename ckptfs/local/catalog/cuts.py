"""Cuts: the state of the mount at one moment, copied row by row and kept until it is published.

A cut copies every directory that changed since the last one, and their ancestors up to the root, in one transaction;
`cut_entry` rows keep the images and manifests that they name alive. There is at most one cut that waits ("pending") and
one that is on its way ("publishing"); a newer cut takes the directories of a pending one over, as they are now. When to
cut is `replica.settle`'s to say, what becomes of a cut `replica.publish`'s. See docs/decisions/cuts.md.

All functions run on the event loop's thread and join the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.head import decode_head
from ckptfs.encoding.tree import Entry
from ckptfs.ids import ROOT_INODE, FileId, ImageId, Inode, ObjectId, Stamp, WriterId
from ckptfs.local.catalog.catalog import SELF, Catalog
from ckptfs.local.catalog.cutcopy import IS_DIRECTORY, CutCopier, ImageStatus, Provisional
from ckptfs.local.catalog.names import CHANGED, CLEAN, MERGED

Subtree = tuple[ObjectId, bytes | None]
"""A tree's digest, and its canonical JSON where it is inlined in its parent."""


@dataclass(frozen=True)
class CutRow:
    """One row of `cut`; see schema.py."""

    id: int
    taken_ns: int
    stamp: Stamp
    incomplete: bool
    vector: Mapping[WriterId, int]


@dataclass(frozen=True)
class CutDirectory:
    """A directory of a cut, and what was published of it before."""

    ino: Inode
    file_id: FileId
    tree: ObjectId | None
    tree_body: bytes | None


@dataclass(frozen=True)
class CutEntry:
    """A name in a directory of a cut."""

    name: bytes
    ino: Inode | None
    """None: a tombstone."""
    manifest: int | None
    """Regular files: manifest row."""
    stamp: Stamp
    entry: Entry | None
    """None: the file was unfinished; what the directory's earlier tree says of it stays."""
    file_id: FileId | None = None
    """None: a tombstone."""


@dataclass(frozen=True)
class CutFile:
    """A file version of a cut that is still to be published."""

    manifest: int
    image: ImageId | None
    path: bytes
    """In the mount, without a slash at the start."""


@dataclass
class Unneeded:
    """What the removal of cut rows may have left without a reason to exist: to be looked at, not to be trusted."""

    images: set[ImageId] = field(default_factory=set)
    manifests: set[int] = field(default_factory=set)


_ENTRY = (
    "name, ino, manifest, stamp, kept, file_id, changed, mode, uid, gid, rdev, size, mtime_ns, ctime_ns, atime_ns,"
    " target, tree, tree_body, xattrs"
)

_DIRTY = "SELECT ino FROM inode WHERE dirty > 0 AND nlink > 0 AND expanded = 1"
"""Of a directory that was not looked at yet the rows here are not all; what others say of it is published as it is."""


class Cuts:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    # Taking

    def take(
        self,
        *,
        taken_ns: int,
        stamp: Stamp,
        incomplete: bool,
        vector: Mapping[WriterId, int],
        unfinished: Collection[Inode],
        held: Collection[Inode],
        status: Callable[[Inode, ImageId], ImageStatus],
        provisional: Callable[[Inode], Provisional | None],
    ) -> tuple[int, Unneeded]:
        """Copy what changed; returns the cut's id and what the cut that it replaces has left.

        Files in *unfinished* appear with their provisional manifest, or as they were published before, or not at all.
        Directories in *held* and all below them stay as they were published before, or away. What was left out keeps
        its directory dirty. *vector* is what of other writers the tree has merged by now; the cut's is lower where
        something of theirs was left out.
        """
        with self._catalog.transaction() as db:
            pending = self.pending()
            wanted = {Inode(row[0]) for row in db.execute(_DIRTY)}
            if pending is not None:
                wanted.update(self.directories(pending.id))
            unneeded = self._drop(pending.id) if pending is not None else Unneeded()
            cut = db.execute(
                "INSERT INTO cut (taken_ns, stamp, incomplete, vector) VALUES (?, ?, ?, ?)",
                (taken_ns, stamp, int(incomplete), _encode_vector(vector)),
            ).lastrowid
            assert cut is not None
            held = set(held) - {ROOT_INODE}
            copier = CutCopier(cut, db, unfinished, held, status, provisional)
            directories = self._with_ancestors(wanted, held)
            if not any(directories.values()):
                directories[ROOT_INODE] = True  # every head has a root
            left = self._copy(copier, directories)
            kept = copier.outdated | {ino for ino in left if ino not in copier.copied}
            db.executemany("UPDATE inode SET dirty = ? WHERE ino = ?", [(CLEAN, ino) for ino in copier.copied - kept])
            db.executemany("UPDATE inode SET dirty = ? WHERE ino = ?", [(CHANGED, ino) for ino in kept])
            if kept:
                honest = self._without_left_out(vector, kept)
                db.execute("UPDATE cut SET vector = ? WHERE id = ?", (_encode_vector(honest), cut))
            return cut, unneeded

    def _without_left_out(self, vector: Mapping[WriterId, int], kept: Collection[Inode]) -> dict[WriterId, int]:
        """*vector* without what came from other writers into directories of which the cut shows an earlier state.

        Others take a name that a head's vector covers and its trees lack for removed.
        """
        published = self._db.execute(
            "SELECT body FROM head WHERE writer = ? AND acked = 1 ORDER BY seq DESC LIMIT 1", (SELF,)
        ).fetchone()
        before = decode_head(open_object(published[0])).vector if published else {}
        honest = dict(vector)
        for (writer,) in self._db.execute(
            "WITH RECURSIVE below (ino) AS (SELECT value FROM json_each(?) UNION SELECT d.ino FROM dirent d"
            " JOIN below ON d.parent = below.ino JOIN inode i ON i.ino = d.ino WHERE i.mode & 61440 = 16384)"
            " SELECT DISTINCT uuid FROM below JOIN dirent d ON d.parent = below.ino"
            " JOIN writer ON writer.id = d.origin_writer WHERE d.origin_writer != ?",
            (json.dumps(list(kept)), SELF),
        ).fetchall():
            seq = min(honest.get(WriterId(writer), 0), before.get(WriterId(writer), 0))
            if seq:
                honest[WriterId(writer)] = seq
            else:
                honest.pop(WriterId(writer), None)
        return honest

    def _with_ancestors(self, wanted: Iterable[Inode], held: Collection[Inode]) -> dict[Inode, bool]:
        """Directories to copy (True) and to leave dirty because they are held (False); nameless ones are left out."""
        chosen: dict[Inode, bool] = {}
        for ino in wanted:
            chain = [ino]
            while chain[-1] != ROOT_INODE:
                row = self._db.execute("SELECT parent FROM dirent WHERE ino = ?", (chain[-1],)).fetchone()
                if row is None:
                    break
                chain.append(Inode(row[0]))
            if chain[-1] != ROOT_INODE:
                continue
            first_held = max((at for at, each in enumerate(chain) if each in held), default=-1)
            for each in chain[: first_held + 1]:
                chosen[each] = False
            for each in chain[first_held + 1 :]:
                chosen[each] = True
        return chosen

    def _copy(self, copier: CutCopier, directories: Mapping[Inode, bool]) -> set[Inode]:
        """Copy the chosen directories and new ones found in them; returns those left dirty."""
        work = [ino for ino, copied in directories.items() if copied]
        for ino in work:
            copier.copied.add(ino)
        while work:
            for child in copier.copy(work.pop()):
                if child not in copier.copied:
                    copier.copied.add(child)
                    work.append(child)
        return {ino for ino, copied in directories.items() if not copied}

    # Looking

    def pending(self) -> CutRow | None:
        """The newest cut, while nobody has begun to publish it."""
        return self._cut(0)

    def publishing(self) -> CutRow | None:
        return self._cut(1)

    def _cut(self, publishing: int) -> CutRow | None:
        row = self._db.execute(
            "SELECT id, taken_ns, stamp, incomplete, vector FROM cut WHERE publishing = ?", (publishing,)
        ).fetchone()
        return CutRow(row[0], row[1], Stamp(row[2]), bool(row[3]), _decode_vector(row[4])) if row else None

    def begin(self, cut: int) -> None:
        """Pin *cut*: it is published before any newer one."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE cut SET publishing = 1 WHERE id = ?", (cut,))

    def first_unsealed(self, cut: int) -> ImageId | None:
        """An image of *cut* that is not sealed yet; None when all are."""
        row = self._db.execute(
            "SELECT image FROM cut_entry WHERE cut = ? AND image IS NOT NULL AND manifest IS NULL LIMIT 1", (cut,)
        ).fetchone()
        return ImageId(row[0]) if row else None

    def directories(self, cut: int) -> dict[Inode, CutDirectory]:
        return {
            Inode(row[0]): CutDirectory(Inode(row[0]), *row[1:])
            for row in self._db.execute("SELECT dir, file_id, tree, tree_body FROM cut_dir WHERE cut = ?", (cut,))
        }

    def entries(self, cut: int, directory: Inode, after: bytes = b"", limit: int = -1) -> list[CutEntry]:
        """What the cut has in *directory*, ordered by name; at most *limit* names after *after*."""
        return [
            entry_of_row(row)
            for row in self._db.execute(
                f"SELECT {_ENTRY} FROM cut_entry WHERE cut = ? AND dir = ? AND name > ? ORDER BY name LIMIT ?",
                (cut, directory, after, limit),
            )
        ]

    def unpublished_bytes(self, cut: int) -> int:
        """Bytes of the cut's files that are not published, each version once."""
        row = self._db.execute(
            "SELECT CAST(total(size) AS INTEGER) FROM manifest WHERE digest IS NULL AND id IN"
            " (SELECT manifest FROM cut_entry WHERE cut = ?)",
            (cut,),
        ).fetchone()
        return int(row[0])

    def files(self, cut: int, directory: Inode, path: bytes) -> list[tuple[bytes, Inode, CutFile | None]]:
        """(name, inode, file) of what matters for uploading in *directory*, which is at *path*: its unpublished files
        by name, then directories, the one that was changed last first: with a backlog it is the one that will not be
        rotated away."""
        return [
            (row[0], Inode(row[1]), CutFile(row[2], row[3], path + row[0]) if row[2] is not None else None)
            for row in self._db.execute(
                "SELECT c.name, c.ino, c.manifest, c.image FROM cut_entry c LEFT JOIN manifest m ON m.id = c.manifest"
                " WHERE c.cut = ? AND c.dir = ? AND c.kept = 0 AND ("
                " (c.manifest IS NOT NULL AND m.digest IS NULL)"
                " OR EXISTS (SELECT 1 FROM cut_dir WHERE cut = c.cut AND dir = c.ino))"
                " ORDER BY c.manifest IS NULL, CASE WHEN c.manifest IS NULL THEN -c.mtime_ns END, c.name",
                (cut, directory),
            )
        ]

    def small(
        self, cut: int, most_bytes: int, *, limit: int
    ) -> Iterator[tuple[Inode, ImageId | None, bytes | None]]:
        """(directory, image, target) of links, and of files of at most *most_bytes* that *cut* publishes; the first
        *limit* of them."""
        return iter(
            self._db.execute(
                "SELECT dir, image, target FROM cut_entry WHERE cut = ? AND kept = 0 AND (target IS NOT NULL"
                " OR (image IS NOT NULL AND size > 0 AND size <= ?)) LIMIT ?",
                (cut, most_bytes, limit),
            )
        )

    def image_of(self, manifest: int) -> ImageId | None:
        """An image that a cut still pins for *manifest*; another one after a rescue."""
        row = self._db.execute(
            "SELECT image FROM cut_entry WHERE manifest = ? AND image IS NOT NULL LIMIT 1", (manifest,)
        ).fetchone()
        return ImageId(row[0]) if row else None

    def changed(self) -> list[Inode]:
        """Directories that were changed here since they were last in a cut."""
        return [
            Inode(row[0]) for row in self._db.execute("SELECT ino FROM inode WHERE dirty = ? AND nlink > 0", (CHANGED,))
        ]

    def unpublished(self) -> tuple[int, int, list[ImageId]]:
        """Files that no acknowledged head has as they are: how many, bytes of the sealed, images of the unsealed."""
        files, size, images = 0, 0, []
        for manifest, image, length, _ in self._db.execute(
            "SELECT DISTINCT i.manifest, i.image, coalesce(m.size, 0), i.ino"
            " FROM dirent d JOIN inode i ON i.ino = d.ino LEFT JOIN manifest m ON m.id = i.manifest"
            " WHERE d.origin_seq IS NULL AND d.ino IS NOT NULL AND (i.manifest IS NOT NULL OR i.image IS NOT NULL)"
        ):
            files += 1
            if manifest is None:
                images.append(ImageId(image))
            else:
                size += length
        return files, size, images

    # Ending

    def leave_out(self, image: ImageId) -> None:
        """*image* will never be sealed (its flush failed, it is gone): its files stay as they were published before."""
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE inode SET dirty = ? WHERE nlink > 0 AND ino IN"
                " (SELECT dir FROM cut_entry WHERE image = ? AND manifest IS NULL)",
                (CHANGED, image),
            )
            db.execute("UPDATE cut_entry SET kept = 1, image = NULL WHERE image = ? AND manifest IS NULL", (image,))

    def leave_out_removed(
        self, cut: int, directory: Inode, may_name: Callable[[int, bytes, Collection[Inode]], bool]
    ) -> Unneeded | None:
        """Take *directory* out of *cut* when it was removed here since and nobody ever saw it; None when it stays.

        Its bytes need not be sent then. Only a directory whose parent was published before, or lies in the root, goes:
        a part of what is new as a whole must not be missing from it while the rest is still being removed. And only
        one that no marker of the cut can name: *may_name*, asked with the cut, its name and the directories below it,
        says so, and no file or link beside or above it changed after it got its name and before the next directory
        beside it did.
        """
        with self._catalog.transaction() as db:
            row = db.execute(
                "SELECT e.dir, e.stamp, e.name FROM cut_dir d"
                " JOIN cut_entry e ON e.cut = d.cut AND e.ino = d.dir"
                " JOIN cut_dir parent ON parent.cut = d.cut AND parent.dir = e.dir"
                " WHERE d.cut = ?1 AND d.dir = ?2 AND d.tree IS NULL AND (e.dir = ?3 OR parent.tree IS NOT NULL)"
                " AND NOT EXISTS (SELECT 1 FROM dirent WHERE ino = ?2)",
                (cut, directory, ROOT_INODE),
            ).fetchone()
            if row is None or self._may_be_named(cut, *row[:2]):
                return None
            below = self._below(cut, directory)
            if may_name(cut, row[2], below):
                return None
            gone = Unneeded()
            for each in below:
                for image, manifest in db.execute(
                    "SELECT image, manifest FROM cut_entry WHERE cut = ? AND dir = ?", (cut, each)
                ):
                    if image is not None:
                        gone.images.add(ImageId(image))
                    if manifest is not None:
                        gone.manifests.add(manifest)
                db.execute("DELETE FROM cut_entry WHERE cut = ? AND dir = ?", (cut, each))
                db.execute("DELETE FROM cut_dir WHERE cut = ? AND dir = ?", (cut, each))
            db.execute("DELETE FROM cut_entry WHERE cut = ? AND ino = ?", (cut, directory))
            return gone

    def _below(self, cut: int, directory: Inode) -> set[Inode]:
        """*directory* and every directory below it in *cut*."""
        rows = self._db.execute(
            "WITH RECURSIVE below (ino) AS (VALUES (?2) UNION SELECT c.ino FROM below JOIN cut_entry c"
            f" ON c.cut = ?1 AND c.dir = below.ino WHERE c.ino IS NOT NULL AND c.{IS_DIRECTORY}) SELECT ino FROM below",
            (cut, directory),
        )
        return {Inode(row[0]) for row in rows}

    def _may_be_named(self, cut: int, parent: Inode, stamp: Stamp) -> bool:
        """Whether something that the cut has may say that the directory named in *parent* at *stamp* is the newest."""
        (following,) = self._db.execute(
            f"SELECT min(stamp) FROM cut_entry WHERE cut = ? AND dir = ? AND stamp > ? AND {IS_DIRECTORY}",
            (cut, parent, stamp),
        ).fetchone()
        return bool(
            self._db.execute(
                "WITH RECURSIVE above (ino) AS"
                " (VALUES (?2) UNION SELECT d.parent FROM above JOIN dirent d ON d.ino = above.ino)"
                " SELECT EXISTS (SELECT 1 FROM above JOIN cut_entry c ON c.cut = ?1 AND c.dir = above.ino"
                f" WHERE c.ino IS NOT NULL AND NOT c.{IS_DIRECTORY} AND max(c.stamp, c.changed) > ?3"
                " AND (?4 IS NULL OR max(c.stamp, c.changed) < ?4))",
                (cut, parent, stamp, following),
            ).fetchone()[0]
        )

    def refuse(self, manifest: int) -> list[ImageId]:
        """The bytes of *manifest* are not what was sealed: whoever has it is unsealed; returns images to seal again.

        A file without an image here is left out of its cut.
        """
        with self._catalog.transaction() as db:
            images = [
                ImageId(row[0])
                for row in db.execute(
                    "SELECT image FROM cut_entry WHERE manifest = ?1 AND image IS NOT NULL"
                    " UNION SELECT image FROM inode WHERE manifest = ?1 AND image IS NOT NULL",
                    (manifest,),
                )
            ]
            db.executemany("DELETE FROM location WHERE image = ?", [(image,) for image in images])
            db.execute("UPDATE cut_entry SET kept = 1 WHERE manifest = ? AND image IS NULL", (manifest,))
            db.execute("UPDATE cut_entry SET manifest = NULL WHERE manifest = ?", (manifest,))
            db.execute("UPDATE inode SET manifest = NULL WHERE manifest = ? AND image IS NOT NULL", (manifest,))
            db.execute(
                "DELETE FROM manifest WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM inode WHERE manifest = ?1)",
                (manifest,),
            )
            return images

    def forget_manifests(self, cut: int) -> None:
        """Nothing is known any more of the manifests that were put for *cut*: they are to be put again."""
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE manifest SET digest = NULL, remote_body = NULL WHERE id IN"
                " (SELECT manifest FROM cut_entry WHERE cut = ? AND image IS NOT NULL)",
                (cut,),
            )

    def finish(self, cut: int, seq: int, trees: Mapping[Inode, Subtree] | None) -> Unneeded:
        """Own head *seq*, which is acknowledged, has *cut*; *trees* are its directories' trees.

        Names that are still as the cut had them are published. A directory that was merged since keeps the tree that
        the merge gave it. With *trees* None they are not known any more: its directories count as differing.
        """
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE dirent SET origin_writer = ?1, origin_seq = ?2 WHERE origin_seq IS NULL AND EXISTS ("
                " SELECT 1 FROM cut_entry c WHERE c.cut = ?3 AND c.dir = dirent.parent AND c.name = dirent.name"
                " AND c.kept = 0 AND c.stamp = dirent.stamp AND c.ino IS dirent.ino"
                " AND (c.ino IS NULL OR c.changed = (SELECT changed FROM inode WHERE ino = c.ino)))",
                (SELF, seq, cut),
            )
            pending = self.pending()
            if trees is None:
                db.execute(
                    "UPDATE inode SET dirty = ?1 WHERE dirty < ?1 AND ino IN (SELECT dir FROM cut_dir WHERE cut = ?2)",
                    (MERGED, cut),
                )
                unneeded = self._abandon(pending.id) if pending is not None else Unneeded()
            else:
                unneeded = Unneeded()
                for ino, tree in trees.items():
                    self._set_tree(cut, ino, tree, pending)
                if pending is not None:
                    self._tell_pending(cut, pending, trees)
            gone = self._drop(cut)
            unneeded.images |= gone.images
            unneeded.manifests |= gone.manifests
            return unneeded

    def _set_tree(self, cut: int, ino: Inode, tree: Subtree, pending: CutRow | None) -> None:
        db = self._db
        updated = db.execute(
            "UPDATE inode SET tree = ?1, tree_body = ?2 WHERE ino = ?3"
            " AND tree IS (SELECT tree FROM cut_dir WHERE cut = ?4 AND dir = ?3)",
            (*tree, ino, cut),
        )
        if updated.rowcount and pending is not None:
            db.execute(
                "UPDATE cut_dir SET tree = ?1, tree_body = ?2 WHERE cut = ?3 AND dir = ?4"
                " AND tree IS (SELECT tree FROM cut_dir WHERE cut = ?5 AND dir = ?4)",
                (*tree, pending.id, ino, cut),
            )

    def _tell_pending(self, cut: int, pending: CutRow, trees: Mapping[Inode, Subtree]) -> None:
        """A directory that did not change between the two cuts is in the newer one as it was published before it."""
        db = self._db
        rows = db.execute(
            "SELECT c.dir, c.name, c.ino FROM cut_entry c JOIN cut_dir d ON d.cut = ?1 AND d.dir = c.ino"
            " WHERE c.cut = ?2 AND c.tree IS d.tree AND NOT EXISTS"
            " (SELECT 1 FROM cut_dir WHERE cut = ?2 AND dir = c.ino)",
            (cut, pending.id),
        ).fetchall()
        db.executemany(
            "UPDATE cut_entry SET tree = ?, tree_body = ? WHERE cut = ? AND dir = ? AND name = ?",
            [(*trees[ino], pending.id, directory, name) for directory, name, ino in rows if ino in trees],
        )
        db.execute(  # files that were published now: their bytes are not needed here any more
            "UPDATE cut_entry SET image = NULL WHERE cut = ? AND image IS NOT NULL AND manifest IN"
            " (SELECT manifest FROM cut_entry WHERE cut = ? AND kept = 0 AND manifest IS NOT NULL)",
            (pending.id, cut),
        )

    def _abandon(self, cut: int) -> Unneeded:
        self._db.execute(
            "UPDATE inode SET dirty = ? WHERE ino IN (SELECT dir FROM cut_dir WHERE cut = ?)", (CHANGED, cut)
        )
        return self._drop(cut)

    def _drop(self, cut: int) -> Unneeded:
        db = self._db
        rows = db.execute("SELECT DISTINCT image, manifest FROM cut_entry WHERE cut = ?", (cut,)).fetchall()
        db.execute("DELETE FROM cut_entry WHERE cut = ?", (cut,))
        db.execute("DELETE FROM cut_dir WHERE cut = ?", (cut,))
        db.execute("DELETE FROM cut WHERE id = ?", (cut,))
        return Unneeded(
            {ImageId(image) for image, _ in rows if image is not None},
            {manifest for _, manifest in rows if manifest is not None},
        )


def _encode_vector(vector: Mapping[WriterId, int]) -> bytes:
    return json.dumps({writer.hex(): seq for writer, seq in vector.items()}, sort_keys=True).encode()


def _decode_vector(data: bytes) -> dict[WriterId, int]:
    return {WriterId(bytes.fromhex(writer)): seq for writer, seq in json.loads(data).items()}


def entry_of_row(row: tuple[Any, ...]) -> CutEntry:
    """The entry of a row with the columns of `_ENTRY`."""
    name, ino, manifest, stamp, kept, file_id, changed, *columns = row
    if kept:
        return CutEntry(name, ino, manifest, stamp, None, file_id)
    if ino is None:
        return CutEntry(name, None, None, stamp, Entry(name, stamp))
    mode, uid, gid, rdev, size, mtime_ns, ctime_ns, atime_ns, target, tree, tree_body, xattrs = columns
    entry = Entry(
        name=name,
        stamp=stamp,
        file_id=file_id,
        mode=mode,
        uid=uid,
        gid=gid,
        rdev=rdev,
        size=size,
        mtime_ns=mtime_ns,
        ctime_ns=ctime_ns,
        atime_ns=atime_ns,
        changed=changed,
        target=target,
        xattrs=tuple((bytes.fromhex(key), bytes.fromhex(value)) for key, value in json.loads(xattrs or b"[]")),
        tree=tree,
        tree_body=tree_body,
    )
    return CutEntry(name, ino, manifest, stamp, entry, file_id)
