"""Whether a store that nobody has open is consistent: the catalog with itself, and with the images on the disk."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from ckptfs.encoding.manifest import decode_content
from ckptfs.errors import FormatError
from ckptfs.ids import ROOT_INODE, digest


def problems(store: Path) -> list[str]:
    """Everything that is wrong with *store*, in words."""
    db = sqlite3.connect(f"file:{store}/catalog.db?mode=ro", uri=True)
    try:
        return [
            *(f"sqlite: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"),
            *_names(db),
            *_images(db, store),
            *_contents(db, store),
        ]
    finally:
        db.close()


def _names(db: sqlite3.Connection) -> Iterator[str]:
    modes = dict(db.execute("SELECT ino, mode FROM inode"))
    links: dict[int, int] = {}
    for parent, name, ino in db.execute("SELECT parent, name, ino FROM dirent WHERE ino IS NOT NULL"):
        if not stat.S_ISDIR(modes.get(parent, 0)):
            yield f"{name!r} is in {parent}, which is no directory"
        if ino not in modes:
            yield f"{name!r} in {parent} means {ino}, which does not exist"
            continue
        links[ino] = links.get(ino, 0) + 1
        if stat.S_ISDIR(modes[ino]):
            links[parent] = links.get(parent, 0) + 1  # its ..
    for ino, mode, nlink in db.execute("SELECT ino, mode, nlink FROM inode"):
        names = links.get(ino, 0)
        if stat.S_ISDIR(mode):
            names += 1  # its .
            names += ino == ROOT_INODE
        if nlink != names:
            yield f"inode {ino} ({mode:o}) has {names} names and nlink {nlink}"
    for (ino,) in db.execute("SELECT DISTINCT ino FROM xattr WHERE ino NOT IN (SELECT ino FROM inode)"):
        yield f"attributes of inode {ino}, which does not exist"


def _images(db: sqlite3.Connection, store: Path) -> Iterator[str]:
    rows = {row[0] for row in db.execute("SELECT id FROM image")}
    files = {int(path.name, 16) for path in (store / "images").glob("*/*") if path.is_file()}
    for image in rows - files:
        yield f"image {image:016x} has a row and no file"
    for image in files - rows:
        yield f"image {image:016x} has a file and no row"
    for path in (store / "lost+found").glob("*"):
        yield f"{path.name} is in lost+found"
    needed = {row[0] for row in db.execute("SELECT image FROM inode UNION SELECT image FROM cut_entry")}
    donors = {row[0] for row in db.execute("SELECT DISTINCT l.image FROM location l JOIN reclaimed USING (chunk)")}
    for image in rows - needed - donors:
        yield f"image {image:016x} is needed by nobody"
    for image in needed - rows - {None}:
        yield f"image {image:016x} is needed and has no row"
    for (ino,) in db.execute(
        f"SELECT ino FROM inode WHERE mode & {0o170000} = {stat.S_IFREG} AND image IS NULL AND manifest IS NULL"
    ):
        yield f"inode {ino} has neither an image nor a manifest"


def _contents(db: sqlite3.Connection, store: Path) -> Iterator[str]:
    manifests = dict(db.execute("SELECT id, body FROM manifest"))
    needed = {row[0] for row in db.execute("SELECT manifest FROM inode UNION SELECT manifest FROM cut_entry")} - {None}
    for manifest in manifests.keys() - needed:
        yield f"manifest {manifest} is needed by nobody"
    for manifest in needed - manifests.keys():
        yield f"manifest {manifest} is needed and does not exist"
    for chunk, image, offset, length in db.execute("SELECT chunk, image, offset, length FROM location"):
        path = store / "images" / f"{image:016x}"[-2:] / f"{image:016x}"
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(length)
        except FileNotFoundError:
            yield f"a location in image {image:016x}, which does not exist"
            continue
        if digest(data) != chunk:
            yield f"bytes {offset}..{offset + length} of image {image:016x} are not the chunk that is located there"
    for ino, size, image, manifest in db.execute(
        "SELECT i.ino, i.size, i.image, i.manifest FROM inode i JOIN image m ON m.id = i.image"
        " WHERE i.manifest IS NOT NULL AND m.whole = 1"
    ):
        path = store / "images" / f"{image:016x}"[-2:] / f"{image:016x}"
        on_disk = path.stat().st_size if path.exists() else -1
        try:
            wanted = decode_content(manifests[manifest]).size if manifests.get(manifest) else size
        except FormatError as error:
            yield f"manifest {manifest} does not decode: {error}"
            continue
        if not size == on_disk == wanted:
            yield f"inode {ino} has size {size}, its image {on_disk}, its manifest {wanted}"
