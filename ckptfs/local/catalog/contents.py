"""Images, manifests and locations: which bytes a file version consists of, and where they lie on this disk.

An image is needed while an inode or a cut refers to it; a manifest likewise. What nobody needs is dropped here, rows
first; deleting the file in images/ is `ckptfs.local.images`' work, after the rows are durably gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptfs.ids import ChunkId, ImageId, Inode, ObjectId
from ckptfs.local.catalog.catalog import Catalog, batches

_DROPPED = -1
"""image.whole of one that nobody needs, while its file is not deleted yet."""


@dataclass(frozen=True)
class ManifestRow:
    """One row of `manifest`; see schema.py."""

    id: int
    body: bytes | None
    size: int
    digest: ObjectId | None
    remote_body: bytes | None


@dataclass(frozen=True)
class Location:
    """Where a chunk lies on this disk: bytes [offset, offset + length) of an image."""

    image: ImageId
    offset: int
    length: int


class Contents:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db

    # Images

    def add_image(self, image: ImageId, *, whole: bool) -> None:
        with self._catalog.transaction() as db:
            db.execute("INSERT INTO image (id, whole) VALUES (?, ?)", (image, int(whole)))

    def image_is_whole(self, image: ImageId) -> bool:
        row = self._db.execute("SELECT whole FROM image WHERE id = ?", (image,)).fetchone()
        return bool(row and row[0] == 1)

    def set_image_whole(self, image: ImageId) -> None:
        with self._catalog.transaction() as db:
            db.execute("UPDATE image SET whole = 1 WHERE id = ?", (image,))
            db.execute("DELETE FROM reclaimed WHERE image = ?", (image,))

    def images(self) -> set[ImageId]:
        """Every image that has a row, dropped ones too."""
        return {ImageId(row[0]) for row in self._db.execute("SELECT id FROM image")}

    def image_is_needed(self, image: ImageId) -> bool:
        """Whether an inode or a cut refers to it, or another image lacks what only this one has."""
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM inode WHERE image = ?) OR EXISTS (SELECT 1 FROM cut_entry WHERE image = ?)",
            (image, image),
        ).fetchone()
        return bool(row[0]) or self.others_need(image)

    def others_need(self, image: ImageId) -> bool:
        """Whether another image gave up a chunk that only *image* has."""
        row = self._db.execute(
            "SELECT 1 FROM location l JOIN reclaimed r ON r.chunk = l.chunk WHERE l.image = ?1 AND r.image <> ?1"
            " AND NOT EXISTS (SELECT 1 FROM location o WHERE o.chunk = l.chunk AND o.image <> ?1) LIMIT 1",
            (image,),
        ).fetchone()
        return row is not None

    def image_in_cut(self, image: ImageId) -> bool:
        row = self._db.execute("SELECT 1 FROM cut_entry WHERE image = ? LIMIT 1", (image,)).fetchone()
        return row is not None

    def move_cuts_to_image(self, old: ImageId, new: ImageId) -> None:
        """Cuts that refer to *old* take *new*, a copy of it (a rescue before *old* is written again)."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE cut_entry SET image = ? WHERE image = ?", (new, old))

    def drop_image(self, image: ImageId) -> None:
        """Nobody needs *image*: its locations go now, and the row once its file is deleted (`forget_images`).

        Until then the row tells an image that is to be deleted from one that was lost, if we are killed in between.
        """
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM location WHERE image = ?", (image,))
            db.execute("DELETE FROM reclaimed WHERE image = ?", (image,))
            db.execute("UPDATE image SET whole = ? WHERE id = ?", (_DROPPED, image))

    def forget_images(self, images: Iterable[ImageId]) -> None:
        """The files of *images*, which were dropped, are deleted."""
        with self._catalog.transaction() as db:
            db.executemany("DELETE FROM image WHERE id = ? AND whole = ?", [(image, _DROPPED) for image in images])

    def poison(self, image: ImageId) -> None:
        """A flush of *image* failed; this is remembered as long as it has a row."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE image SET poisoned = 1 WHERE id = ?", (image,))

    def poisoned(self) -> list[ImageId]:
        return [ImageId(row[0]) for row in self._db.execute("SELECT id FROM image WHERE poisoned = 1")]

    # Manifests

    def add_manifest(
        self,
        *,
        size: int,
        body: bytes | None,
        digest: ObjectId | None = None,
        remote_body: bytes | None = None,
    ) -> int:
        with self._catalog.transaction() as db:
            cursor = db.execute(
                "INSERT INTO manifest (size, body, digest, remote_body) VALUES (?, ?, ?, ?)",
                (size, body, digest, remote_body),
            )
            return cursor.lastrowid or 0

    def manifest(self, manifest: int) -> ManifestRow:
        row = self._db.execute(
            "SELECT id, body, size, digest, remote_body FROM manifest WHERE id = ?", (manifest,)
        ).fetchone()
        return ManifestRow(*row)

    def has_manifest(self, manifest: int) -> bool:
        return self._db.execute("SELECT 1 FROM manifest WHERE id = ?", (manifest,)).fetchone() is not None

    def manifest_by_digest(self, digest: ObjectId) -> int | None:
        row = self._db.execute("SELECT id FROM manifest WHERE digest = ? LIMIT 1", (digest,)).fetchone()
        return int(row[0]) if row else None

    def set_manifest_body(self, manifest: int, body: bytes) -> None:
        with self._catalog.transaction() as db:
            db.execute("UPDATE manifest SET body = ? WHERE id = ?", (body, manifest))

    def set_manifest_published(self, manifest: int, digest: ObjectId, remote_body: bytes | None) -> None:
        with self._catalog.transaction() as db:
            db.execute(
                "UPDATE manifest SET digest = ?, remote_body = ? WHERE id = ?", (digest, remote_body, manifest)
            )

    def drop_unneeded_manifests(self, manifests: Iterable[int]) -> None:
        """Delete those of *manifests* that no inode and no cut refers to."""
        with self._catalog.transaction() as db:
            db.executemany(
                "DELETE FROM manifest WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM inode WHERE manifest = ?1)"
                " AND NOT EXISTS (SELECT 1 FROM cut_entry WHERE manifest = ?1)",
                [(manifest,) for manifest in manifests],
            )

    def sealed(self, image: ImageId, manifest: int) -> None:
        """*image* was sealed as *manifest*: cuts taken before that learn of it."""
        with self._catalog.transaction() as db:
            db.execute("UPDATE cut_entry SET manifest = ? WHERE image = ? AND manifest IS NULL", (manifest, image))

    def is_sealed_as(self, image: ImageId, manifest: int) -> bool:
        """Whether a file or a cut has *image* with the content *manifest*: then nobody writes it."""
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM inode WHERE image = ?1 AND manifest = ?2)"
            " OR EXISTS (SELECT 1 FROM cut_entry WHERE image = ?1 AND manifest = ?2)",
            (image, manifest),
        ).fetchone()
        return bool(row[0])

    def needs_seal(self, image: ImageId) -> bool:
        """Whether a named file or a cut waits for *image* to be sealed."""
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM inode WHERE image = ?1 AND manifest IS NULL AND nlink > 0)"
            " OR EXISTS (SELECT 1 FROM cut_entry WHERE image = ?1 AND manifest IS NULL)",
            (image,),
        ).fetchone()
        return bool(row[0])

    def inode_of_image(self, image: ImageId) -> Inode | None:
        """The unsealed file that *image* is."""
        row = self._db.execute("SELECT ino FROM inode WHERE image = ? AND manifest IS NULL", (image,)).fetchone()
        return Inode(row[0]) if row else None

    def unsealed_images(self) -> list[ImageId]:
        """Every image that waits to be sealed."""
        return [
            ImageId(row[0])
            for row in self._db.execute(
                "SELECT image FROM inode WHERE manifest IS NULL AND image IS NOT NULL AND nlink > 0"
                " UNION SELECT image FROM cut_entry WHERE manifest IS NULL AND image IS NOT NULL"
            )
        ]

    # Locations

    def add_locations(self, image: ImageId, chunks: Sequence[tuple[ChunkId, int, int]]) -> None:
        """Record (chunk, offset, length) of *image*. Invariant 1: hashed there and flushed before."""
        with self._catalog.transaction() as db:
            db.executemany(
                "INSERT OR IGNORE INTO location (chunk, image, offset, length) VALUES (?, ?, ?, ?)",
                [(chunk, image, offset, length) for chunk, offset, length in chunks],
            )

    def copy_locations(self, source: ImageId, target: ImageId) -> None:
        """*target* is a flushed copy of *source*."""
        with self._catalog.transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO location (chunk, image, offset, length)"
                " SELECT chunk, ?, offset, length FROM location WHERE image = ?",
                (target, source),
            )

    def drop_location(self, chunk: ChunkId, location: Location) -> None:
        """The bytes there turned out to be something else."""
        with self._catalog.transaction() as db:
            db.execute(
                "DELETE FROM location WHERE chunk = ? AND image = ? AND offset = ?",
                (chunk, location.image, location.offset),
            )

    def has_image(self, image: ImageId) -> bool:
        """Whether *image* is there and was not dropped."""
        row = self._db.execute("SELECT 1 FROM image WHERE id = ? AND whole <> ?", (image, _DROPPED)).fetchone()
        return row is not None

    def drop_locations(self, image: ImageId) -> None:
        with self._catalog.transaction() as db:
            db.execute("DELETE FROM location WHERE image = ?", (image,))

    def locations(self, chunk: ChunkId) -> list[Location]:
        return [
            Location(ImageId(row[0]), row[1], row[2])
            for row in self._db.execute("SELECT image, offset, length FROM location WHERE chunk = ?", (chunk,))
        ]

    def located(self, chunks: Iterable[ChunkId], *, besides: ImageId | None) -> set[ChunkId]:
        """Those of *chunks* that lie in some image, not counting *besides*."""
        found: set[ChunkId] = set()
        for batch in batches(chunks):
            marks = ",".join("?" * len(batch))
            rows = self._db.execute(
                f"SELECT DISTINCT chunk FROM location WHERE chunk IN ({marks}) AND image IS NOT ?", (*batch, besides)
            )
            found.update(ChunkId(row[0]) for row in rows)
        return found

    def locations_in(self, image: ImageId) -> list[tuple[int, int]]:
        """(offset, length) of every located chunk of *image*, in order."""
        return self._db.execute(
            "SELECT offset, length FROM location WHERE image = ? ORDER BY offset", (image,)
        ).fetchall()
