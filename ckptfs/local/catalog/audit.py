"""Whether the catalog agrees with itself, and what it says of images and of the remote. Reads only, and alone.

On a connection of its own that cannot write, so that a store that is in use can be looked at too. What the problems
mean and what becomes of them is `ckptfs.repair.fsck`'s; what a killed daemon leaves and the next mount clears away
(nameless inodes, images that are to be deleted) is no problem.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.head import decode_head
from ckptfs.encoding.manifest import decode_content
from ckptfs.errors import FormatError
from ckptfs.ids import ROOT_INODE, ImageId, Inode
from ckptfs.local.catalog.reader import open_reader
from ckptfs.local.catalog.stock import Stock

_DEPTH_MOST = 10_000
"""Directories above a name; more than that is a circle."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; `kind` says which repair there is, the ids on what."""

    kind: str
    what: str
    ino: Inode | None = None
    """The inode concerned; of a name, what it should mean."""
    image: ImageId | None = None
    manifest: int | None = None
    parent: Inode | None = None
    name: bytes = b""
    path: str = ""
    """In the mount, where there is one."""


@dataclass(frozen=True)
class ImageRow:
    """What the catalog says of an image that somebody needs."""

    image: ImageId
    whole: bool
    ino: Inode | None
    manifest: int | None
    size: int
    """Of the sealed file."""
    located_end: int
    """Behind the last chunk that is said to lie in it."""


