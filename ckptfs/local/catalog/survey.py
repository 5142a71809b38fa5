"""What files consist of and where it lies, for who looks at a store as a whole. Reads only, on its own connection.

So that a daemon has no work with it, and a store that nobody has mounted can be looked at too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptfs.errors import NameMissing
from ckptfs.ids import ROOT_INODE, ImageId, Inode
from ckptfs.local.catalog.catalog import batches
from ckptfs.local.catalog.reader import open_reader

_UNDER = """
WITH RECURSIVE tree(parent, name, ino) AS (
    SELECT 0, x'', ?1
    UNION
    SELECT d.parent, d.name, d.ino FROM tree JOIN dirent d ON d.parent = tree.ino WHERE d.ino IS NOT NULL
)
"""


class SurveyedFile(NamedTuple):
    """A name of a regular file."""

    path: bytes
    """From the mount's root, beginning with `/`."""
    ino: Inode
    size: int
    """Of a sealed file; an unsealed one's is its image's."""
    mtime_ns: int
    """Likewise."""
    image: ImageId | None
    whole: bool
    """Whether every byte is in `image`."""
    manifest: int | None
    """None: not sealed."""


@dataclass(frozen=True)
class ChunkPlace:
    """Where a chunk is."""

    here: bool
    encoded_bytes: int | None
    """On the remote; None when it is not there."""
    codec: int | None


class Survey:
    """A look at the catalog at *path*. A context manager. Raises StoreError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._db = open_reader(path)

    def __enter__(self) -> Survey:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def resolve(self, path: bytes) -> Inode:
        """The inode of *path*, from the mount's root. Raises NameMissing."""
        ino = ROOT_INODE
        for name in filter(None, path.split(b"/")):
            row = self._db.execute("SELECT ino FROM dirent WHERE parent = ? AND name = ?", (ino, name)).fetchone()
            if row is None or row[0] is None:
                raise NameMissing(f"{os.fsdecode(path)}: no such file or directory")
            ino = Inode(row[0])
        return ino

    def names(self, directory: Inode) -> list[tuple[bytes, int]]:
        """(name, mode) of what is in *directory*, ordered; empty for anything else."""
        return self._db.execute(
            "SELECT d.name, i.mode FROM dirent d JOIN inode i ON i.ino = d.ino WHERE d.parent = ? ORDER BY d.name",
            (directory,),
        ).fetchall()

    def files(self) -> list[SurveyedFile]:
        """Every name of every regular file, ordered by path."""
        directories: dict[int, tuple[int, bytes]] = {}
        files = []
        for row in self._db.execute(
            _UNDER + "SELECT t.parent, t.name, t.ino, i.mode, coalesce(m.size, i.size), i.mtime_ns, i.image,"
            " coalesce(im.whole, 0) = 1, i.manifest FROM tree t JOIN inode i ON i.ino = t.ino"
            " LEFT JOIN image im ON im.id = i.image LEFT JOIN manifest m ON m.id = i.manifest",
            (ROOT_INODE,),
        ):
            parent, name, ino, mode = row[:4]
            if stat.S_ISDIR(mode):
                directories[ino] = (parent, name)
            elif stat.S_ISREG(mode):
                files.append(row)
        paths: dict[int, bytes] = {ROOT_INODE: b""}

        def path(directory: int) -> bytes:
            above = []
            while directory not in paths:
                above.append(directory)
                directory = directories[directory][0]
            for each in reversed(above):
                parent, name = directories[each]
                paths[each] = paths[parent] + b"/" + name
            return paths[above[0]] if above else paths[directory]

        return sorted(
            SurveyedFile(path(parent) + b"/" + name, Inode(ino), size, mtime_ns, image, bool(whole), manifest)
            for parent, name, ino, _, size, mtime_ns, image, whole, manifest in files
        )

    def file(self, ino: Inode) -> SurveyedFile | None:
        """The regular file *ino*, without its path; None when it is none."""
        row = self._db.execute(
            "SELECT i.mode, coalesce(m.size, i.size), i.mtime_ns, i.image, coalesce(im.whole, 0) = 1, i.manifest"
            " FROM inode i LEFT JOIN image im ON im.id = i.image LEFT JOIN manifest m ON m.id = i.manifest"
            " WHERE i.ino = ?",
            (ino,),
        ).fetchone()
        if row is None or not stat.S_ISREG(row[0]):
            return None
        return SurveyedFile(b"", ino, row[1], row[2], row[3], bool(row[4]), row[5])

    def body(self, manifest: int) -> bytes | None:
        """The encoded content of a sealed file; None while only the remote has it."""
        row = self._db.execute("SELECT body FROM manifest WHERE id = ?", (manifest,)).fetchone()
        body: bytes | None = row[0] if row else None
        return body

    def unlearned(self, top: Inode) -> tuple[list[Inode], list[int]]:
        """What at or below *top* only the remote knows: directories not looked into, and sealed files' manifests."""
        directories = self._db.execute(
            _UNDER + "SELECT i.ino FROM tree JOIN inode i USING (ino) WHERE i.expanded = 0", (top,)
        )
        manifests = self._db.execute(
            _UNDER + "SELECT DISTINCT m.id FROM tree JOIN inode i USING (ino) JOIN manifest m ON m.id = i.manifest"
            " WHERE m.body IS NULL AND m.digest IS NOT NULL",
            (top,),
        )
        return [Inode(row[0]) for row in directories], [row[0] for row in manifests]

    def here(self) -> Iterator[tuple[bytes]]:
        """(chunk) of each chunk that lies on this disk."""
        return self._db.execute("SELECT DISTINCT chunk FROM location")

    def packed(self) -> Iterator[tuple[bytes, int]]:
        """(chunk, encoded bytes) of each chunk that the remote has."""
        return self._db.execute("SELECT chunk, length FROM packed WHERE pack IN (SELECT id FROM pack WHERE state > 0)")

    def places(self, chunks: Iterable[bytes]) -> dict[bytes, ChunkPlace]:
        """Where each of *chunks* is."""
        found: dict[bytes, ChunkPlace] = {}
        for batch in batches(dict.fromkeys(chunks)):
            marks = ",".join("?" * len(batch))
            here = {row[0] for row in self._db.execute(f"SELECT chunk FROM location WHERE chunk IN ({marks})", batch)}
            packed = {
                row[0]: row[1:]
                for row in self._db.execute(
                    "SELECT chunk, packed.length, codec FROM packed JOIN pack ON pack.id = pack"
                    f" WHERE state > 0 AND chunk IN ({marks})",
                    batch,
                )
            }
            for chunk in batch:
                found[chunk] = ChunkPlace(chunk in here, *packed.get(chunk, (None, None)))
        return found
