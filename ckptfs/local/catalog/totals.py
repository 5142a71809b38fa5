"""What lies under a path, counted: files by state, bytes at risk, bytes in all. Queries only."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.ids import ImageId, Inode, Stamp
from ckptfs.local.catalog.catalog import Catalog

_UNDER = """
WITH RECURSIVE tree(ino) AS (
    SELECT ?1
    UNION
    SELECT d.ino FROM tree JOIN dirent d ON d.parent = tree.ino WHERE d.ino IS NOT NULL
)
"""


@dataclass(frozen=True)
class Pending:
    """A name whose present state is in no acknowledged head."""

    ino: Inode
    parent: Inode
    name: bytes
    mode: int
    size: int
    """As the catalog has it; an unsealed file's is its image's."""
    image: ImageId | None
    manifest: int | None


class Totals:
    def __init__(self, catalog: Catalog) -> None:
        self._db = catalog.db

    def files_under(self, ino: Inode) -> set[Inode]:
        """Everything at or below *ino* that is no directory."""
        rows = self._db.execute(
            _UNDER + "SELECT i.ino FROM tree JOIN inode i USING (ino) WHERE i.mode & 61440 <> 16384", (ino,)
        )
        return {Inode(row[0]) for row in rows}

    def unsealed_under(self, ino: Inode) -> list[Inode]:
        """Regular files at or below *ino* whose content is not sealed."""
        rows = self._db.execute(
            _UNDER + "SELECT i.ino FROM tree JOIN inode i USING (ino) WHERE i.image IS NOT NULL AND i.manifest IS NULL",
            (ino,),
        )
        return [Inode(row[0]) for row in rows]

    def pending_under(self, ino: Inode, limit: int = -1) -> list[Pending]:
        """Names at or below *ino* that are not replicated as they are now, and names of *ino* itself."""
        rows = self._db.execute(
            _UNDER
            + "SELECT i.ino, d.parent, d.name, i.mode, i.size, i.image, i.manifest FROM tree"
            " JOIN dirent d ON d.ino = tree.ino JOIN inode i ON i.ino = tree.ino"
            " WHERE d.origin_seq IS NULL LIMIT ?2",
            (ino, limit),
        )
        return [Pending(*row) for row in rows]

    def names_pending(self) -> tuple[int, int]:
        """Names that are in no acknowledged head as they are now: of files, and of directories and what was removed."""
        row = self._db.execute(
            "SELECT count(*), count(CASE WHEN i.mode & 61440 <> 16384 THEN 1 END)"
            " FROM dirent d LEFT JOIN inode i ON i.ino = d.ino WHERE d.origin_seq IS NULL"
        ).fetchone()
        return row[1], row[0] - row[1]

    def pending_since(self) -> Stamp | None:
        """When the oldest change that is in no acknowledged head was made; None when all are in one."""
        row = self._db.execute(
            "SELECT min(max(d.stamp, ifnull(i.changed, 0)))"
            " FROM dirent d LEFT JOIN inode i ON i.ino = d.ino WHERE d.origin_seq IS NULL"
        ).fetchone()
        return None if row[0] is None else Stamp(row[0])

    def removals_under(self, ino: Inode) -> bool:
        """Whether a name below *ino* was removed, and the remote does not know it yet."""
        row = self._db.execute(
            _UNDER + "SELECT 1 FROM tree JOIN dirent d ON d.parent = tree.ino"
            " WHERE d.ino IS NULL AND d.origin_seq IS NULL LIMIT 1",
            (ino,),
        ).fetchone()
        return row is not None

    def changes_pending(self) -> bool:
        """Whether any directory differs from what was published because of a change here."""
        return self._db.execute("SELECT 1 FROM inode WHERE dirty = 2 LIMIT 1").fetchone() is not None

    def sealed_bytes(self) -> int:
        """Sizes of all sealed regular files that have a name."""
        row = self._db.execute(
            "SELECT CAST(total(size) AS INTEGER) FROM inode WHERE manifest IS NOT NULL AND nlink > 0"
        ).fetchone()
        return int(row[0])

    def unsealed(self) -> list[ImageId]:
        """The images of all regular files that have a name and no manifest."""
        rows = self._db.execute("SELECT image FROM inode WHERE manifest IS NULL AND image IS NOT NULL AND nlink > 0")
        return [ImageId(row[0]) for row in rows]

    def newest_directories(self, limit: int) -> list[tuple[Inode, int]]:
        """Directories that have regular files, the last changed first, with their mtime in ns; not the root."""
        rows = self._db.execute(
            "SELECT ino, mtime_ns FROM inode WHERE ino IN (SELECT d.parent FROM dirent d JOIN inode f ON f.ino = d.ino"
            " WHERE f.image IS NOT NULL OR f.manifest IS NOT NULL) AND nlink > 0 AND ino <> 1"
            " ORDER BY mtime_ns DESC LIMIT ?",
            (limit,),
        )
        return [(Inode(row[0]), row[1]) for row in rows]

    def manifests_under(self, ino: Inode) -> list[int]:
        """The manifests of regular files at or below *ino*."""
        rows = self._db.execute(
            _UNDER + "SELECT DISTINCT i.manifest FROM tree JOIN inode i USING (ino) WHERE i.manifest IS NOT NULL",
            (ino,),
        )
        return [row[0] for row in rows]
