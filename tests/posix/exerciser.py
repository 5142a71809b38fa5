"""One file and a copy of its bytes in memory: random changes and reads of it, after each of which they must agree.

In the spirit of fsx: reads, writes, appends, stores and loads through maps, truncation, holes, fsync and reopening, and
with them what only this file system does: sealing, remounting, a killed daemon, and eviction, after which the bytes
come back from the remote.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import ckptfs
from tests.support.disks import filled
from tests.support.mounts import Site, until

LARGEST = 200_000
"""Bytes of the file: with tiny tuning, about fifty chunks."""
_FLAGS = (os.O_RDWR, os.O_RDWR, os.O_RDWR | os.O_APPEND, os.O_RDWR | os.O_DSYNC)
_KEEP, _PUNCH, _ZERO = 1, 2, 16
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Exerciser:
    """See the module. *disk* is what the store lies on, filled up in order to evict."""

    def __init__(self, site: Site, disk: Path, options: tuple[str, ...], seed: int) -> None:
        self._site, self._disk, self._options = site, disk, options
        self._random = random.Random(seed)
        self._path = site.mountpoint / "file"
        self._path.unlink(missing_ok=True)  # of an earlier seed
        self._path.touch()
        self._shadow = bytearray()
        self._fds: list[int] = []
        self._map: mmap.mmap | None = None
        self._history = [f"seed {seed}"]
        self.performed: dict[str, int] = {}
        """How often each kind of operation was done, and not only tried."""

    def perform(self, kinds: tuple[Kind, ...]) -> None:
        """One of *kinds*; AssertionError with what was done last when a byte is not what it should be."""
        kind = self._random.choice(kinds)
        self._history.append(kind.__name__)
        if kind(self) is not False:
            self.performed[kind.__name__] = self.performed.get(kind.__name__, 0) + 1
        size = os.stat(self._path).st_size
        assert size == len(self._shadow), f"{size} bytes instead of {len(self._shadow)}, {self._told()}"

    def shuffled(self, kinds: tuple[Kind, ...]) -> list[Kind]:
        return self._random.sample(kinds, len(kinds))

    def compare(self) -> None:
        """The whole file, read anew and by the descriptor that is open."""
        self._same(self._path.read_bytes(), 0, len(self._shadow))

    def let_go(self) -> None:
        """Nothing is open or mapped."""
        if self._map is not None:
            self._map.close()
            self._map = None
        while self._fds:
            try:
                os.close(self._fds.pop())
            except OSError as error:  # of a killed daemon
                if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
                    raise

    # Bytes

    def read(self) -> None:
        start, end = self._span(len(self._shadow) + 5000)
        self._same(os.pread(self._fd(), end - start, start), start, end)

    def write(self) -> None:
        start, end = self._span(LARGEST)
        data = self._data(end - start)
        self._append_or_put(data, start)

    def small_write(self) -> None:
        start = self._random.randrange(LARGEST - 100)
        self._append_or_put(self._data(self._random.randrange(100)), start)

    def truncate(self) -> None:
        size = self._random.choice((0, self._random.randrange(LARGEST), len(self._shadow) // 2, len(self._shadow) + 7))
        if self._random.randrange(2):
            os.truncate(self._path, min(size, LARGEST))
        else:
            os.ftruncate(self._fd(), min(size, LARGEST))
        self._resize(min(size, LARGEST))

    def punch(self) -> bool:
        start, end = self._span(max(len(self._shadow), 1))
        return self._allocate(_PUNCH | _KEEP, start, end)

    def zero(self) -> bool:
        start, end = self._span(LARGEST)
        done = self._allocate(_ZERO, start, end)
        if done and end > len(self._shadow):
            self._resize(end)
        return done

    def rewrite(self) -> None:
        """As programs save again: O_TRUNC and all bytes, while others keep their descriptors."""
        self._shadow[:] = self._data(self._random.randrange(LARGEST))
        with open(self._path, "wb") as file:
            file.write(self._shadow)

    def replace(self) -> None:
        """As careful programs save: who has the old one open is let go first, its bytes are another file's then."""
        self.let_go()
        self._shadow[:] = self._data(self._random.randrange(LARGEST))
        temporary = self._path.with_name("temporary")
        temporary.write_bytes(self._shadow)
        os.replace(temporary, self._path)

    def copy_within(self) -> None:
        start, end = self._span(len(self._shadow))
        target = self._random.randrange(LARGEST)
        length = min(end - start, LARGEST - target, abs(target - start))  # one may not run into the other
        fd, data = self._fd(appending=False), bytes(self._shadow[start : start + length])
        done = 0
        while done < len(data):
            done += os.copy_file_range(fd, fd, len(data) - done, start + done, target + done)
        self._put(data, target)

    # Maps

    def map(self) -> bool:
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._shadow:
            self._map = mmap.mmap(self._fd(appending=False), 0)
        return self._map is not None

    def store(self) -> bool:
        start, end = self._mapped()
        data = self._data(end - start)
        if self._map is None or not data:
            return False
        self._map[start:end] = data
        self._put(data, start)
        return True

    def load(self) -> bool:
        start, end = self._mapped()
        if self._map is not None:
            self._same(self._map[start:end], start, end)
        return self._map is not None and start < end

    def msync(self) -> bool:
        if self._map is not None:
            self._map.flush()
        return self._map is not None

    # Descriptors

    def reopen(self) -> None:
        if self._fds:
            os.close(self._fds.pop(self._random.randrange(len(self._fds))))
        self._open()

    def another(self) -> None:
        if len(self._fds) < 4:
            self._open()

    def fsync(self) -> None:
        (os.fsync if self._random.randrange(2) else os.fdatasync)(self._fd())

    def forget_pages(self) -> None:
        os.posix_fadvise(self._fd(), 0, 0, os.POSIX_FADV_DONTNEED)

    # What only this file system does

    def seal(self) -> None:
        """Let go, and wait until it was cut and hashed."""
        self.let_go()
        until(lambda: os.getxattr(self._path, "user.ckptfs.state") != b"closed", "the file to be sealed")

    def replicate(self) -> None:
        self.let_go()
        assert ckptfs.wait(self._site.mountpoint, "replicated", 60)
        self.compare()

    def remount(self) -> None:
        self.let_go()
        self._site.umount()
        self._site.mount(*self._options)
        self.compare()

    def kill(self) -> None:
        """What was stored through a map is flushed first: without passthrough it may be lost else, as promised."""
        self.msync()
        self._site.kill()
        self.let_go()
        self._site.mount(*self._options)
        self.compare()

    def evict(self) -> bool:
        """The file is read from the remote then."""
        self.replicate()
        if not os.stat(self._path).st_blocks:
            return False  # empty, or nothing but a hole: there is nothing to give up
        evict(self._site, self._disk, self._path, self._told())
        if self._random.randrange(3):
            self.compare()  # else the next operation meets a file that is not here
        return True

    # Within

    def _open(self) -> None:
        self._fds.append(os.open(self._path, self._random.choice(_FLAGS)))

    def _fd(self, *, appending: bool = True) -> int:
        if not self._fds:
            self._open()
        fd = self._random.choice(self._fds)
        if not appending and _appends(fd):
            fd = os.open(self._path, os.O_RDWR)
            self._fds.append(fd)
        return fd

    def _span(self, limit: int) -> tuple[int, int]:
        """Anywhere below *limit*; often from one page's begin to another's."""
        start = self._random.randrange(limit) if limit else 0
        length = self._random.choice((1, 100, 3000, 20_000))
        end = start + self._random.randrange(length + 1)
        if not self._random.randrange(3):
            start, end = start // _PAGE * _PAGE, end // _PAGE * _PAGE
        return min(start, limit), max(min(start, limit), min(end, limit))

    def _mapped(self) -> tuple[int, int]:
        return self._span(min(len(self._map) if self._map is not None else 0, len(self._shadow)))

    def _data(self, length: int) -> bytes:
        if not self._random.randrange(4):
            return bytes([self._random.randrange(256)]) * length
        return self._random.randbytes(length)

    def _append_or_put(self, data: bytes, start: int) -> None:
        fd = self._fd()
        start = len(self._shadow) if _appends(fd) else start
        if start + len(data) > LARGEST:
            return
        assert os.pwrite(fd, data, start) == len(data)
        self._put(data, start)

    def _allocate(self, mode: int, start: int, end: int) -> bool:
        """Whether it was done: without passthrough, and where the daemon serves a file, it may be refused."""
        if end <= start:
            return False
        if _libc.fallocate(self._fd(), mode, start, end - start) != 0:
            assert ctypes.get_errno() == errno.EOPNOTSUPP, f"fallocate: {ctypes.get_errno()}, {self._told()}"
            return False
        self._shadow[start : min(end, len(self._shadow))] = bytes(max(0, min(end, len(self._shadow)) - start))
        return True

    def _put(self, data: bytes, start: int) -> None:
        if data and start + len(data) > len(self._shadow):
            self._resize(start + len(data))
        self._shadow[start : start + len(data)] = data

    def _resize(self, size: int) -> None:
        self._shadow[size:] = bytes(max(0, size - len(self._shadow)))

    def _same(self, found: bytes, start: int, end: int) -> None:
        wanted = bytes(self._shadow[start:end])
        if found == wanted:
            return
        at = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), -1)
        raise AssertionError(
            f"[{start}, {end}): {len(found)} bytes instead of {len(wanted)}, other ones at {start + at}, {self._told()}"
        )

    def _told(self) -> str:
        return f"after {len(self._history) - 1} operations ({self._history[0]}): ... {' '.join(self._history[-40:])}"


