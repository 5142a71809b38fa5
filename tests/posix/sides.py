"""The same operations on a mount and on a plain directory: what each did, written down so that it can be compared.

A case is a function of one `Side`. It works below `side.root` and records every result with the methods here: values as
they are, refusals as errno names, stat as what must be equal on both. `compare` runs it on both sides.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pickle
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATE = "user.ckptfs.state"
_SEALED_S = 30.0
_CLOCK_REALTIME_COARSE = 5  # linux/time.h; the time module has no name for it


class Side:
    """A directory to work in, and the record of what happened."""

    def __init__(self, root: Path, *, mount: bool, seal: bool = False, passthrough: bool = False) -> None:
        """With *seal*, `sealed` waits for the mount to have sealed a file; else it does nothing."""
        self.root = root
        self.record: list[tuple[str, Any]] = []
        self._mount = mount
        self._seal = seal
        self._passthrough = passthrough
        self._fds: set[int] = set()

    def path(self, name: str | bytes) -> bytes:
        return os.path.join(os.fsencode(self.root), os.fsencode(name))

    # Recording

    def see(self, what: str, value: Any) -> None:
        self.record.append((what, _plain(value)))

    def attempt(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call *function* and record its result, or the errno it failed with (then return None)."""
        try:
            result = function(*args, **kwargs)
        except OSError as error:
            assert error.errno is not None
            self.record.append((what, errno.errorcode[error.errno]))
            return None
        self.see(what, result)
        return result

    def changed(self, what: str, names: list[str | bytes | int], function: Callable[[], Any]) -> Any:
        """Attempt *function* and record which of mtime and ctime it changed, of each of *names* (or descriptors)."""
        before = [self._times(name) for name in names]
        _tick()
        result = self.attempt(what, function)
        after = [self._times(name) for name in names]
        for name, old, new in zip(names, before, after, strict=True):
            label = name if isinstance(name, (str, bytes)) else "descriptor"
            if old.get("ino") != new.get("ino"):
                self.record.append((f"{what} changed of {label!r}", "it is another one now"))
            else:
                self.record.append((f"{what} changed of {label!r}", [key for key in old if old[key] != new[key]]))
        return result

    def accessed(self, what: str, name: str | bytes, function: Callable[..., Any], *args: Any) -> None:
        """Attempt *function* and record whether it moved the atime of *name*."""
        _tick()
        before = os.lstat(self.path(name)).st_atime_ns
        self.attempt(what, function, *args)
        self.record.append((f"{what} moved atime", os.lstat(self.path(name)).st_atime_ns > before))

    def _times(self, name: str | bytes | int) -> dict[str, int]:
        try:
            status = os.fstat(name) if isinstance(name, int) else os.lstat(self.path(name))
        except FileNotFoundError:
            return {}
        return {"ino": status.st_ino, "mtime": status.st_mtime_ns, "ctime": status.st_ctime_ns}

    # Operations that most cases need

    def open(self, name: str | bytes, flags: int, mode: int = 0o644) -> int:
        """A descriptor, closed at the end of the case; -1 when refused."""
        try:
            fd = os.open(self.path(name), flags, mode)
        except OSError as error:
            assert error.errno is not None
            self.record.append((f"open {name!r} {flags:#o}", errno.errorcode[error.errno]))
            return -1
        self._fds.add(fd)
        self.record.append((f"open {name!r} {flags:#o}", "a descriptor"))
        return fd

    def close(self, fd: int) -> None:
        if fd in self._fds:
            self._fds.remove(fd)
            self.attempt("close", os.close, fd)

    def close_all(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def write_file(self, name: str | bytes, data: bytes) -> None:
        with open(self.path(name), "wb") as file:
            file.write(data)

    def stat(self, name: str | bytes) -> None:
        self.attempt(f"stat {name!r}", os.stat, self.path(name))

    def lstat(self, name: str | bytes) -> None:
        self.attempt(f"lstat {name!r}", os.lstat, self.path(name))

    def fstat(self, fd: int) -> None:
        self.attempt("fstat", os.fstat, fd)

    def read_file(self, name: str | bytes) -> None:
        def read() -> bytes:
            with open(self.path(name), "rb") as file:
                return file.read()

        self.attempt(f"read {name!r}", read)

    def names(self, name: str | bytes = b".") -> None:
        self.attempt(f"list {name!r}", lambda: sorted(os.listdir(self.path(name))))

    def sealed(self, *names: str | bytes) -> None:
        """On a sealing mount: wait until these files are sealed, those aside that cannot be while we may write them."""
        if not (self._mount and self._seal):
            return
        deadline = time.monotonic() + _SEALED_S
        for name in names:
            if self._passthrough and self._is_open_for_writing(name):
                continue
            while os.getxattr(self.path(name), STATE, follow_symlinks=False) != b"sealed":
                assert time.monotonic() < deadline, f"{name!r} was not sealed within {_SEALED_S} s"
                time.sleep(0.002)

    def _is_open_for_writing(self, name: str | bytes) -> bool:
        ino = os.stat(self.path(name)).st_ino
        flags = (fcntl.fcntl(fd, fcntl.F_GETFL) for fd in self._fds if os.fstat(fd).st_ino == ino)
        return any(each & os.O_ACCMODE != os.O_RDONLY for each in flags)

    def as_user(
        self,
        what: str,
        function: Callable[[Side], object],
        uid: int = 65534,
        gid: int = 65534,
        groups: tuple[int, ...] = (),
    ) -> None:
        """Run *function* in a child process that is somebody unprivileged, also in *groups*, in the root directory."""
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(read_end)
                os.chdir(self.root)  # before the privileges go: the way here may be closed to others
                os.setgroups(groups)
                os.setgid(gid)
                os.setuid(uid)
                side = Side(Path("."), mount=False)
                try:
                    function(side)
                except BaseException as error:
                    side.record.append(("failed", repr(error)))
                with open(write_end, "wb") as pipe:
                    pickle.dump(side.record, pipe)
            finally:
                os._exit(0)
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            data = pipe.read()
        os.waitpid(child, 0)
        self.record += [(f"{what}: {label}", value) for label, value in pickle.loads(data)]


Case = Callable[[Side], None]


def compare(case: Case, mount: Path, plain: Path, *, seal: bool = False, passthrough: bool = False) -> None:
    """Run *case* in a fresh directory of both; the records must be equal, step by step."""
    records = []
    for root, is_mount in ((plain, False), (mount, True)):
        root.mkdir()
        root.chmod(0o777)
        side = Side(root, mount=is_mount, seal=seal, passthrough=passthrough)
        try:
            case(side)
        finally:
            side.close_all()
        records.append(side.record)
    for step, (expected, got) in enumerate(zip(*records, strict=False)):
        assert got == expected, f"step {step}: the mount did {got}, a plain directory {expected}"
    assert len(records[0]) == len(records[1])
    assert snapshot(mount) == snapshot(plain)


def snapshot(root: Path, *, times: bool = False) -> dict[bytes, Any]:
    """Everything below *root* by path: kind, mode, owner, links, size, bytes, target, attributes, and *times*."""
    found: dict[bytes, Any] = {}

    def look(path: bytes) -> None:
        status = os.lstat(path)
        entry: list[Any] = [_plain(status)]
        if stat.S_ISREG(status.st_mode):
            entry.append(_digest_of(path))
        if stat.S_ISLNK(status.st_mode):
            entry.append(os.readlink(path))
        else:
            names = [
                name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(("user.", "trusted."))
            ]
            entry.append({name: os.getxattr(path, name, follow_symlinks=False) for name in names})
        if times:
            entry.append((status.st_mtime_ns, status.st_ctime_ns))
        found[os.path.relpath(path, os.fsencode(root))] = entry
        if stat.S_ISDIR(status.st_mode):
            for name in os.listdir(path):
                look(os.path.join(path, name))

    look(os.fsencode(root))
    return found


def _plain(value: Any) -> Any:
    """*value* as what must be equal on both sides."""
    if isinstance(value, os.stat_result):
        size = 0 if stat.S_ISDIR(value.st_mode) else value.st_size  # a directory's size is the disk's own affair
        return ("stat", oct(value.st_mode), value.st_nlink, value.st_uid, value.st_gid, value.st_rdev, size)
    if isinstance(value, bytes) and len(value) > 256:
        return (len(value), hashlib.blake2b(value).hexdigest())
    return value


def _digest_of(path: bytes) -> str:
    whole = hashlib.blake2b()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            whole.update(data)
    return whole.hexdigest()


def _tick() -> None:
    """Return when the clock that disks take their times from has moved on.

    Twice, since what a program sees of it was found to lag behind, by up to a tick, on a loaded virtual machine.
    """
    for _ in range(2):
        begun = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
        while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) <= begun:
            time.sleep(0.001)
