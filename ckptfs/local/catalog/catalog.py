"""The connection to catalog.db: transactions, settings, and the sync that makes commits durable.

Who calls: the event loop's thread alone, except `sync_wal`, which a worker thread runs on its own file descriptor.
Commits are `synchronous=NORMAL`: they survive a SIGKILL at once, and a power cut after the next `sync_wal`. SQLite's
automatic WAL checkpoint is off, since it would fsync on the loop; `checkpoint` runs in the maintenance thread's time.

The tables' owners: `names` (inodes, directory entries, xattrs), `contents` (images, manifests, locations),
`packs`, `cuts` (what is to be published), `heads` (what was), `sources` (others' trees).
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ckptfs.errors import StoreError
from ckptfs.ids import WriterId
from ckptfs.local.ballast import LOG_LEAVES
from ckptfs.local.catalog import schema

log = logging.getLogger(__name__)

SELF = 1
"""writer.id of this store."""

SPARE_BYTES = 512 << 10
"""Allocated behind the end of the WAL whenever a transaction begins: on a full disk one must be able to delete."""
_STEP_BYTES = 1 << 20
"""Allocated there at once when there is less."""
_CROWDED = 8
"""Transactions between two checkpoints when nothing can be allocated: together they write less than the spare."""
_BATCH = 500
"""Keys looked up by one statement; SQLite takes 999 variables in its oldest builds."""


class Allocator(Protocol):
    """Who gives a file blocks before they are written (the ballast)."""

    def __call__(self, fd: int, start: int, length: int, *, keeping: float = 0.0) -> bool: ...


def _no_allocator(fd: int, start: int, length: int, *, keeping: float = 0.0) -> bool:
    return False


class Catalog:
    """An open catalog.db, migrated to the current schema.

    Raises StoreError when the file is not a catalog, is damaged, or was written by a newer ckptfs.
    """

    def __init__(self, path: Path, allocate: Allocator = _no_allocator) -> None:
        """With *allocate* the WAL has blocks before it needs them, and so has the database file."""
        self.path = path
        self._allocate = allocate
        self._crowded = 0
        self.in_doubt = False
        """Whether a flush of the WAL failed, so that some of it may not be on the disk."""
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
        self._transaction = _Transaction(self.db, path, self._begin)
        self._last_inode = 0
        self._wal = os.open(f"{path}-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Closed after the connection: closing any descriptor of the file earlier would drop SQLite's locks.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """All or nothing; a transaction inside another joins it. Raises OSError when the disk refuses it."""
        return self._transaction

    @property
    def version(self) -> int:
        """Another number whenever a row may have changed, inside transactions too: what was read before is outdated."""
        return self.db.total_changes + self._transaction.rollbacks

    @property
    def commits(self) -> int:
        """Counts commits, so that the sync thread sees whether there is anything new."""
        return self._transaction.commits

    def new_inode(self) -> int:
        """A number for a new inode, which none has had that anything still remembers.

        SQLite itself would give the number of the newest inode again as soon as that is gone. But a cut names inodes of
        its own time, and what is known of a directory once it is published must not become that of a file.
        """
        if not self._last_inode:
            (self._last_inode,) = self.db.execute(
                "SELECT coalesce(max(number), 1) FROM (SELECT max(ino) AS number FROM inode"
                " UNION ALL SELECT max(ino) FROM cut_entry UNION ALL SELECT max(dir) FROM cut_dir"
                " UNION ALL SELECT max(dir) FROM source UNION ALL SELECT max(old) FROM replaced)"
            ).fetchone()
        self._last_inode += 1
        return self._last_inode

    def sync_wal(self) -> None:
        """Make every commit so far survive a power cut. Safe to call from any thread.

        Raises OSError, from the first failure on until `begin_wal_anew` has succeeded: the kernel forgets that it could
        not write a page, and the next flush would say that all is well.
        """
        if self.in_doubt:
            raise OSError(errno.EIO, f"an earlier flush of the log of {self.path} failed")
        try:
            os.fdatasync(self._wal)
        except OSError:
            self.in_doubt = True
            raise

    def begin_wal_anew(self) -> None:
        """After a failed `sync_wal`: move all of the WAL into the database and empty it. Raises OSError; blocks."""
        try:
            self.grow()
            (busy, _, _) = self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError as error:
            raise disk_error(error, self.path) from error
        if busy:
            raise OSError(errno.EBUSY, "somebody reads it", os.fspath(self.path))
        self.in_doubt = False

    def reserve(self, spare_bytes: int = SPARE_BYTES, *, keeping: float = LOG_LEAVES) -> bool:
        """Have at least *spare_bytes* allocated behind the end of the WAL; whether they are."""
        return self._spare_bytes() >= spare_bytes or self._allocate(
            self._wal, os.fstat(self._wal).st_size, max(spare_bytes, _STEP_BYTES), keeping=keeping
        )

    def _spare_bytes(self) -> int:
        wal = os.fstat(self._wal)
        return wal.st_blocks * 512 - wal.st_size

    def _begin(self) -> None:
        """Before a transaction: where the WAL cannot grow, on a full disk, let it begin anew from time to time."""
        if self._spare_bytes() >= SPARE_BYTES or self._allocate is _no_allocator:
            return
        self.grow()  # first: without that the WAL could never begin anew
        if self.reserve():
            return
        self._crowded -= 1
        if self._crowded <= 0:
            self._crowded = _CROWDED
            try:
                self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.OperationalError as error:
                log.warning("the log of %s does not begin anew: %s", self.path, error)

    def grow(self) -> None:
        """Allocate what the next `checkpoint` adds to the database file."""
        (pages,), (page_bytes,) = (self.db.execute(f"PRAGMA {each}").fetchone() for each in ("page_count", "page_size"))
        size = os.fstat(self._file).st_size
        if pages * page_bytes > size:
            self._allocate(self._file, size, pages * page_bytes - size)

    def checkpoint(self) -> None:
        """Move the WAL's content into the database file, on a connection of its own; blocks for its fsyncs.

        For a worker thread. The WAL is restarted by the next commit that finds no reader in it.
        """
        db = sqlite3.connect(os.fspath(self.path), isolation_level=None)
        try:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.OperationalError as error:
            raise disk_error(error, self.path) from error
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
            self.grow()
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError as error:
            log.warning("%s keeps its log: %s", self.path, error)
        finally:
            self.db.close()
            os.close(self._wal)
            os.close(self._file)


class _Transaction:
    """What `with catalog.transaction()` enters and leaves: begin and commit at the outermost level.

    A class of its own, not a generator: every request passes here several times.
    """

    def __init__(self, db: sqlite3.Connection, path: Path, begins: Callable[[], object]) -> None:
        """*begins* is called before each."""
        self._db = db
        self._path = path
        self._begins = begins
        self._depth = 0
        self.commits = 0
        self.rollbacks = 0

    def __enter__(self) -> sqlite3.Connection:
        if not self._depth:
            self._begins()
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
        """Undo; raises OSError when *error* is the disk's."""
        self.rollbacks += 1
        if self._db.in_transaction:  # SQLite rolls back by itself after some errors, and COMMIT can fail
            self._db.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            raise disk_error(error, self._path) from error


_DISK_ERRORS = (
    ("is full", errno.ENOSPC),
    ("disk I/O error", errno.EIO),
    ("readonly", errno.EROFS),
    ("unable to open", errno.EIO),
)


def disk_error(error: sqlite3.OperationalError, path: Path) -> OSError | sqlite3.OperationalError:
    """*error* as the OSError that it was, where the disk is to blame."""
    for words, number in _DISK_ERRORS:
        if words in str(error):
            return OSError(number, os.strerror(number), os.fspath(path))
    return error


def batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    """*keys* by so many as one statement takes."""
    remaining = iter(keys)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