def _appends(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)


def evict(site: Site, disk: Path, path: Path, told: str) -> None:
    """Fill the disk until the local bytes of the file at *path*, which was replicated, have made way."""

    def is_elsewhere() -> bool:
        """Whether the file has no image; the catalog says so, since other files may lie beside images."""
        with closing(sqlite3.connect(f"file:{site.store}/catalog.db?mode=ro", uri=True)) as catalog:
            found = catalog.execute("SELECT image FROM inode WHERE ino = ?", (os.stat(path).st_ino,)).fetchone()
        return bool(found == (None,))

    def shown() -> list[tuple[object, ...]]:
        return [(status, status.st_mtime_ns, status.st_ctime_ns) for status in map(os.stat, (path, path.parent))]

    before = shown()
    with filled(disk, 4 << 20):
        until(is_elsewhere, f"the file to be evicted, {told}")
        assert shown() == before, f"eviction shows, {told}"


Kind = Callable[[Exerciser], bool | None]
"""An operation; False when it did nothing."""
LIGHT = (
    *(Exerciser.read,) * 6, *(Exerciser.write,) * 5, *(Exerciser.small_write,) * 5, *(Exerciser.store,) * 6,
    *(Exerciser.load,) * 5, Exerciser.truncate, Exerciser.truncate, Exerciser.punch, Exerciser.punch, Exerciser.zero,
    Exerciser.copy_within, Exerciser.map, Exerciser.map, Exerciser.msync, Exerciser.reopen, Exerciser.reopen,
    Exerciser.another, Exerciser.fsync, Exerciser.forget_pages,
)  # fmt: skip
MEDIUM = (Exerciser.rewrite, Exerciser.replace, Exerciser.seal, Exerciser.seal, Exerciser.seal)
HEAVY = (Exerciser.remount, Exerciser.kill, Exerciser.replicate, Exerciser.evict, Exerciser.evict, Exerciser.evict)


