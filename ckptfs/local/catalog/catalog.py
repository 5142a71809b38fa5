"""The connection to catalog.db: transactions, settings, and the sync that makes commits durable.

Who calls: the event loop's thread alone, except `sync_wal`, which a worker thread runs on its own file descriptor.
Commits are `synchronous=NORMAL`: they survive a SIGKILL at once, and a power cut after the next `sync_wal`. SQLite's
automatic WAL checkpoint is off, since it would fsync on the loop; `checkpoint` runs in the maintenance thread's time.

The tables' owners: `names` (inodes, directory entries, xattrs), `contents` (images, manifests, locations),
`packs`, `cuts` (what is to be published), `heads` (what was), `sources` (others' trees).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from ckptfs.errors import StoreError
from ckptfs.ids import WriterId
from ckptfs.local.catalog import schema

log = logging.getLogger(__name__)

SELF = 1
"""writer.id of this store."""

_RESERVE_BYTES = 32 << 20
"""Allocated for the WAL beforehand (or a sixteenth of a small disk's room): on a full disk one must be able to delete.
Twice what it grows to before it is checkpointed."""

_FALLOC_FL_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Catalog:
    """An open catalog.db, migrated to the current schema.

    Raises StoreError when the file is not a catalog, is damaged, or was written by a newer ckptfs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.db = sqlite3.connect(os.fspath(path), isolation_level=None, cached_statements=512)
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = NORMAL")
            self.db.execute("PRAGMA wal_autocheckpoint = 0")
            self.db.execute("PRAGMA temp_store = MEMORY")
            self.db.execute("PRAGMA cache_size = -16384")
            schema.migrate(self.db)
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{path} is not a usable catalog: {error}") from error
        self._transaction = _Transaction(self.db, path)
        self._wal = os.open(f"{path}-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _reserve(self._wal)

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """All or nothing; a transaction inside another joins it. Raises OSError when the disk is full."""
        return self._transaction

    @property
    def version(self) -> int:
        """Another number whenever a row may have changed, inside transactions too: what was read before is outdated."""
        return self.db.total_changes + self._transaction.rollbacks

    @property
    def commits(self) -> int:
        """Counts commits, so that the sync thread sees whether there is anything new."""
        return self._transaction.commits

    def sync_wal(self) -> None:
        """Make every commit so far survive a power cut. Safe to call from any thread."""
        os.fdatasync(self._wal)

    def checkpoint(self) -> None:
        """Move the WAL's content into the database file, on a connection of its own; blocks for its fsyncs.

        For a worker thread. The WAL is restarted by the next commit that finds no reader in it.
        """
        db = sqlite3.connect(os.fspath(self.path), isolation_level=None)
        try:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.OperationalError as error:
            raise OSError(errno.ENOSPC if "is full" in str(error) else errno.EIO, str(error)) from error
        finally:
            db.close()

    def wal_bytes(self) -> int:
        return os.fstat(self._wal).st_size

    def get_setting(self, key: str) -> bytes | int | str | None:
        row = self.db.execute("SELECT value FROM setting WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def set_setting(self, key: str, value: bytes | int | str | None) -> None:
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO setting (key, value) VALUES (?, ?)", (key, value))

    def writer_row(self, writer: WriterId) -> int:
        """The small integer that stands for *writer* in this catalog; made when new."""
        row = self.db.execute("SELECT id FROM writer WHERE uuid = ?", (writer,)).fetchone()
        if row:
            return int(row[0])
        with self.transaction() as db:
            return int(db.execute("INSERT INTO writer (uuid) VALUES (?)", (writer,)).lastrowid or 0)

    def writer_id(self, row: int) -> WriterId:
        return WriterId(self.db.execute("SELECT uuid FROM writer WHERE id = ?", (row,)).fetchone()[0])

    def close(self) -> None:
        """Checkpoint and close. The WAL file goes with it, but on a full disk, where the next opening finds it."""
        try:
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError as error:
            log.warning("%s keeps its log: %s", self.path, error)
        finally:
            self.db.close()
            os.close(self._wal)


class _Transaction:
    """What `with catalog.transaction()` enters and leaves: begin and commit at the outermost level.

    A class of its own, not a generator: every request passes here several times.
    """

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path
        self._depth = 0
        self.commits = 0
        self.rollbacks = 0

    def __enter__(self) -> sqlite3.Connection:
        if not self._depth:
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                self._roll_back(error)
                raise
        self._depth += 1
        return self._db

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        if error is None:
            try:
                self._db.execute("COMMIT")
            except sqlite3.OperationalError as failure:
                self._roll_back(failure)
                raise
            self.commits += 1
        else:
            self._roll_back(error)

    def _roll_back(self, error: BaseException) -> None:
        """Undo; raises OSError when *error* says that the disk is full."""
        self.rollbacks += 1
        if self._db.in_transaction:  # SQLite rolls back by itself after some errors, and COMMIT can fail
            self._db.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError) and "is full" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._path)) from error


def _reserve(fd: int) -> None:
    """Allocate blocks behind the end of the WAL; best effort, since a disk may not offer it."""
    room = os.fstatvfs(fd)
    _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, 0, min(_RESERVE_BYTES, room.f_bavail * room.f_frsize // 16))