class Audit:
    """A look at the catalog at *path*. A context manager. Raises StoreError when it cannot be read at all."""

    def __init__(self, path: Path) -> None:
        self._db = open_reader(path)

    def __enter__(self) -> Audit:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def problems(self) -> list[Problem]:
        """Everything that is wrong within the catalog."""
        try:
            damaged = [str(row[0]) for row in self._db.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
            if damaged:  # what rows say is not to be trusted then
                return [Problem("database", f"SQLite finds: {each}") for each in damaged]
            return [*self._names(), *self._links(), *self._contents(), *self._places(), *self._cuts(), *self._heads()]
        except sqlite3.DatabaseError as error:
            return [Problem("database", f"SQLite says: {error}")]

    # What is compared with the disk

    def images(self) -> Iterator[ImageRow]:
        """Images that a file or a cut needs."""
        for row in self._db.execute(
            "SELECT im.id, im.whole = 1, i.ino, i.manifest, i.size,"
            " coalesce((SELECT max(offset + length) FROM location WHERE image = im.id), 0)"
            " FROM image im LEFT JOIN inode i ON i.image = im.id WHERE im.whole >= 0 AND coalesce(i.nlink, 1) > 0"
            " AND (i.ino IS NOT NULL OR EXISTS (SELECT 1 FROM cut_entry WHERE image = im.id))"
        ):
            image, whole, ino, manifest, size, end = row
            yield ImageRow(ImageId(image), bool(whole), None if ino is None else Inode(ino), manifest, size or 0, end)

    def image_ids(self) -> set[ImageId]:
        """Every image that has a row, or should have one."""
        rows = self._db.execute(
            "SELECT id FROM image UNION SELECT image FROM inode UNION SELECT image FROM cut_entry"
        )
        return {ImageId(row[0]) for row in rows if row[0] is not None}

    def stock(self) -> Stock:
        """What is believed to be on the remote, in the same state."""
        return Stock(self._db)

    def setting(self, key: str) -> object:
        """As `Catalog.get_setting`."""
        row = self._db.execute("SELECT value FROM setting WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def is_published(self, manifest: int | None) -> bool:
        row = self._db.execute("SELECT digest FROM manifest WHERE id = ?", (manifest,)).fetchone()
        return row is not None and row[0] is not None

    def path(self, ino: Inode | None) -> str:
        """One path of *ino* in the mount; "" when it has none."""
        parts: list[bytes] = []
        while ino is not None and ino != ROOT_INODE and len(parts) < _DEPTH_MOST:
            row = self._db.execute("SELECT parent, name FROM dirent WHERE ino = ? LIMIT 1", (ino,)).fetchone()
            if row is None:
                return ""
            parts.append(row[1])
            ino = Inode(row[0])
        return "/" + os.fsdecode(b"/".join(reversed(parts))) if ino == ROOT_INODE else ""

    # Within

    def _names(self) -> Iterator[Problem]:
        for parent, name, ino, origin in self._db.execute(
            "SELECT d.parent, d.name, d.ino, d.origin_seq FROM dirent d LEFT JOIN inode i ON i.ino = d.ino"
            " WHERE d.ino IS NOT NULL AND i.ino IS NULL"
        ):
            path = f"{self.path(parent).rstrip('/')}/{os.fsdecode(name)}"
            kind = "name-published" if origin is not None else "name"
            yield Problem(kind, f"{path!r} means inode {ino}, which does not exist", Inode(ino), parent=Inode(parent),
                          name=name, path=path)  # fmt: skip
        for parent, name, ino in self._db.execute(
            "SELECT d.parent, d.name, d.ino FROM dirent d LEFT JOIN inode i ON i.ino = d.parent"
            f" WHERE i.ino IS NULL OR i.mode & {0o170000} <> {stat.S_IFDIR}"
        ):
            yield Problem("parent", f"the name {os.fsdecode(name)!r} is in {parent}, which is no directory",
                          None if ino is None else Inode(ino), parent=Inode(parent), name=name)  # fmt: skip
        for (ino,) in self._db.execute("SELECT DISTINCT ino FROM xattr WHERE ino NOT IN (SELECT ino FROM inode)"):
            yield Problem("xattr", f"attributes of inode {ino}, which does not exist", Inode(ino))

    def _links(self) -> Iterator[Problem]:
        """Names of each inode against its count, and directories that no way leads to from the root."""
        modes = dict(self._db.execute("SELECT ino, mode FROM inode WHERE nlink > 0"))
        links: dict[int, int] = {}
        below: dict[int, list[int]] = {}
        for parent, ino in self._db.execute("SELECT parent, ino FROM dirent WHERE ino IS NOT NULL"):
            links[ino] = links.get(ino, 0) + 1
            if stat.S_ISDIR(modes.get(ino, 0)):
                links[parent] = links.get(parent, 0) + 1  # its ..
                below.setdefault(parent, []).append(ino)
        reached, work = set[int](), [int(ROOT_INODE)]
        while work:
            ino = work.pop()
            if ino not in reached:
                reached.add(ino)
                work += below.get(ino, [])
        for ino, nlink in self._db.execute("SELECT ino, nlink FROM inode WHERE nlink > 0 ORDER BY ino"):
            is_directory = stat.S_ISDIR(modes[ino])
            names = links.get(ino, 0) + is_directory + (ino == ROOT_INODE)
            if (is_directory and ino not in reached) or not links.get(ino, ino == ROOT_INODE):
                yield Problem("unreachable", f"no name leads to inode {ino}", Inode(ino))
            elif nlink != names:
                yield Problem("nlink", f"inode {ino} has {names} links, and not {nlink}", Inode(ino),
                              path=self.path(ino))  # fmt: skip

    def _contents(self) -> Iterator[Problem]:
        for ino, image, whole, row, body, digest, size, length in self._db.execute(
            f"SELECT i.ino, i.image, im.whole, m.id, m.body, m.digest, i.size, m.size"
            " FROM inode i LEFT JOIN manifest m ON m.id = i.manifest LEFT JOIN image im ON im.id = i.image"
            f" WHERE i.nlink > 0 AND i.mode & {0o170000} = {stat.S_IFREG} AND i.manifest IS NOT NULL"
        ):
            here = image is not None and whole == 1
            path = self.path(ino)
            if row is None:
                yield Problem("manifest-here" if here else "manifest-lost", f"the chunk list of inode {ino} is gone",
                              Inode(ino), path=path)  # fmt: skip
                continue
            try:
                content = decode_content(body) if body is not None else None
                size_told = content.size if content is not None else length
            except FormatError as error:
                kind = "body-remote" if digest is not None else "manifest-here" if here else "manifest-lost"
                yield Problem(kind, f"the chunk list of inode {ino} does not decode ({error})", Inode(ino),
                              manifest=row, path=path)  # fmt: skip
                continue
            if body is None and digest is None:
                yield Problem("manifest-here" if here else "manifest-lost", f"the chunk list of inode {ino} is empty",
                              Inode(ino), manifest=row, path=path)  # fmt: skip
            elif not size == size_told == length:
                yield Problem("size", f"inode {ino} has size {size}, its chunk list {size_told}", Inode(ino),
                              manifest=row, path=path)  # fmt: skip
            elif digest is None and not here and content is not None:
                missing = sum(not self._is_anywhere(chunk.id) for chunk in content.chunks)
                if missing:
                    yield Problem("nowhere", f"{missing} of {len(content.chunks)} chunks of inode {ino} are gone",
                                  Inode(ino), manifest=row, path=path)  # fmt: skip
        for (ino,) in self._db.execute(
            f"SELECT ino FROM inode WHERE nlink > 0 AND mode & {0o170000} = {stat.S_IFREG}"
            " AND image IS NULL AND manifest IS NULL"
        ):
            yield Problem("empty", f"inode {ino} has neither bytes here nor a chunk list", Inode(ino),
                          path=self.path(ino))  # fmt: skip
        for ino, image in self._db.execute(
            "SELECT ino, image FROM inode WHERE image IS NOT NULL AND nlink > 0"
            " AND image NOT IN (SELECT id FROM image WHERE whole >= 0)"
        ):
            yield Problem("image-row", f"image {image:016x} is needed and has no row", Inode(ino), ImageId(image),
                          path=self.path(ino))  # fmt: skip

    def _is_anywhere(self, chunk: bytes) -> bool:
        (found,) = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM location WHERE chunk = ?1) OR EXISTS (SELECT 1 FROM packed WHERE chunk = ?1)",
            (chunk,),
        ).fetchone()
        return bool(found)

    def _places(self) -> Iterator[Problem]:
        for (image,) in self._db.execute(
            "SELECT DISTINCT image FROM location WHERE image NOT IN (SELECT id FROM image WHERE whole >= 0)"
        ):
            yield Problem("location", f"chunks are said to lie in image {image:016x}, which has no row",
                          image=ImageId(image))  # fmt: skip
        for (pack,) in self._db.execute("SELECT DISTINCT pack FROM packed WHERE pack NOT IN (SELECT id FROM pack)"):
            yield Problem("packed", f"chunks are said to lie in pack {pack}, which has no row", manifest=pack)

    def _cuts(self) -> Iterator[Problem]:
        for cut, count in self._db.execute(
            "SELECT cut, count(*) FROM cut_entry c WHERE"
            " (image IS NOT NULL AND image NOT IN (SELECT id FROM image WHERE whole >= 0))"
            " OR (manifest IS NOT NULL AND manifest NOT IN (SELECT id FROM manifest))"
            " OR cut NOT IN (SELECT id FROM cut) GROUP BY cut"
        ):
            yield Problem("cut", f"{count} files of cut {cut} have neither bytes nor a chunk list", manifest=cut)

    def _heads(self) -> Iterator[Problem]:
        for writer, seq, body in self._db.execute("SELECT writer, seq, body FROM head"):
            try:
                decode_head(open_object(body))
            except FormatError as error:
                yield Problem("head", f"head {seq} of writer {writer} does not decode ({error})")