Parts = dict[tuple[int, int], bytes]
"""What ranges of a file hold."""


def own(path: str, seed: int, parts: Parts, size: int, rounds: int) -> Parts:
    """In a process of its own: change, read and check *parts* of the file at *path*, which are nobody else's.

    They begin with the bytes that *parts* says; what they end with is returned. Whose part ends where the file does, at
    *size*, cuts the file off within it at times, and makes it longer again.
    """
    chooser = random.Random(seed)
    shadow = {part: bytearray(data) for part, data in parts.items()}
    fd, mapped = os.open(path, os.O_RDWR), None

    def check(found: bytes, part: tuple[int, int], first: int, last: int, how: str) -> None:
        wanted = shadow[part][first:last]
        if found != wanted:
            at = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), -1)
            lengths = f"{len(found)} bytes instead of {len(wanted)}"
            raise AssertionError(f"{how} at {part[0] + first}, seed {seed}: {lengths}, other ones at {at}")

    try:
        for _ in range(rounds):
            part = chooser.choice(list(parts))
            first = chooser.randrange(len(shadow[part]))
            last = chooser.randrange(first, min(len(shadow[part]), first + 5000)) + 1
            start, end = part[0] + first, part[0] + last
            kind = chooser.randrange(24)
            if kind < 5:
                shadow[part][first:last] = data = chooser.randbytes(last - first)
                assert os.pwrite(fd, data, start) == len(data)
            elif kind < 9 and mapped is not None:
                shadow[part][first:last] = mapped[start:end] = chooser.randbytes(last - first)
            elif kind < 13 and mapped is not None:
                check(bytes(mapped[start:end]), part, first, last, "mapped")
            elif kind == 13:
                if mapped is not None:
                    mapped.close()
                mapped = mmap.mmap(fd, 0)
            elif kind == 14:
                os.close(fd)
                fd = os.open(path, os.O_RDWR)
            elif kind == 15:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            elif kind == 16:
                chooser.choice((os.fsync, os.fdatasync))(fd)
            elif kind == 17:
                if _libc.fallocate(fd, chooser.choice((_PUNCH | _KEEP, _ZERO | _KEEP)), start, end - start) == 0:
                    shadow[part][first:last] = bytes(last - first)
                else:
                    assert ctypes.get_errno() == errno.EOPNOTSUPP, f"fallocate: {ctypes.get_errno()}, seed {seed}"
            elif kind == 18 and part[1] == size:
                os.ftruncate(fd, start)
                os.ftruncate(fd, size)
                shadow[part][first:] = bytes(len(shadow[part]) - first)
            else:
                check(os.pread(fd, end - start, start), part, first, last, "read")
        for part in parts:
            check(os.pread(fd, part[1] - part[0], part[0]), part, 0, part[1] - part[0], "in the end")
    finally:
        if mapped is not None:
            mapped.close()
        os.close(fd)
    return {part: bytes(data) for part, data in shadow.items()}
