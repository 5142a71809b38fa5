"""Random operations through several descriptors, on a mount and on a plain directory at once: nothing may differ.

A plain directory on the same disk is the model. Sizes are such that a few operations make several chunks; sealing runs
in between, and is waited for now and then. Times are compared as "what utimens set" or "now".
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.mounts import TINY, Site

OPTIONS = ("--owner", "stored", "--allow-other")
SET_TIMES_BELOW_NS = 10**12  # what utimens sets here; the present is far above
MOST_DESCRIPTORS = 6

PATHS = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "link", "link/a"])
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 20_000), st.sampled_from([4095, 4096, 4097, 8192]))
FLAGS = st.sampled_from(
    [
        os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDWR | os.O_APPEND | os.O_CREAT,
        os.O_RDONLY | os.O_DIRECTORY, os.O_RDONLY | os.O_NOFOLLOW,
    ]
)  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    mask = os.umask(0o022)
    with Site(tmp_path_factory.mktemp("model"), tuning=TINY) as made:
        made.mount(*OPTIONS)
        yield made
        made.umount()
        assert "Traceback" not in made.log(), made.log()
    os.umask(mask)


def machine(site: Site, plain: Path, remount_every: int) -> type[RuleBasedStateMachine]:
    """A state machine over *site* and *plain*; every so many examples end with a remount."""
    numbers = itertools.count()

    class FileSystemModel(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.number = next(numbers)
            self.roots = [root / f"{self.number}" for root in (plain, site.mountpoint)]
            for root in self.roots:
                root.mkdir()
            self.fds: list[tuple[int, int]] = []

        def both(self, function: Callable[[Callable[[str], str], int], Any], index: int | None = None) -> Any:
            """Call *function* with each side's path maker and descriptor; results and errnos must be equal."""
            results = []
            for side, root in enumerate(self.roots):
                fd = -1 if index is None else self.fds[index % len(self.fds)][side]
                try:
                    results.append(_plain(function(lambda name, root=root: f"{root}/{name}", fd)))  # type: ignore[misc]
                except OSError as error:
                    results.append(errno.errorcode[error.errno or 0])
            assert results[1] == results[0], f"the mount did {results[1]}, a plain directory {results[0]}"
            return results[0]

        # Descriptors

        @initialize()
        def begin(self) -> None:
            for root in self.roots:
                (root / "d").mkdir()
                (root / "a").write_bytes(b"a" * 5000)

        @precondition(lambda self: len(self.fds) < MOST_DESCRIPTORS)
        @rule(path=PATHS, flags=FLAGS, mode=st.sampled_from([0o644, 0o600]))
        def open(self, path: str, flags: int, mode: int) -> None:
            opened: list[int] = []

            def attempt(at: Callable[[str], str], fd: int) -> None:
                opened.append(os.open(at(path), flags, mode))

            try:
                self.both(attempt)
            finally:
                if len(opened) == 2:
                    self.fds.append((opened[0], opened[1]))
                else:
                    for fd in opened:
                        os.close(fd)

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5))
        def close(self, index: int) -> None:
            self.both(lambda at, fd: os.close(fd), index)
            del self.fds[index % len(self.fds)]

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5), offset=SIZES, length=SIZES, byte=st.integers(0, 255))
        def pwrite(self, index: int, offset: int, length: int, byte: int) -> None:
            self.both(lambda at, fd: os.pwrite(fd, bytes([byte]) * length, offset), index)

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5), length=st.integers(0, 3000), byte=st.integers(0, 255))
        def write(self, index: int, length: int, byte: int) -> None:
            self.both(lambda at, fd: (os.write(fd, bytes([byte]) * length), os.lseek(fd, 0, os.SEEK_CUR)), index)

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5), offset=SIZES, length=SIZES)
        def pread(self, index: int, offset: int, length: int) -> None:
            self.both(lambda at, fd: os.pread(fd, length, offset), index)

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5), size=SIZES)
        def ftruncate(self, index: int, size: int) -> None:
            self.both(lambda at, fd: os.ftruncate(fd, size), index)

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5))
        def fstat(self, index: int) -> None:
            self.both(lambda at, fd: os.fstat(fd), index)

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5))
        def fsync(self, index: int) -> None:
            self.both(lambda at, fd: os.fsync(fd), index)

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5), mode=st.sampled_from([0o600, 0o755]), time_ns=st.integers(0, 10**9))
        def change_open_file(self, index: int, mode: int, time_ns: int) -> None:
            self.both(lambda at, fd: (os.fchmod(fd, mode), os.utime(fd, ns=(time_ns, time_ns))), index)

        @precondition(lambda self: self.fds)
        @rule(index=st.integers(0, 5), offset=st.integers(0, 4000), byte=st.integers(0, 255))
        def store_through_a_map(self, index: int, offset: int, byte: int) -> None:
            def store(at: Callable[[str], str], fd: int) -> Any:
                status = os.fstat(fd)
                if stat.S_ISDIR(status.st_mode) or status.st_size < 4096:
                    return "nothing to map"
                with mmap.mmap(fd, 4096) as shared:
                    shared[offset : offset + 9] = bytes([byte]) * 9
                    shared.flush()
                return os.pread(fd, 9, offset)

            self.both(store, index)

        # Names

        @rule(path=PATHS)
        def mkdir(self, path: str) -> None:
            self.both(lambda at, fd: os.mkdir(at(path)))

        @rule(path=PATHS)
        def rmdir(self, path: str) -> None:
            self.both(lambda at, fd: os.rmdir(at(path)))

        @rule(path=PATHS)
        def unlink(self, path: str) -> None:
            self.both(lambda at, fd: os.unlink(at(path)))

        @rule(source=PATHS, path=PATHS, flags=st.sampled_from([0, 0, 0, 1, 2]))
        def rename(self, source: str, path: str, flags: int) -> None:
            def attempt(at: Callable[[str], str], fd: int) -> None:
                if _libc.renameat2(-100, os.fsencode(at(source)), -100, os.fsencode(at(path)), flags) != 0:
                    raise OSError(ctypes.get_errno(), "renameat2")

            self.both(attempt)

        @rule(source=PATHS, path=PATHS)
        def link(self, source: str, path: str) -> None:
            self.both(lambda at, fd: os.link(at(source), at(path), follow_symlinks=False))

        @rule(pointing_to=st.sampled_from(["a", "d", "d/e", "link", "nothing"]), path=PATHS)
        def symlink(self, pointing_to: str, path: str) -> None:
            self.both(lambda at, fd: os.symlink(pointing_to, at(path)))

        @rule(path=PATHS, size=SIZES)
        def truncate(self, path: str, size: int) -> None:
            self.both(lambda at, fd: os.truncate(at(path), size))

        @rule(path=PATHS, data=st.binary(max_size=3000))
        def save(self, path: str, data: bytes) -> None:
            """As programs replace a file: a temporary one, then a rename."""

            def attempt(at: Callable[[str], str], fd: int) -> None:
                temporary = at(path) + ".tmp"
                with open(temporary, "wb") as file:
                    file.write(data)
                try:
                    os.replace(temporary, at(path))
                except OSError:
                    os.unlink(temporary)
                    raise

            self.both(attempt)

        # Attributes and looking

        @rule(path=PATHS, mode=st.sampled_from([0o600, 0o644, 0o755, 0o4755, 0o2775]))
        def chmod(self, path: str, mode: int) -> None:
            self.both(lambda at, fd: os.chmod(at(path), mode))

        @rule(path=PATHS, time_ns=st.integers(-(10**9), 10**9))
        def utime(self, path: str, time_ns: int) -> None:
            self.both(lambda at, fd: os.utime(at(path), ns=(time_ns, time_ns), follow_symlinks=False))

        @rule(path=PATHS, name=st.sampled_from(["user.a", "user.b"]), value=st.binary(max_size=20))
        def setxattr(self, path: str, name: str, value: bytes) -> None:
            self.both(lambda at, fd: os.setxattr(at(path), name, value))

        @rule(path=PATHS, name=st.sampled_from(["user.a", "user.b"]))
        def removexattr(self, path: str, name: str) -> None:
            self.both(lambda at, fd: os.removexattr(at(path), name))

        @rule(path=PATHS)
        def look(self, path: str) -> None:
            self.both(lambda at, fd: os.lstat(at(path)))
            self.both(lambda at, fd: os.readlink(at(path)))
            self.both(lambda at, fd: sorted(os.listdir(at(path))))

        @rule(path=PATHS)
        def read(self, path: str) -> None:
            self.both(lambda at, fd: _contents(at(path)))

        @rule()
        def list_everything(self) -> None:
            self.both(lambda at, fd: _tree(at(".")))

        @rule(path=PATHS)
        def wait_until_sealed(self, path: str) -> None:
            mounted = self.roots[1] / path
            deadline = time.monotonic() + 30
            while mounted.is_file() and os.getxattr(mounted, "user.ckptfs.state") == b"closed":
                assert time.monotonic() < deadline, f"{path} was not sealed"
                time.sleep(0.001)

        def teardown(self) -> None:
            try:
                for index in reversed(range(len(self.fds))):
                    self.both(lambda at, fd: os.fstat(fd), index)
                    self.both(lambda at, fd: os.close(fd), index)
                    del self.fds[index]
                self.both(lambda at, fd: _tree(at(".")))
                if self.number % remount_every == remount_every - 1:
                    site.umount()
                    site.mount(*OPTIONS)
                    self.both(lambda at, fd: _tree(at(".")))
            finally:
                for pair in self.fds:
                    for fd in pair:
                        os.close(fd)
                for root in self.roots:
                    shutil.rmtree(root)

    return FileSystemModel


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _tree(root: str) -> dict[str, Any]:
    """Everything below *root*, as far as it must be equal."""
    found: dict[str, Any] = {}
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        status = os.lstat(path)
        found[name] = [_plain(status)]
        if os.path.islink(path):
            found[name].append(os.readlink(path))
        elif os.path.isdir(path):
            found[name] += [_xattrs(path), _tree(path)]
        else:
            found[name] += [_xattrs(path), _contents(path)]
    return found


def _xattrs(path: str) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith("user.")}


def _plain(value: Any) -> Any:
    if isinstance(value, os.stat_result):
        size = None if value.st_mode & 0o170000 == 0o040000 else value.st_size
        mtime = value.st_mtime_ns if value.st_mtime_ns < SET_TIMES_BELOW_NS else "now"
        return ("stat", oct(value.st_mode), value.st_nlink, size, mtime)
    return value


def run(site: Site, plain: Path, *, examples: int, steps: int, remount_every: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(site, plain, remount_every),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_mount_behaves_like_a_plain_directory(site: Site, tmp_path: Path) -> None:
    """After every one of some random operations, results, errnos, stats and bytes are equal on both."""
    run(site, tmp_path, examples=300, steps=50, remount_every=100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_mount_behaves_like_a_plain_directory_for_long(site: Site, tmp_path: Path) -> None:
    """The same with many more and longer sequences."""
    run(site, tmp_path, examples=3000, steps=100, remount_every=50)
