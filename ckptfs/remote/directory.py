"""A directory as an object store: file:///directory, for a NAS, NFS, a slower disk. Local disk and NFS semantics only.

An object is a file. It is written under a temporary name in `.tmp/`, synced, read back, and renamed (or linked, when
the key must be absent); then its directory is synced. So a reader sees a whole object or none, whatever dies. Names
that start with "." are never listed.

`.tmp/` also tells the directory from the empty mount point that is left when a NAS is not mounted: without it nothing
is written, and nothing is reported missing. It is made with the directory or in an empty one; in one that holds other
things, which may be refused for them, with the first object.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

from ckptfs.errors import ObjectExists, ObjectMissing, RemoteError, RemoteForbidden, RemoteUnusable
from ckptfs.remote.base import Buffer, Listing, ObjectInfo, check_folder, check_key, check_range, is_key

TEMPORARY = ".tmp"
_BLOCK = 1 << 18
"""Step of reading back: small beside a pack, large beside a system call."""
_STALE_S = 24 * 3600.0
"""A temporary file this old belongs to nobody: no upload takes a day."""
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_LASTING = {errno.EINVAL, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class DirectoryStore:
    """`ObjectStore` over one directory."""

    def __init__(self, directory: str, *, create: bool = True) -> None:
        """With *create*, make *directory* when its parent exists. Temporary files that a crash left are removed.

        Raises RemoteUnusable when it cannot be used at all. A directory that cannot be written can still be read.
        """
        self._root = os.path.abspath(directory)
        self._temporary = os.path.join(self._root, TEMPORARY)
        try:
            if not os.path.isdir(self._root):
                if not create:
                    raise RemoteUnusable(f"{self.url}: there is no such directory; is it mounted?")
                os.mkdir(self._root)
            with os.scandir(self._root) as entries:  # may it be read?
                is_empty = next(entries, None) is None
            if create and is_empty:
                self._mark()
            self._marked = os.path.isdir(self._temporary)
            self._marks_later = not self._marked and not is_empty
            if self._marked:
                self._remove_stale()
        except OSError as error:
            raise RemoteUnusable(f"{self.url}: {self._why_unusable(error)}") from error

    @property
    def url(self) -> str:
        return directory_url(self._root)

    @property
    def description(self) -> str:
        return self.url

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        check_key(key)
        body = memoryview(data).cast("B")
        path = self._path(key)
        if if_absent and os.path.lexists(path):
            raise self._taken(key)
        temporary = os.path.join(self._temporary, f"{os.getpid()}-{secrets.token_hex(8)}")
        with self._errors("put", key):
            if self._marks_later:
                self._mark()
                self._marked, self._marks_later = os.path.isdir(self._temporary), False
            try:
                self._write(temporary, body)
                if not _holds(temporary, body):
                    raise RemoteError(f"{self.url}: {key} reads back differently", key=key, temporary=True)
                self._make_folders(os.path.dirname(path))
                if if_absent:
                    self._link(temporary, path, key)
                else:
                    os.replace(temporary, path)
                _sync_directory(os.path.dirname(path))
            finally:
                try:
                    os.unlink(temporary)
                except OSError:
                    pass  # renamed, or left for _remove_stale; the error on its way says more
        return True

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        if start == end:
            return b""
        with self._opened(key) as (descriptor, total):
            if end is None:
                end = total
            if end > total or start >= max(total, 1):
                raise RemoteError(f"{self.url}: {key} has {total} bytes, no range [{start}, {end})", key=key)
            return self._read(descriptor, start, end, key)

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        check_key(key)
        if length <= 0:
            raise ValueError(f"a tail of {length} bytes")
        with self._opened(key) as (descriptor, total):
            return self._read(descriptor, max(0, total - length), total, key), total

    def size(self, key: str) -> int | None:
        check_key(key)
        try:
            with self._errors("head", key):
                status = os.stat(self._path(key))
                return status.st_size if stat.S_ISREG(status.st_mode) else None
        except ObjectMissing:
            return None

    def list(self, prefix: str, *, start_after: str = "", limit: int = 1000) -> Listing:
        if limit < 1:
            raise ValueError(f"a listing of {limit} objects")
        objects: list[ObjectInfo] = []
        with self._errors("list", prefix):
            self._check_mounted()
            for info in self._walk(prefix[: prefix.rfind("/") + 1], prefix, start_after):
                if len(objects) == limit:
                    return Listing(tuple(objects), True)
                objects.append(info)
        return Listing(tuple(objects), False)

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        check_folder(prefix)
        with self._errors("list", prefix):
            self._check_mounted()
            names = [name[:-1] for name in self._names(prefix) if name.endswith("/")]
            # A folder is there for its objects' sake: one without any does not exist on S3 either.
            return tuple(
                name
                for name in names
                if is_key(name) and next(self._walk(f"{prefix}{name}/", "", ""), None) is not None
            )

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        folders = set()
        for key in keys:
            path = self._path(key)
            try:
                with self._errors("delete", key):
                    os.unlink(path)
                    folders.add(os.path.dirname(path))
            except ObjectMissing:
                pass  # what was asked for
        for folder in folders:
            with self._errors("delete", folder):
                _sync_directory(folder)

    def _mark(self) -> None:
        try:
            os.mkdir(self._temporary)
        except OSError as error:
            if not os.path.isdir(self._temporary) and error.errno not in _FORBIDDEN:
                raise

    def _why_unusable(self, error: OSError) -> str:
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            return "it must be a directory."
        if not os.path.isdir(os.path.dirname(self._root)):
            return "there is no such directory, nor its parent; is it mounted?"
        if os.path.isdir(self._root):
            return f"{error.strerror}. Check the owner and mode of the directory."
        return f"it cannot be created: {error.strerror}. Choose another place."

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _check_mounted(self) -> None:
        if not os.path.isdir(self._temporary if self._marked else self._root):
            raise RemoteError(f"{self.url}: the directory is gone; is it still mounted?", temporary=True)

    def _names(self, folder: str) -> Sequence[str]:
        """The names in *folder* ("" or ending with "/"), folders with a slash behind them, in key order."""
        try:
            with os.scandir(os.path.join(self._root, folder)) as entries:
                return sorted(entry.name + ("/" if entry.is_dir() else "") for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _walk(self, folder: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Objects below *folder* in key order that match; opens only folders which can hold such."""
        if folder and not is_key(folder[:-1]):
            return
        for name in self._names(folder):
            key = folder + name
            if key.endswith("/"):
                on_the_way = prefix.startswith(key) or key.startswith(prefix)
                if on_the_way and (key > start_after or start_after.startswith(key)):
                    yield from self._walk(key, prefix, start_after)
            elif not is_key(name):
                continue
            elif key.startswith(prefix) and key > start_after:
                try:
                    status = os.stat(self._path(key))
                except FileNotFoundError:
                    continue  # deleted since the folder was read
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(key, status.st_size, status.st_mtime)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """A descriptor of an object, and its size."""
        with self._errors("get", key):
            # A FIFO in its place would be waited for until somebody writes to it.
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise ObjectMissing(f"{self.url}: get {key}: what has this name is not a file", key=key)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int, start: int, end: int, key: str) -> bytes:
        """Exactly [start, end): one read where the system gives that much at once (it stops at 2 GiB)."""
        body = os.pread(descriptor, end - start, start)
        while len(body) < end - start:
            more = os.pread(descriptor, end - start - len(body), start + len(body))
            if not more:
                raise RemoteError(f"{self.url}: {key} became shorter while it was read", key=key, temporary=True)
            body += more
        return body

    def _write(self, temporary: str, body: memoryview) -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            written = 0
            while written < len(body):
                written += os.write(descriptor, body[written:])
            os.fsync(descriptor)
            # So that reading back asks the disk, or the server, where the system lets us.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def _link(self, temporary: str, path: str, key: str) -> None:
        """Give *temporary* its name unless that is taken."""
        try:
            os.link(temporary, path)
        except FileExistsError as error:
            # NFS: the link was made but its answer lost, and the request sent again by the client.
            if os.stat(temporary).st_nlink != 2:
                raise self._taken(key) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links (exFAT, some FUSE) has no rename that spares the target either.
            if os.path.lexists(path):
                raise self._taken(key) from error
            os.replace(temporary, path)

    def _make_folders(self, folder: str) -> None:
        """Create *folder* and what is missing above it, but never the root: that would be another disk's."""
        if os.path.isdir(folder) or folder == self._root:
            return
        parent = os.path.dirname(folder)
        self._make_folders(parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            return  # another thread or machine was quicker
        _sync_directory(parent)

    def _remove_stale(self) -> None:
        with os.scandir(self._temporary) as entries:
            for entry in entries:
                try:
                    if time.time() - entry.stat().st_mtime > _STALE_S:
                        os.unlink(entry.path)
                except OSError:
                    pass  # another machine removed it, or it is not ours to remove

    def _taken(self, key: str) -> ObjectExists:
        return ObjectExists(f"{self.url}: {key} exists already", key=key)

    @contextmanager
    def _errors(self, what: str, key: str) -> Iterator[None]:
        """Turn OSError into the RemoteError that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOENT:
                self._check_mounted()
            absent = what != "put" and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
            if absent:
                raise ObjectMissing(f"{self.url}: {what} {key}: no such object", key=key) from error
            where = f"{self.url}: {what} {key}: {error.strerror}"
            if error.errno in _FORBIDDEN or (what == "put" and not self._marked):
                raise RemoteForbidden(f"{where}. Check the owner and mode of the directory.", key=key) from error
            temporary = error.errno not in _LASTING  # a full disk and a silent server come back
            raise RemoteError(where, key=key, temporary=temporary) from error


def directory_url(directory: str) -> str:
    """The canonical URL of a store over *directory*."""
    return f"file://{quote(os.path.abspath(directory))}"


def _holds(path: str, body: memoryview) -> bool:
    """Whether the file holds exactly *body*."""
    at = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            if block != bytes(body[at : at + len(block)]):  # memcmp: a memoryview is compared item by item
                return False
            at += len(block)
    return at == len(body)


def _sync_directory(path: str) -> None:
    """Make names in *path* durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems sync names by themselves
            raise
    finally:
        os.close(descriptor)
