"""A connection to a catalog that only reads one state of it, beside a daemon or without one."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from ckptfs.errors import StoreError
from ckptfs.local.catalog.schema import VERSION


def open_reader(path: Path) -> sqlite3.Connection:
    """The catalog at *path* as it is now, whatever a daemon does meanwhile, until the connection is closed.

    While it is open, the catalog's log cannot begin anew: close it before anything slow. Raises StoreError.
    """
    try:
        os.stat(path)
    except PermissionError as error:
        raise StoreError(f"{path.parent}: only the user who mounts this store may look into it") from error
    except OSError as error:
        raise StoreError(f"{path} is not a usable catalog: {error.strerror}") from error
    try:
        db = sqlite3.connect(f"file:{os.fspath(path)}?mode=ro", uri=True, isolation_level=None)
        db.execute("BEGIN")
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} is not a usable catalog: {error}") from error
    if version != VERSION:
        db.close()
        raise StoreError(f"{path} has version {version}, this ckptfs looks at version {VERSION}: mount it first")
    return db
