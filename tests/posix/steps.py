"""Operations on one directory, each told by eight bytes, so that drawing one costs microseconds.

`Step` is an operation and its choices; `Tree` does it, with the descriptors and memory maps that it keeps.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MS_SYNC = 4
_AT_SYMLINK_FOLLOW = 0x400
_F_OFD_SETLK = 37

PATHS = ("a", "b", "c", "d", "d/a", "d/b", "d/e", "d/e/a", "d/e/f", "link", "link/a", "d/up")
NAMES = ("a", "b", "e", "e/a", "..", "x")
TARGETS = ("a", "d", "d/e", "link", "nothing", "../b", ".")
_SIZES = (0, 1, 511, 4095, 4096, 4097, 8192, 12288, 65536)
_ACCESS = (os.O_RDWR, os.O_RDWR, os.O_RDONLY, os.O_WRONLY)
_EXTRA = (
    0, 0, os.O_CREAT, os.O_CREAT, os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_TRUNC, os.O_CREAT | os.O_TRUNC,
    os.O_CREAT | os.O_APPEND, os.O_APPEND, os.O_DIRECTORY, os.O_NOFOLLOW, os.O_CREAT | os.O_NOFOLLOW, os.O_PATH,
    os.O_CREAT | os.O_DSYNC, os.O_TRUNC | os.O_APPEND,
)  # fmt: skip
_MODES = (0o644, 0o600, 0o755, 0o4755, 0o2775, 0o2645, 0o6711, 0o1777, 0o000, 0o444)
_KEEP, _PUNCH, _ZERO = 1, 2, 16
_ALLOCATIONS = (0, _KEEP, _PUNCH | _KEEP, _PUNCH | _KEEP, _PUNCH, _ZERO, _ZERO | _KEEP)
MOST_DESCRIPTORS = 7
MOST_DIRECTORIES = 3
MOST_MAPS = 4


class Step:
    """One operation: its name, and choices of which each kind takes what it needs."""

    __slots__ = ("byte", "first", "length", "name", "offset", "second")

    def __init__(self, table: tuple[str, ...], code: bytes) -> None:
        self.name = table[code[0] % len(table)]
        self.first, self.second, self.byte = code[1], code[2], code[3]
        self.offset = _size(code[4] | code[5] << 8)
        self.length = _size(code[6] | code[7] << 8)

    def __repr__(self) -> str:
        return f"{self.name}({self.first}, {self.second}, {self.byte}, {self.offset}, {self.length})"

    @property
    def path(self) -> str:
        return PATHS[self.first % len(PATHS)]

    @property
    def other(self) -> str:
        return PATHS[self.second % len(PATHS)]

    @property
    def data(self) -> bytes:
        return (b"%c-%d." % (self.byte, self.byte) * (self.length // 3 + 1))[: self.length]

    @property
    def mode(self) -> int:
        return _MODES[self.byte % len(_MODES)]


def _size(number: int) -> int:
    """Small ones, whole pages and one off them, and anything up to 20 kB."""
    kind, rest = number % 4, number >> 2
    if kind == 0:
        return _SIZES[rest % len(_SIZES)]
    return rest % 300 if kind == 1 else rest % 20_000


class Absent(Exception):
    """The step needs a descriptor or map, and there is none: it is no operation."""


class Tree:
    """One side: a directory, descriptors and maps. Every public method is an operation on it that takes a Step."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.fds: list[int] = []
        self.directories: list[int] = []
        self.maps: list[tuple[int, int, int, bool]] = []
        """(address, length, an O_PATH descriptor of the file, whether stores into it change the file)."""

    def at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def fd(self, number: int) -> int:
        if not self.fds:
            raise Absent
        return self.fds[number % len(self.fds)]

    def directory(self, number: int) -> int:
        if not self.directories:
            raise Absent
        return self.directories[number % len(self.directories)]

    def end(self) -> None:
        while self.maps:
            self._unmap(0)
        for fd in self.fds + self.directories:
            os.close(fd)
        self.fds, self.directories = [], []

    # Descriptors

    def open(self, s: Step) -> None:
        self._open(s, self.at(s.path), None)

    def openat(self, s: Step) -> None:
        self._open(s, NAMES[s.length % len(NAMES)], self.directory(s.first))

    def _open(self, s: Step, path: str, dir_fd: int | None) -> None:
        if len(self.fds) >= MOST_DESCRIPTORS:
            os.close(self.fds.pop(s.offset % MOST_DESCRIPTORS))
        flags = _ACCESS[s.second % len(_ACCESS)] | _EXTRA[(s.second >> 2) % len(_EXTRA)]
        self.fds.append(os.open(path, flags | os.O_NONBLOCK, s.mode | 0o600, dir_fd=dir_fd))  # fifos must not wait
        if flags & os.O_TRUNC and not flags & os.O_PATH:
            self._unmap_of(os.fstat(self.fds[-1]))

    def _unmap_of(self, emptied: os.stat_result) -> None:
        """End the maps of a file that was emptied: on a mount those without a descriptor may keep what was there."""
        for index in reversed(range(len(self.maps))):
            if os.path.samestat(os.fstat(self.maps[index][2]), emptied):
                self._unmap(index)

    def close(self, s: Step) -> None:
        self.fd(0)
        os.close(self.fds.pop(s.first % len(self.fds)))

    def dup(self, s: Step) -> None:
        if len(self.fds) < MOST_DESCRIPTORS:
            self.fds.append(os.dup(self.fd(s.first)))

    def read(self, s: Step) -> bytes:
        return os.read(self.fd(s.first), s.length)

    def write(self, s: Step) -> Any:
        fd = self.fd(s.first)
        return os.write(fd, s.data), os.lseek(fd, 0, os.SEEK_CUR)

    def pread(self, s: Step) -> bytes:
        return os.pread(self.fd(s.first), s.length, s.offset)

    def pwrite(self, s: Step) -> int:
        return os.pwrite(self.fd(s.first), s.data, s.offset)

    def writev(self, s: Step) -> int:
        return os.pwritev(self.fd(s.first), [s.data, b"", b"second"], s.offset)

    def lseek(self, s: Step) -> int:
        fd, whence = self.fd(s.first), (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END)[s.byte % 3]
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            return os.lseek(fd, 0, os.SEEK_SET)  # other positions mean something to one file system only
        return os.lseek(fd, s.offset - (0 if s.second % 2 else 9000), whence)

    def seek_data(self, s: Step) -> Any:
        return self._seek(s, os.SEEK_DATA)

    def seek_hole(self, s: Step) -> Any:
        return self._seek(s, os.SEEK_HOLE)

    def _seek(self, s: Step, whence: int) -> Any:
        fd = self.fd(s.first)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise Absent
        before = os.lseek(fd, 0, os.SEEK_CUR)
        found = os.lseek(fd, s.offset, whence)
        os.lseek(fd, before, os.SEEK_SET)
        return found

    def ftruncate(self, s: Step) -> None:
        os.ftruncate(self.fd(s.first), s.offset)

    def fsync(self, s: Step) -> None:
        (os.fsync if s.byte % 2 else os.fdatasync)(self.fd(s.first))

    def fchmod(self, s: Step) -> None:
        os.fchmod(self.fd(s.first), s.mode)

    def fchown(self, s: Step) -> None:
        os.fchown(self.fd(s.first), (-1, 0, 1000)[s.byte % 3], (-1, 0, 1000)[s.second % 3])

    def futimens(self, s: Step) -> None:
        os.utime(self.fd(s.first), ns=(s.offset, s.length))

    def fsetxattr(self, s: Step) -> None:
        os.setxattr(self.fd(s.first), f"user.{s.byte % 2}", s.data[:4], (0, 0, 1, 2)[s.second % 4])

    def flock(self, s: Step) -> None:
        kind = (fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN)[s.byte % 3]
        fcntl.flock(self._unmapped(s.first), kind | fcntl.LOCK_NB)

    def ofd_lock(self, s: Step) -> None:
        kind = (fcntl.F_WRLCK, fcntl.F_RDLCK, fcntl.F_UNLCK)[s.byte % 3]
        _lock(self._unmapped(s.first), kind, s.offset, s.length)

    def _unmapped(self, number: int) -> int:
        """A descriptor to lock: a map holds on to its file, and so to locks, on a plain directory only.

        A map through passthrough is one of the image (the kernel's backing_file_mmap), and the mount's file and its
        locks go when the last descriptor is closed.
        """
        fd = self.fd(number)
        if any(os.path.samestat(os.fstat(fd), os.fstat(of)) for _, _, of, _ in self.maps):
            raise Absent
        return fd

    def fallocate(self, s: Step) -> None:
        _check(_libc.fallocate(self.fd(s.first), _ALLOCATIONS[s.byte % len(_ALLOCATIONS)], s.offset, s.length))

    def copy_file_range(self, s: Step) -> int:
        source, target, done = self.fd(s.first), self.fd(s.second), 0
        while done < s.length:
            count = os.copy_file_range(source, target, s.length - done, s.offset + done, s.byte * 64 + done)
            if not count:
                break
            done += count
        return done

    def sendfile(self, s: Step) -> Any:
        source, target, done = self.fd(s.first), self.fd(s.second), 0
        if os.path.sameopenfile(source, target):
            return None  # its pages are sent while they are written: what arrives is anybody's guess
        while done < s.length:
            count = os.sendfile(target, source, s.offset + done, s.length - done)
            if not count:
                break
            done += count
        return done, os.lseek(target, 0, os.SEEK_CUR)

    def drop_pages(self, s: Step) -> None:
        os.posix_fadvise(self.fd(s.first), 0, 0, os.POSIX_FADV_DONTNEED)

    def fstat(self, s: Step) -> os.stat_result:
        return os.fstat(self.fd(s.first))

    def relink(self, s: Step) -> None:
        """A name for what a descriptor has open; with O_PATH and without, named or not any more."""
        path = f"/proc/self/fd/{self.fd(s.first)}".encode()
        _check(_libc.linkat(-100, path, -100, os.fsencode(self.at(s.other)), _AT_SYMLINK_FOLLOW))

    # Directories that are open, whatever became of their names

    def open_directory(self, s: Step) -> None:
        path = self.at((".", "d", "d/e")[s.byte % 3])
        if len(self.directories) >= MOST_DIRECTORIES:
            os.close(self.directories.pop(s.first % MOST_DIRECTORIES))
        self.directories.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))

    def list_open(self, s: Step) -> list[str]:
        return sorted(os.listdir(self.directory(s.first)))

    def stat_open(self, s: Step) -> os.stat_result:
        return os.fstat(self.directory(s.first))

    def stat_at(self, s: Step) -> os.stat_result:
        return os.stat(NAMES[s.byte % len(NAMES)], dir_fd=self.directory(s.first), follow_symlinks=bool(s.second % 2))

    def change_open(self, s: Step) -> None:
        fd = self.directory(s.first)
        os.fchmod(fd, s.mode | 0o700)
        os.utime(fd, ns=(s.offset, s.length))
        if s.second % 8 == 0:
            os.fsync(fd)

    def mkdir_at(self, s: Step) -> None:
        os.mkdir(NAMES[s.byte % len(NAMES)], dir_fd=self.directory(s.first))

    def remove_at(self, s: Step) -> None:
        (os.rmdir if s.second % 2 else os.unlink)(NAMES[s.byte % len(NAMES)], dir_fd=self.directory(s.first))

    def rename_at(self, s: Step) -> None:
        names = NAMES[s.byte % len(NAMES)], NAMES[s.length % len(NAMES)]
        os.rename(*names, src_dir_fd=self.directory(s.first), dst_dir_fd=self.directory(s.second))

    def symlink_at(self, s: Step) -> None:
        os.symlink(TARGETS[s.second % len(TARGETS)], NAMES[s.byte % len(NAMES)], dir_fd=self.directory(s.first))

    # Maps. Made with libc: Python's own keep a descriptor, and it is the map without one that is the hard case.

    def map(self, s: Step) -> Any:
        fd = self.fd(s.first)
        status = os.fstat(fd)
        if len(self.maps) >= MOST_MAPS or not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise Absent
        fcntl.flock(fd, fcntl.LOCK_UN)  # see _unmapped
        _lock(fd, fcntl.F_UNLCK, 0, 0)
        shared = s.byte % 4 != 0
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if s.second % 4 else 0)
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        address = _libc.mmap(None, status.st_size, protection, kind, fd, 0)
        if address == _MAP_FAILED:
            _check(-1)
        writes = bool(protection & mmap.PROT_WRITE)
        self.maps.append((address, status.st_size, os.open(f"/proc/self/fd/{fd}", os.O_PATH), writes and shared))
        if not writes:
            return "read-only"
        return "shared" if shared else "private"

    def store(self, s: Step) -> None:
        address, room = self._place(s, writing=True)
        data = s.data[: min(room, 200)]
        ctypes.memmove(address, data, len(data))

    def load(self, s: Step) -> bytes:
        address, room = self._place(s, writing=False)
        return ctypes.string_at(address, min(room, s.length))

    def msync(self, s: Step) -> None:
        if not self.maps:
            raise Absent
        address, length, _, _ = self.maps[s.first % len(self.maps)]
        _check(_libc.msync(address, length, _MS_SYNC))

    def unmap(self, s: Step) -> None:
        if not self.maps:
            raise Absent
        self._unmap(s.first % len(self.maps))

    def _unmap(self, index: int) -> None:
        address, length, fd, _ = self.maps.pop(index)
        os.close(fd)
        _check(_libc.munmap(address, length))

    def _place(self, s: Step, *, writing: bool) -> tuple[int, int]:
        """Address and how far the map goes from there; never behind the file's end, which would be SIGBUS."""
        usable = [each for each in self.maps if each[3] or not writing]
        if not usable:
            raise Absent
        address, length, fd, _ = usable[s.first % len(usable)]
        room = min(length, os.fstat(fd).st_size) - s.offset
        if room <= 0:
            raise Absent
        return address + s.offset, room

    # Names

    def mkdir(self, s: Step) -> None:
        os.mkdir(self.at(s.path), s.mode | 0o700)

    def rmdir(self, s: Step) -> None:
        os.rmdir(self.at(s.path))

    def unlink(self, s: Step) -> None:
        os.unlink(self.at(s.path))

    def rename(self, s: Step) -> None:
        flags = (0, 0, 0, 0, 1, 2, 2, 3)[s.byte % 8]
        _check(_libc.renameat2(-100, os.fsencode(self.at(s.path)), -100, os.fsencode(self.at(s.other)), flags))

    def link(self, s: Step) -> None:
        os.link(self.at(s.path), self.at(s.other), follow_symlinks=bool(s.byte % 2))

    def symlink(self, s: Step) -> None:
        os.symlink(TARGETS[s.byte % len(TARGETS)], self.at(s.path))

    def mknod(self, s: Step) -> None:
        kind = (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG)[s.byte % 3]
        os.mknod(self.at(s.path), kind | _MODES[s.second % len(_MODES)])

    def truncate(self, s: Step) -> None:
        path = self.at(s.path)
        os.truncate(path, s.offset)
        if not s.offset:
            self._unmap_of(os.stat(path))

    def save(self, s: Step) -> None:
        """As programs replace a file: a temporary one, then a rename."""
        temporary = self.at("temporary")
        with open(temporary, "wb") as file:
            file.write(s.data)
        try:
            os.replace(temporary, self.at(s.path))
        except OSError:
            os.unlink(temporary)
            raise

    # Attributes and looking

    def chmod(self, s: Step) -> None:
        os.chmod(self.at(s.path), s.mode)

    def chown(self, s: Step) -> None:
        ids = (-1, 0, 1000)[s.byte % 3], (-1, 0, 1000)[s.second % 3]
        os.chown(self.at(s.path), *ids, follow_symlinks=bool(s.length % 2))

    def utimens(self, s: Step) -> None:
        os.utime(self.at(s.path), ns=(s.offset, s.length), follow_symlinks=bool(s.byte % 2))

    def utime_now(self, s: Step) -> None:
        os.utime(self.at(s.path))

    def setxattr(self, s: Step) -> None:
        name = ("user.0", "user.1", "trusted.0")[s.byte % 3]  # short: more would take a block, on the plain side only
        os.setxattr(self.at(s.path), name, s.data[:4], (0, 0, 1, 2)[s.second % 4])

    def getxattr(self, s: Step) -> bytes:
        return os.getxattr(self.at(s.path), f"user.{s.byte % 2}")

    def removexattr(self, s: Step) -> None:
        os.removexattr(self.at(s.path), f"user.{s.byte % 2}")

    def stat(self, s: Step) -> os.stat_result:
        return os.stat(self.at(s.path))

    def readlink(self, s: Step) -> str:
        return os.readlink(self.at(s.path))

    def listdir(self, s: Step) -> list[str]:
        return sorted(os.listdir(self.at(s.path)))

    def access(self, s: Step) -> bool:
        return os.access(self.at(s.path), s.byte % 8)

    def read_file(self, s: Step) -> bytes:
        fd = os.open(self.at(s.path), os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(fd, 1 << 20)
        finally:
            os.close(fd)


NAME_STEPS = (
    "mkdir", "mkdir", "rmdir", "unlink", "unlink", "rename", "rename", "rename", "link", "link", "symlink", "mknod",
    "truncate", "save", "save", "chmod", "chown", "utimens", "utime_now", "setxattr", "getxattr", "removexattr",
    "mkdir", "setxattr", "setxattr", "stat", "readlink", "listdir", "access", "read_file", "open", "close",
)  # fmt: skip
BYTE_STEPS = (
    "open", "open", "open", "close", "close", "dup", "read", "write", "write", "pread", "pread", "pwrite", "pwrite",
    "pwrite", "writev", "lseek", "seek_data", "seek_hole", "ftruncate", "ftruncate", "fchmod", "fchown", "futimens",
    "fsetxattr", "flock", "ofd_lock", "fallocate", "fallocate", "copy_file_range", "sendfile", "drop_pages", "fstat",
    "save", "truncate",
)  # fmt: skip
MAP_STEPS = (
    "open", "open", "close", "map", "map", "map", "store", "store", "store", "store", "load", "load", "msync",
    "unmap", "pread", "pwrite", "write", "ftruncate", "read_file", "fstat", "drop_pages", "fallocate", "truncate",
    "rename", "unlink", "save",
)  # fmt: skip
OPEN_STEPS = (
    "open", "open", "openat", "openat", "close", "relink", "relink", "open_directory", "open_directory", "list_open",
    "list_open", "stat_open", "stat_at", "change_open", "mkdir_at", "mkdir_at", "remove_at", "rename_at", "symlink_at",
    "fsync", "rmdir", "unlink", "rename", "mkdir", "pwrite", "pread", "fchmod", "futimens", "fchown", "save",
)  # fmt: skip


def _lock(fd: int, kind: int, offset: int, length: int) -> None:
    fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", kind, 0, offset, length, 0))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
