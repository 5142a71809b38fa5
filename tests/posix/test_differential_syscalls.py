"""Calls that libraries make behind programs' backs: pipes, flags of single reads and writes, paths that may not leave a
directory, maps that move, leases, asynchronous input and output."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import signal
import stat
import struct
from collections.abc import Callable

import pytest

from tests.posix.sides import Case, Side
from tests.posix.test_differential_processes import Child, lock
from tests.support import syscalls
from tests.support.mounts import Site
from tests.support.syscalls import AT_EMPTY_PATH, AT_FDCWD, Aio, aio, call, libc, openat2, statx

CASES: list[Case] = []
PAGE = mmap.PAGESIZE
F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 36, 37, 38
RWF_HIPRI, RWF_DSYNC, RWF_SYNC, RWF_NOWAIT, RWF_APPEND = 1, 2, 4, 8, 16
STATX_BASIC, STATX_BTIME = 0x7FF, 0x800
NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH, IN_ROOT, CACHED = 1, 2, 4, 8, 16, 32
FICLONE, FICLONERANGE, FIDEDUPERANGE = 0x40049409, 0x4020940D, 0xC0189436


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_same_as_a_plain_directory(same: Callable[..., None], function: Case) -> None:
    """Each case gives the same results, errnos, stats and bytes on both."""
    same(function, seal=True)


# Bytes that no program holds


@case
def pipes_carry_bytes_in_and_out(d: Side) -> None:
    """splice from files and into them, at positions and offsets, behind the end, appending; vmsplice before it."""
    d.write_file("from", bytes(range(256)) * 200)
    d.sealed("from")
    os.mkdir(d.path("directory"))
    out, into = os.pipe()
    try:
        source, target = d.open("from", os.O_RDONLY), d.open("to", os.O_CREAT | os.O_RDWR)
        append, directory = d.open("to", os.O_WRONLY | os.O_APPEND), d.open("directory", os.O_RDONLY)

        def carry(label: str, length: int, start: int | None, end: int | None) -> None:
            taken = d.attempt(f"{label} in", os.splice, source, into, length, offset_src=start) or 0
            while taken > 0:
                given = d.attempt(f"{label} out", os.splice, out, target, taken, offset_dst=end)
                if given is None:
                    d.attempt("left", os.read, out, taken)
                    return
                taken, end = taken - given, None if end is None else end + given
            d.fstat(target)
            d.see("positions", [os.lseek(fd, 0, os.SEEK_CUR) for fd in (source, target)])

        for length, start, end in ((100, None, None), (5000, None, None), (20_000, 7, 60_000), (PAGE, PAGE, 0),
                                   (100, 51_150, None), (100, 51_200, None), (100, 1 << 40, 5), (0, 0, 0)):  # fmt: skip
            carry(f"{length} {start} {end}", length, start, end)
        with mmap.mmap(-1, 2 * PAGE) as memory:
            memory.write(b"memory, " * (2 * PAGE // 8))
            d.attempt("vmsplice", syscalls.vmsplice, into, memory)
            d.attempt("and out", os.splice, out, target, 2 * PAGE, offset_dst=3)
        d.attempt("nothing to take", os.splice, out, target, 10, flags=2)
        os.write(into, b"x" * 10)
        refused: list[tuple[str, Callable[[], object]]] = [
            ("append", lambda: os.splice(out, append, 10)),
            ("read only", lambda: os.splice(out, source, 10)),
            ("directory", lambda: os.splice(directory, into, 10)),
            ("no pipe", lambda: os.splice(source, target, 10)),
            ("of a pipe", lambda: os.splice(out, target, 10, offset_src=1)),
            ("far behind", lambda: os.splice(out, target, 10, offset_dst=(1 << 63) - 5)),
        ]
        for what, attempt in refused:
            d.attempt(what, attempt)
        d.read_file("to")
        d.attempt("sendfile into a pipe", os.sendfile, into, source, 100, 5000)
        d.attempt("left", os.read, out, 10_000)
        d.attempt("sendfile appending", os.sendfile, append, source, 0, 10)
        d.attempt("sendfile of a directory", os.sendfile, target, directory, 0, 10)
        d.attempt("sendfile behind the end", os.sendfile, target, source, 60_000, 10)
    finally:
        os.close(out)
        os.close(into)


@case
def flags_of_a_single_read_or_write(d: Side) -> None:
    d.write_file("file", bytes(range(256)) * 100)
    d.sealed("file")
    opens = (("reading", os.O_RDONLY), ("both", os.O_RDWR), ("appending", os.O_RDWR | os.O_APPEND))
    for label, opened in opens:
        fd = d.open("file", opened)
        for flags, offset in itertools.product((0, RWF_DSYNC, RWF_SYNC, RWF_APPEND, RWF_SYNC | RWF_APPEND), (50, -1)):
            what, buffer = f"{label} {flags} {offset}", bytearray(300)
            d.attempt(f"write {what}", os.pwritev, fd, [b"first", b"", b"second"], offset, flags)
            d.attempt(f"read {what}", os.preadv, fd, [buffer], offset, flags)
            d.see("bytes", bytes(buffer))
            d.see("position", os.lseek(fd, 0, os.SEEK_CUR))
            d.fstat(fd)
        for flags in (1 << 20, -(1 << 31)):
            d.attempt(f"unknown {flags}", os.pwritev, fd, [b"x"], 0, flags)
            d.attempt(f"unknown {flags}", os.preadv, fd, [bytearray(5)], 0, flags)
        d.attempt("before the begin", os.pwritev, fd, [b"x"], -2, 0)


@case
def asynchronous_input_and_output(d: Side) -> None:
    """Many requests at once past the page cache, as DeepSpeed saves and loads; what is written is there for all."""
    if not syscalls.has_aio():
        return
    part = 4 * PAGE
    buffers = [mmap.mmap(-1, part) for _ in range(8)]
    for number, buffer in enumerate(buffers):
        buffer.write(bytes([number + 1]) * part)
    with aio() as context:
        for flags in (os.O_DIRECT, 0):
            fd = d.open("file", os.O_CREAT | os.O_TRUNC | os.O_RDWR | flags)
            writes = [(Aio.WRITE, fd, buffer, number * part) for number, buffer in enumerate(buffers)]
            d.attempt("write", context.run, *writes)
            d.attempt("fsync", context.run, (Aio.FSYNC, fd, buffers[0], 0), (Aio.FDATASYNC, fd, buffers[0], 0))
            d.read_file("file")
            again = (Aio.WRITE, fd, buffers[7], PAGE), (Aio.WRITE, fd, buffers[0], 9 * part)
            d.attempt("overwrite", context.run, *again)
            d.fstat(fd)
            d.close(fd)
            d.sealed("file")
            fd = d.open("file", os.O_RDONLY | flags)
            reads = [(Aio.READ, fd, buffer, (9 - number) * part) for number, buffer in enumerate(buffers)]
            d.attempt("read", context.run, *reads)
            d.see("bytes", [buffer[:] for buffer in buffers])
            d.attempt("behind the end", context.run, (Aio.READ, fd, buffers[0], 10 * part))
            d.attempt("write where one may only read", context.run, (Aio.WRITE, fd, buffers[0], 0))
            d.close(fd)
    for buffer in buffers:
        buffer.close()


# Paths and what is known of them


@case
def paths_that_stay_where_they_should(d: Side) -> None:
    """openat2 with every RESOLVE flag."""
    os.makedirs(d.path("top/below"))
    d.write_file("outside", b"x")
    d.write_file("top/below/file", b"y")
    for name, target in (("link", "below/file"), ("up", "../outside"), ("round", "../top/below/file"), ("loop", "loop"),
                         ("root", "/below/file"), ("dangling", "new")):  # fmt: skip
        os.symlink(target, d.path(f"top/{name}"))
    top, file = d.open("top", os.O_PATH), d.open("outside", os.O_RDONLY)
    os.symlink(f"/proc/self/fd/{file}", d.path("top/magic"))
    paths = (b".", b"..", b"below/file", b"link", b"up", b"round", b"loop", b"root", b"magic", b"below/../below/file",
             b"below/../../outside", b"/proc/self/exe", b"nothing", b"below/file/x")  # fmt: skip
    for resolve in (0, NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH, IN_ROOT, BENEATH | NO_SYMLINKS, BENEATH | IN_ROOT,
                    64):  # fmt: skip
        for path in paths:
            _open_within(d, top, path, os.O_RDONLY, resolve)
    for resolve in (BENEATH, IN_ROOT):
        for path in (b"made", b"../made outside", b"dangling"):
            _open_within(d, top, path, os.O_CREAT | os.O_EXCL | os.O_RDWR, resolve)
            _open_within(d, top, path, os.O_CREAT | os.O_RDWR, resolve)
    d.attempt("strange flags", openat2, top, b"below/file", 1 << 30, 0)
    d.attempt("a mode without need", openat2, top, b"below/file", os.O_RDONLY, 0, 0o600)
    os.unlink(d.path("top/magic"))


def _open_within(d: Side, top: int, path: bytes, flags: int, resolve: int) -> None:
    mode = 0o640 if flags & os.O_CREAT else 0
    fd = d.attempt(f"{path!r} {flags:#o} {resolve}", lambda: _Opened(openat2(top, path, flags, resolve, mode)))
    if fd is not None:
        fd.close()


class _Opened:
    """A descriptor, known by what kind of thing it is."""

    def __init__(self, fd: int) -> None:
        self._fd, self._kind = fd, (stat.filemode(os.fstat(fd).st_mode), os.fstat(fd).st_nlink)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opened) and self._kind == other._kind

    def close(self) -> None:
        os.close(self._fd)


@case
def what_statx_tells(d: Side) -> None:
    """The same as stat, by path and by descriptor, whether the mount is asked or what is known is enough."""
    d.write_file("file", b"x" * 5000)
    os.mkdir(d.path("directory"))
    os.symlink("file", d.path("link"))
    os.mkfifo(d.path("fifo"), 0o640)
    names = ("file", "directory", "link", "fifo", "nothing")
    for name, follow, sync in itertools.product(names, (0, 0x100), (0, 0x2000, 0x4000, 0x6000)):
        d.attempt(f"{name} {follow} {sync}", lambda: _known(AT_FDCWD, d.path(name), follow | sync))  # noqa: B023
    fd = d.open("file", os.O_PATH)
    d.attempt("a descriptor", lambda: _known(fd, b"", AT_EMPTY_PATH))
    d.attempt("an empty path", lambda: _known(fd, b"", 0))
    d.attempt("below a file", lambda: _known(fd, b"x", 0))
    d.attempt("flags", lambda: _known(fd, b"", 1 << 20))
    d.attempt("mask", lambda: statx(AT_FDCWD, d.path("file"), 0, 1 << 31))


def _known(directory: int, path: bytes, flags: int) -> dict[str, object]:
    found = statx(directory, path, flags, STATX_BASIC)
    if stat.S_ISDIR(found["mode"]):
        found["size"] = 0
    return {"all": found["mask"] & STATX_BASIC == STATX_BASIC} | {
        key: found[key] for key in ("mode", "nlink", "uid", "gid", "size")
    }


def test_paths_that_are_known(site: Site) -> None:
    """RESOLVE_CACHED opens what can be opened without asking the daemon, or says EAGAIN, and programs ask again."""
    path = site.mountpoint / "cached"
    path.write_bytes(b"content")
    with pytest.raises(BlockingIOError):
        openat2(AT_FDCWD, os.fsencode(path.with_name("never heard of")), os.O_RDONLY, CACHED)
    try:
        fd = openat2(AT_FDCWD, os.fsencode(path), os.O_RDONLY, CACHED)
    except BlockingIOError:
        fd = openat2(AT_FDCWD, os.fsencode(path), os.O_RDONLY, 0)
    with open(fd, "rb") as file:
        assert file.read() == b"content"


def test_what_statx_and_stat_tell_agrees(site: Site) -> None:
    """Every field that both have; the time of birth is none that the mount knows, and it says so."""
    path = site.mountpoint / "statx"
    path.write_bytes(b"x" * 5000)
    told, status = statx(AT_FDCWD, os.fsencode(path), 0, STATX_BASIC | STATX_BTIME), os.stat(path)
    for key in ("nlink", "uid", "gid", "mode", "ino", "size", "blksize", "blocks"):
        assert told[key] == getattr(status, f"st_{key}")
    for key in ("mtime", "ctime"):
        assert told[key] == getattr(status, f"st_{key}_ns")
    assert told["mask"] & (STATX_BASIC | STATX_BTIME) == STATX_BASIC


# Maps


@case
def maps_that_move_and_grow(d: Side) -> None:
    """mremap: what a map shows moves with it; more of the file comes into it, and behind the end of that nothing."""
    size = 4 * PAGE
    d.write_file("file", b"".join(bytes([65 + number]) * PAGE for number in range(8)))
    fd = d.open("file", os.O_RDWR)
    address = syscalls.address_of(libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0))
    d.close(fd)
    for new in (8 * PAGE, 2 * PAGE, 6 * PAGE):
        address = syscalls.address_of(libc.mremap(address, size, new, syscalls.MREMAP_MAYMOVE))
        size = new
        view = (syscalls.ctypes.c_char * size).from_address(address)
        d.see(f"{new} bytes", bytes(view))
        view[new - 9 : new] = b"stored %02d" % (new // PAGE)
        d.attempt("msync", call, libc.msync, address, size, 4)
        d.read_file("file")
    os.truncate(d.path("file"), 12 * PAGE)
    address = syscalls.address_of(libc.mremap(address, size, 12 * PAGE, syscalls.MREMAP_MAYMOVE))
    size = 12 * PAGE
    d.see("grown with the file", syscalls.ctypes.string_at(address, size))
    d.attempt("nothing", lambda: syscalls.address_of(libc.mremap(address, size, 0, 0)))
    d.attempt("unaligned", lambda: syscalls.address_of(libc.mremap(address + 1, size, PAGE, 0)))
    call(libc.munmap, address, size)
    d.sealed("file")
    d.read_file("file")


@case
def advice_about_maps(d: Side) -> None:
    """What is dropped from a shared map is read again, with what was stored; private stores are gone."""
    d.write_file("file", b"f" * (4 * PAGE))
    d.sealed("file")
    fd = d.open("file", os.O_RDWR)
    advice = ("NORMAL", "RANDOM", "SEQUENTIAL", "WILLNEED", "DONTNEED", "FREE", "DONTFORK", "DOFORK", "DONTDUMP")
    cold, page_out, populate_read, populate_write = 20, 21, 22, 23
    numbers = [*(getattr(mmap, f"MADV_{name}") for name in advice), cold, page_out, populate_read, populate_write, 999]
    for label, access in (("shared", mmap.ACCESS_WRITE), ("private", mmap.ACCESS_COPY)):
        with mmap.mmap(fd, 4 * PAGE, access=access) as mapped:
            for number in numbers:
                mapped[PAGE : PAGE + 4] = b"%04d" % number
                d.attempt(f"{label} {number}", mapped.madvise, number, 0, 2 * PAGE)
                d.see("shown", mapped[:])
                d.attempt("pread", os.pread, fd, 5 * PAGE, 0)
            d.attempt(f"{label} unaligned", mapped.madvise, mmap.MADV_DONTNEED, 2 * PAGE, PAGE)
            d.attempt(f"{label} behind", mapped.madvise, mmap.MADV_WILLNEED, PAGE, 3 * PAGE)


def test_holes_punched_through_a_map(same: Callable[..., None]) -> None:
    """MADV_REMOVE makes a hole as on a plain directory, or is refused, as fallocate, and then nothing changed."""
    found: list[tuple[object, ...]] = []

    def punch(d: Side) -> None:
        d.write_file("file", b"f" * (4 * PAGE))
        fd = os.open(d.path("file"), os.O_RDWR)
        with mmap.mmap(fd, 0) as mapped:
            mapped[0:6] = b"stored"
            try:
                mapped.madvise(mmap.MADV_REMOVE, PAGE, 2 * PAGE)
                result = 0
            except OSError as error:
                result = error.errno or 0
            found.append((result, mapped[:], os.pread(fd, 5 * PAGE, 0)))
        os.close(fd)
        d.write_file("file", b"")

    same(punch)
    plain, mounted = found
    untouched = b"stored" + b"f" * (4 * PAGE - 6)
    assert mounted in (plain, (errno.EOPNOTSUPP, untouched, untouched))


@case
def advice_about_files(d: Side) -> None:
    """It changes no byte, and what it may be given is the same."""
    d.write_file("file", bytes(range(256)) * 100)
    os.mkdir(d.path("directory"))
    out, into = os.pipe()
    descriptors = [d.open(name, flags) for name, flags in (("file", os.O_RDONLY), ("file", os.O_WRONLY),
                                                           ("file", os.O_PATH))]  # fmt: skip
    for fd in (*descriptors, out):
        for offset, length in ((0, 0), (4096, 8192), (1 << 40, 4096), (-1, 5), (5, -1)):
            for number in range(7):
                d.attempt(f"advice {number} {offset} {length}", os.posix_fadvise, fd, offset, length, number)
            if length >= 0:
                d.attempt(f"readahead {offset} {length}", call, libc.readahead, fd, offset, length)
            for flags in (0, 1, 2, 4, 7, 8):
                d.attempt(f"range {offset} {length} {flags}", call, libc.sync_file_range, fd, offset, length, flags)
        d.attempt("syncfs", call, libc.syncfs, fd)
    os.close(out)
    os.close(into)
    d.read_file("file")


# Locks, leases and clones


def lock_in_the_way(fd: int, kind: int, start: int, length: int) -> tuple[int, ...]:
    """Kind, whence, start, length and holder of what an OFD lock would wait for."""
    return struct.unpack("hhqqi4x", fcntl.fcntl(fd, F_OFD_GETLK, lock(kind, start, length)))


@case
def locks_of_open_files(d: Side) -> None:
    """OFD locks belong to the open file: another opening in the same process waits, a copy of the descriptor not."""
    d.write_file("file", b"x" * 100)
    first, second = d.open("file", os.O_RDWR), d.open("file", os.O_RDWR)
    copy = os.dup(first)
    fcntl.fcntl(first, F_OFD_SETLK, lock(fcntl.F_WRLCK, 10, 20))
    fcntl.fcntl(first, F_OFD_SETLK, lock(fcntl.F_RDLCK, 50, 10))
    for fd, kind, start, length in itertools.product(
        (first, second, copy), (fcntl.F_RDLCK, fcntl.F_WRLCK), (0, 10, 30, 55), (10, 0)
    ):
        d.attempt(f"who {kind} {start} {length}", lock_in_the_way, fd, kind, start, length)
    d.attempt("another's", lambda: bool(fcntl.fcntl(second, F_OFD_SETLK, lock(fcntl.F_WRLCK, 15, 1))))
    d.attempt("a copy's", lambda: bool(fcntl.fcntl(copy, F_OFD_SETLK, lock(fcntl.F_WRLCK, 15, 1))))
    d.attempt("a process's", fcntl.lockf, second, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 15)
    d.attempt("with a pid", lambda: fcntl.fcntl(first, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 1, 1)))
    fcntl.fcntl(first, F_OFD_SETLK, lock(fcntl.F_UNLCK, 0, 100))

    def wait_for_it(say: Callable[[bytes], None], wait: Callable[[], bytes]) -> None:
        other = os.open(d.path("file"), os.O_RDWR)
        fcntl.fcntl(other, F_OFD_SETLK, lock(fcntl.F_WRLCK, 0, 50))
        say(b"held")
        wait()
        os.close(other)
        other = os.open(d.path("file"), os.O_RDWR)
        fcntl.fcntl(other, F_OFD_SETLKW, lock(fcntl.F_WRLCK, 20, 50))
        say(b"got it")

    child = Child(wait_for_it)
    d.see("child", child.hear())
    d.attempt("held by a child", lock_in_the_way, second, fcntl.F_RDLCK, 0, 0)
    child.say()
    fcntl.fcntl(second, F_OFD_SETLKW, lock(fcntl.F_WRLCK, 0, 10))
    os.close(copy)
    d.see("child", child.hear())
    d.see("status", child.end())


@case
def leases(d: Side) -> None:
    """Who leases a file is told before another opens it in a way that breaks the lease."""
    d.write_file("file", b"content")
    os.mkdir(d.path("directory"))
    unlock, read, write = fcntl.F_UNLCK, fcntl.F_RDLCK, fcntl.F_WRLCK
    opens = (("file", os.O_RDONLY), ("file", os.O_WRONLY), ("file", os.O_RDWR), ("directory", os.O_RDONLY))
    for (name, flags), kind in itertools.product(opens, (read, write, unlock, 77)):
        fd = d.open(name, flags)
        d.attempt(f"{name} {flags} {kind}", fcntl.fcntl, fd, fcntl.F_SETLEASE, kind)
        d.attempt("has", fcntl.fcntl, fd, fcntl.F_GETLEASE)
        d.close(fd)
    told: list[int] = []
    before = signal.signal(signal.SIGIO, lambda number, _: told.append(number))
    try:
        for kind, breaking in ((read, os.O_RDWR), (write, os.O_RDONLY), (write, os.O_RDWR)):
            fd = d.open("file", os.O_RDONLY)
            d.attempt("lease", fcntl.fcntl, fd, fcntl.F_SETLEASE, kind)
            if kind == read:
                d.close(d.open("file", os.O_RDONLY | os.O_NONBLOCK))
                d.see("not told", len(told))
            d.close(d.open("file", breaking | os.O_NONBLOCK))
            d.see("told", len(told))
            d.attempt("has", fcntl.fcntl, fd, fcntl.F_GETLEASE)
            d.attempt("give up", fcntl.fcntl, fd, fcntl.F_SETLEASE, unlock)
            d.close(d.open("file", breaking | os.O_NONBLOCK))
            d.close(fd)
    finally:
        signal.signal(signal.SIGIO, before)


def test_clones_are_refused(site: Site) -> None:
    """No reflinks: EOPNOTSUPP for clones, of whole files and of ranges, and for deduplication, and nothing changes."""
    one, other = site.mountpoint / "one", site.mountpoint / "other"
    for path in (one, other):
        path.write_bytes(b"x" * 2 * PAGE)
    with open(one, "rb+") as source, open(other, "rb+") as target:
        a_range = struct.pack("qQQQ", source.fileno(), 0, PAGE, 0)
        same = bytearray(struct.pack("QQHHI", 0, PAGE, 1, 0, 0) + struct.pack("qQQiI", target.fileno(), 0, 0, 0, 0))
        calls: list[Callable[[], object]] = [
            lambda: fcntl.ioctl(target, FICLONE, source.fileno()),
            lambda: fcntl.ioctl(target, FICLONERANGE, a_range),
            lambda: fcntl.ioctl(source, FIDEDUPERANGE, same),
        ]
        for attempt in calls:
            with pytest.raises(OSError) as refusal:
                attempt()
            assert refusal.value.errno == errno.EOPNOTSUPP
    assert one.read_bytes() == other.read_bytes() == b"x" * 2 * PAGE


def test_reads_and_writes_that_may_not_wait(site: Site) -> None:
    """RWF_NOWAIT is refused, since the kernel does not know whether the daemon would wait, and nothing is written."""
    path = site.mountpoint / "nowait"
    path.write_bytes(b"content")
    with open(path, "rb+", buffering=0) as file:
        for attempt in (
            lambda: os.preadv(file.fileno(), [bytearray(7)], 0, RWF_NOWAIT),
            lambda: os.pwritev(file.fileno(), [b"changed"], 0, RWF_NOWAIT),
        ):
            with pytest.raises(OSError) as refusal:
                attempt()
            assert refusal.value.errno == errno.EOPNOTSUPP
        assert os.preadv(file.fileno(), [bytearray(7)], 0, RWF_HIPRI) == 7
    assert path.read_bytes() == b"content"
