"""Damaging a store that nobody uses, and its directory remote: which image a file has, and flipping bytes."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


def image_of(store: Path, name: str) -> Path:
    """The image of the file whose last name is *name*. Raises FileNotFoundError when it has none: the remote has it."""
    db = sqlite3.connect(f"file:{store}/catalog.db?mode=ro", uri=True)
    try:
        (image,) = db.execute(
            "SELECT i.image FROM dirent d JOIN inode i ON i.ino = d.ino WHERE d.name = ?", (os.fsencode(name),)
        ).fetchone()
    finally:
        db.close()
    if image is None:
        raise FileNotFoundError(name)
    return store / "images" / f"{image:016x}"[-2:] / f"{image:016x}"


def flip(path: Path, at: int) -> None:
    """Change one byte of *path*; its times stay, as a failing disk leaves them."""
    status = path.stat()
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), at)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def objects(remote: Path, kind: str) -> list[Path]:
    """Every object of a kind ("packs", "trees" ...), in the order of their keys."""
    return sorted(path for path in (remote / kind).rglob("*") if path.is_file())
