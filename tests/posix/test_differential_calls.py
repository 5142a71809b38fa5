"""Calls of a kind of their own: maps, running programs, inotify, open directories, handles, limits, odd descriptors."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import resource
import signal
import stat
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.sides import STATE, Case, Side
from tests.support.mounts import Site, until
from tests.support.syscalls import AT_EMPTY_PATH, AT_FDCWD, call, libc

CASES: list[Case] = []
PAGE = mmap.PAGESIZE
KEEP, PUNCH, COLLAPSE, ZERO, INSERT, UNSHARE = 1, 2, 8, 16, 32, 64
ELSEWHERE = b"/dev/shm/ckptfs-test-elsewhere"
_AT_SYMLINK_FOLLOW = 0x400


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_same_as_a_plain_directory(same: Callable[..., None], function: Case) -> None:
    """Each case gives the same results, errnos, stats and bytes on both."""
    same(function)


# Maps


@case
def maps_that_are_refused(d: Side) -> None:
    d.write_file("file", b"x" * (2 * PAGE + 100))
    d.write_file("empty", b"")
    os.mkdir(d.path("directory"))
    os.mkfifo(d.path("fifo"))
    read, write, execute = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC
    kinds = (("shared", mmap.MAP_SHARED), ("private", mmap.MAP_PRIVATE), ("neither", 0))
    opens = (("file", os.O_RDONLY), ("file", os.O_WRONLY), ("file", os.O_RDWR), ("file", os.O_RDWR | os.O_APPEND),
             ("file", os.O_PATH), ("empty", os.O_RDWR), ("directory", os.O_RDONLY),
             ("fifo", os.O_RDONLY | os.O_NONBLOCK))  # fmt: skip
    for name, flags in opens:
        fd = d.open(name, flags)
        protections = (0, read, write, read | write, execute, read | execute)
        for (kind, how), protection in itertools.product(kinds, protections):
            for length, offset in ((PAGE, 0), (0, 0), (PAGE, 100), (PAGE, 64 * PAGE)):
                what = f"{name} {flags:#o} {kind} {protection} {length} {offset}"
                address = d_map(d, what, length, protection, how, fd, offset)
                if address:
                    more = read | write
                    d.attempt(f"{what}: mprotect", call, libc.mprotect, address, length, more)
                    libc.munmap(address, length)
        d.close(fd)


def d_map(d: Side, what: str, length: int, protection: int, how: int, fd: int, offset: int) -> int | None:
    """The address, which is not recorded; None when refused."""
    address = libc.mmap(None, length, protection, how, fd, offset)
    refused = address == ctypes.c_void_p(-1).value
    d.see(what, errno.errorcode[ctypes.get_errno()] if refused else "mapped")
    return None if refused else address


@case
def behind_the_end_of_a_map_is_sigbus(d: Side) -> None:
    d.write_file("file", b"x" * (PAGE + 100))

    def touch(offset: int, size: int) -> int:
        """How a process ends that reads there, of a map of three pages, after the file was truncated to *size*."""
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            fd = os.open(d.path("file"), os.O_RDWR)
            address = libc.mmap(None, 3 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
            os.truncate(d.path("file"), size)
            os._exit(ctypes.string_at(address + offset, 1)[0])
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    for size, offset in (
        (PAGE + 100, 0), (PAGE + 100, PAGE + 99), (PAGE + 100, PAGE + 100), (PAGE + 100, 2 * PAGE), (10, 9), (10, 10),
        (10, PAGE), (0, 0), (2 * PAGE, PAGE + 500), (2 * PAGE, 2 * PAGE),
    ):  # fmt: skip
        d.see(f"{size} {offset}", touch(offset, size))
        d.stat("file")


@case
def times_that_maps_change(d: Side) -> None:
    d.write_file("file", b"x" * PAGE)
    fd = d.open("file", os.O_RDWR)
    shared = mmap.mmap(fd, 0)
    before = os.stat(d.path("file"))
    time.sleep(0.02)
    shared[0:3] = b"abc"
    shared.flush()
    os.fsync(fd)
    after = os.stat(d.path("file"))
    d.see("changed", (after.st_mtime_ns > before.st_mtime_ns, after.st_ctime_ns > before.st_ctime_ns))
    shared.close()


# Programs


@case
def a_program_that_runs_cannot_be_written(d: Side) -> None:
    with open("/bin/sleep", "rb") as file:
        d.write_file("sleep", file.read())
    os.chmod(d.path("sleep"), 0o755)
    with subprocess.Popen([d.path("sleep"), "60"]) as running:
        try:
            for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC, os.O_RDONLY, os.O_WRONLY | os.O_APPEND):
                d.close(d.open("sleep", flags))
            d.attempt("truncate", os.truncate, d.path("sleep"), 0)
            d.attempt("chmod", os.chmod, d.path("sleep"), 0o700)
            d.attempt("link", os.link, d.path("sleep"), d.path("hard"))
            d.attempt("rename", os.rename, d.path("sleep"), d.path("renamed"))
            d.write_file("new", b"#!/bin/sh\nexit 3\n")
            d.attempt("replace", os.replace, d.path("new"), d.path("renamed"))
            d.attempt("unlink", os.unlink, d.path("hard"))
        finally:
            running.kill()
    os.chmod(d.path("renamed"), 0o755)
    writer = d.open("renamed", os.O_WRONLY)
    d.attempt("run what is open for writing", lambda: subprocess.run([d.path("renamed")], check=False).returncode)
    d.close(writer)
    d.attempt("run", lambda: subprocess.run([d.path("renamed")], check=False).returncode)


# inotify


def events(fd: int) -> list[tuple[int, str, bytes]]:
    """(watch, what, name) of everything until now; cookies are numbers that differ, so only whether there is one."""
    names = {
        0x1: "access", 0x2: "modify", 0x4: "attrib", 0x8: "close_write", 0x10: "close_nowrite", 0x20: "open",
        0x40: "moved_from", 0x80: "moved_to", 0x100: "create", 0x200: "delete", 0x400: "delete_self",
        0x800: "move_self", 0x8000: "ignored", 0x40000000: "isdir",
    }  # fmt: skip
    found = []
    while True:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return found
        while data:
            watch, mask, cookie, length = struct.unpack_from("iIII", data)
            what = " ".join(name for bit, name in names.items() if mask & bit) + (" cookie" if cookie else "")
            found.append((watch, what, data[16 : 16 + length].rstrip(b"\0")))
            data = data[16 + length :]


@case
def inotify_tells_local_changes(d: Side) -> None:
    os.mkdir(d.path("sub"))
    d.write_file("file", b"x")
    watch = call(libc.inotify_init1, os.O_NONBLOCK)
    for name in (".", "sub", "file"):
        d.attempt(f"watch {name}", call, libc.inotify_add_watch, watch, d.path(name), 0xFFF)
    fds: list[int] = []
    steps: list[tuple[str, Callable[[], object]]] = [
        ("create", lambda: fds.append(os.open(d.path("new"), os.O_CREAT | os.O_RDWR))),
        ("write", lambda: os.write(fds[0], b"data")),
        ("read", lambda: os.pread(fds[0], 4, 0)),
        ("ftruncate", lambda: os.ftruncate(fds[0], 1)),
        ("fsync", lambda: os.fsync(fds[0])),
        ("fchmod", lambda: os.fchmod(fds[0], 0o600)),
        ("close", lambda: os.close(fds.pop())),
        ("utime", lambda: os.utime(d.path("new"))),
        ("chown", lambda: os.chown(d.path("new"), 0, 0)),
        ("setxattr", lambda: os.setxattr(d.path("new"), "user.a", b"b")),
        ("link", lambda: os.link(d.path("new"), d.path("sub/hard"))),
        ("symlink", lambda: os.symlink("x", d.path("link"))),
        ("mkdir", lambda: os.mkdir(d.path("sub/dir"))),
        ("rename", lambda: os.rename(d.path("new"), d.path("renamed"))),
        ("rename away", lambda: os.rename(d.path("renamed"), d.path("sub/moved"))),
        ("rename over", lambda: os.rename(d.path("sub/moved"), d.path("file"))),
        ("rename a directory", lambda: os.rename(d.path("sub/dir"), d.path("dir"))),
        ("list", lambda: sorted(os.listdir(d.path("sub")))),
        ("rmdir", lambda: os.rmdir(d.path("dir"))),
        ("unlink", lambda: os.unlink(d.path("sub/hard"))),
        ("refused", lambda: os.rmdir(d.path("file"))),
        ("rmdir of a watched one", lambda: os.rmdir(d.path("sub"))),
        ("truncate", lambda: os.truncate(d.path("file"), 100)),
        ("move a watched one", lambda: os.rename(d.path("file"), d.path("elsewhere"))),
        ("unlink a link", lambda: os.unlink(d.path("link"))),
    ]
    try:
        for what, step in steps:
            d.attempt(what, step)
            d.see(f"events of {what}", events(watch))
    finally:
        os.close(watch)


# Directories that are open


@case
def open_directories_that_move_and_go(d: Side) -> None:
    os.makedirs(d.path("a/b/c"))
    os.mkdir(d.path("z"))
    fd, deep = d.open("a", os.O_RDONLY), d.open("a/b/c", os.O_PATH | os.O_DIRECTORY)
    d.attempt("rename", os.rename, d.path("a"), d.path("z/moved"))
    d.attempt("create", lambda: os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd)))
    d.attempt("list", lambda: sorted(os.listdir(fd)))
    above = os.open("..", os.O_RDONLY, dir_fd=fd)
    d.attempt("above", lambda: sorted(os.listdir(above)))
    os.close(above)
    d.attempt("deep", lambda: os.mkdir("new", dir_fd=deep))
    d.attempt("far above", lambda: sorted(os.listdir(f"/proc/self/fd/{deep}/../../..")))
    d.attempt("where", lambda: os.readlink(f"/proc/self/fd/{deep}").endswith("/z/moved/b/c"))
    d.attempt("rename by descriptors", lambda: os.rename("new", "here", src_dir_fd=fd, dst_dir_fd=deep))
    d.attempt("link by descriptors", lambda: os.link("b/c/here", "hard", src_dir_fd=fd, dst_dir_fd=deep))
    d.attempt("unlink", lambda: os.unlink("hard", dir_fd=deep))
    d.attempt("rmdir, not empty", lambda: os.rmdir("b", dir_fd=fd))
    d.attempt("rmdir", lambda: os.rmdir("new", dir_fd=deep))
    here = os.getcwd()
    try:
        os.fchdir(deep)
        os.unlink("here")
        os.rmdir(d.path("z/moved/b/c"))
        d.attempt("getcwd", os.getcwd)
        attempts: list[tuple[str, Callable[[], object]]] = [
            ("list", lambda: os.listdir(".")),
            ("create", lambda: os.open("x", os.O_CREAT | os.O_WRONLY)),
            ("stat", lambda: os.stat(".")),
            ("mkdir", lambda: os.mkdir("x")),
            ("above", lambda: sorted(os.listdir(".."))),
            ("chmod", lambda: os.chmod(".", 0o700)),
            ("link", lambda: os.link(d.path("z/moved/b"), "x")),
            ("rename into", lambda: os.rename(d.path("z/moved/b"), "x")),
            ("rmdir", lambda: os.rmdir(".")),
            ("utime", lambda: os.utime(".", ns=(1, 2))),
            ("rename", lambda: os.rename(".", d.path("y"))),
            ("setxattr", lambda: os.setxattr(".", "user.a", b"b")),
        ]
        for what, attempt in attempts:
            d.attempt(f"{what} in a removed one", attempt)
    finally:
        os.chdir(here)


# Descriptors, limits, other file systems


@case
def paths_that_are_not_open(d: Side) -> None:
    """O_PATH: a place, not a file."""
    d.write_file("file", b"content")
    os.mkdir(d.path("directory"))
    os.symlink("file", d.path("link"))
    os.mkfifo(d.path("fifo"))
    for name, flags in (("file", 0), ("directory", 0), ("link", os.O_NOFOLLOW), ("link", 0), ("fifo", 0)):
        fd = d.open(name, os.O_PATH | flags)
        _try_place(d, f"{name} {flags}", fd)
        d.names()
        if os.path.lexists(d.path("new")):
            os.unlink(d.path("new"))
        d.close(fd)


def _try_place(d: Side, label: str, fd: int) -> None:
    path = b"/proc/self/fd/%d" % fd
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("read", lambda: os.read(fd, 1)),
        ("write", lambda: os.write(fd, b"x")),
        ("fstat", lambda: os.fstat(fd)),
        ("fchmod", lambda: os.fchmod(fd, 0o600)),
        ("fchown", lambda: os.fchown(fd, 0, 0)),
        ("ftruncate", lambda: os.ftruncate(fd, 0)),
        ("fsync", lambda: os.fsync(fd)),
        ("getxattr", lambda: os.getxattr(fd, "user.a")),
        ("statfs", lambda: os.fstatvfs(fd).f_namemax),
        ("flock", lambda: fcntl.flock(fd, fcntl.LOCK_EX)),
        ("list", lambda: os.listdir(fd)),
        ("reopen", lambda: os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))),
        ("readlink", lambda: os.readlink(b"", dir_fd=fd)),
        ("dup", lambda: os.close(os.dup(fd))),
        ("link", lambda: call(libc.linkat, -100, path, -100, d.path("new"), _AT_SYMLINK_FOLLOW)),
        ("chmod by its path", lambda: os.chmod(path, 0o640)),
    ]
    for what, attempt in attempts:
        d.attempt(f"{what} {label}", attempt)


@case
def what_lost_its_name_is_opened_again(d: Side) -> None:
    """A descriptor that is only a place keeps an unlinked file, or a removed directory, within reach."""
    d.write_file("file", b"content")
    os.mkdir(d.path("directory"))
    os.mkfifo(d.path("fifo"))
    for name in ("file", "directory", "fifo"):
        place = d.open(name, os.O_PATH)
        os.rmdir(d.path(name)) if name == "directory" else os.unlink(d.path(name))
        d.fstat(place)
        path = f"/proc/self/fd/{place}"
        d.attempt("open", lambda path=path: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
        d.attempt("read", lambda path=path: Path(path).read_bytes() if os.path.isfile(path) else None)
        d.attempt("write", lambda path=path: Path(path).write_bytes(b"new") if os.path.isfile(path) else None)
        d.attempt("chmod", os.chmod, path, 0o600)
        d.fstat(place)
        d.close(place)


@case
def links_of_every_kind_onto_every_kind(d: Side) -> None:
    kinds = (
        "file", "directory", "symlink", "dangling", "loop", "fifo", "socket", "device", "nothing", "file/x", "dirlink"
    )  # fmt: skip
    os.mkdir(d.path("directory"))
    d.write_file("file", b"x")
    for name, target in (("symlink", "file"), ("dangling", "gone"), ("loop", "loop"), ("dirlink", "directory")):
        os.symlink(target, d.path(name))
    os.mkfifo(d.path("fifo"))
    os.mknod(d.path("socket"), stat.S_IFSOCK | 0o600)
    if os.geteuid() == 0:
        os.mknod(d.path("device"), stat.S_IFCHR | 0o600, os.makedev(1, 3))
    for follow in (0, _AT_SYMLINK_FOLLOW):
        for source, target in itertools.product(kinds, (*kinds, "new", "directory/new", "dirlink/", "new/")):
            what = f"{source} {target} {follow}"
            d.attempt(what, call, libc.linkat, -100, d.path(source), -100, d.path(target), follow)
            d.lstat(source)
            for new in ("new", "directory/new"):
                if os.path.lexists(d.path(new)):
                    d.lstat(new)
                    os.unlink(d.path(new))
    d.attempt("flags", call, libc.linkat, -100, d.path("file"), -100, d.path("new"), 0x80000)


@case
def links_of_descriptors(d: Side) -> None:
    """AT_EMPTY_PATH: the open file itself, however it is called now; what lost its last name gets no other."""
    os.mkdir(d.path("directory"))
    os.mkfifo(d.path("fifo"))
    for name, flags in (("file", os.O_RDWR), ("file", os.O_PATH), ("fifo", os.O_PATH), ("directory", os.O_PATH)):
        d.write_file("file", b"content")
        fd = d.open(name, flags)
        os.rename(d.path(name), d.path("renamed"))
        for what in ("renamed", "unlinked"):
            d.attempt(f"{what} {name}", call, libc.linkat, fd, b"", AT_FDCWD, d.path("new"), AT_EMPTY_PATH)
            d.fstat(fd)
            for each in ("new", "renamed"):
                d.lstat(each)
                if os.path.lexists(d.path(each)) and name != "directory":
                    os.unlink(d.path(each))
        d.close(fd)


@case
def renames_of_every_kind_onto_every_kind(d: Side) -> None:
    """What `rename_of_everything_onto_everything` leaves out: special files, hard links, links to directories."""
    kinds = ("file", "hard", "fifo", "socket", "dirlink", "dangling", "empty", "nothing")

    def build() -> None:
        for name in os.listdir(d.path(".")):
            path = d.path(name)
            os.rmdir(path) if stat.S_ISDIR(os.lstat(path).st_mode) else os.unlink(path)
        d.write_file("file", b"x")
        os.link(d.path("file"), d.path("hard"))
        os.mkfifo(d.path("fifo"))
        os.mknod(d.path("socket"), stat.S_IFSOCK | 0o600)
        os.mkdir(d.path("empty"))
        os.symlink("empty", d.path("dirlink"))
        os.symlink("gone", d.path("dangling"))

    targets = (*kinds, "fifo/", "dirlink/", "empty/", "nothing/")
    for source, target in itertools.product(kinds, targets):
        build()
        d.attempt(f"{source} {target}", os.rename, d.path(source), d.path(target))
        d.names()
        for name in kinds:
            d.lstat(name)
    build()


@case
def other_file_systems_are_other_devices(d: Side) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(d.path(".")).st_dev:
        return
    os.mkdir(d.path("directory"))
    d.write_file("file", b"x" * 5000)
    for name in ("file", "directory", "nothing"):
        d.attempt(f"rename {name}", os.rename, d.path(name), ELSEWHERE)
        d.attempt(f"link {name}", os.link, d.path(name), ELSEWHERE)
        d.attempt(f"rename back {name}", os.rename, b"/dev/shm/ckptfs-test-nothing", d.path(name))
    source = d.open("file", os.O_RDONLY)
    other = os.open(ELSEWHERE, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.unlink(ELSEWHERE)
        d.attempt("sendfile", os.sendfile, other, source, 0, 5000)
        d.attempt("and back", os.pread, other, 5000, 0)
    finally:
        os.close(other)


@case
def descriptors_and_positions(d: Side) -> None:
    fd = d.open("file", os.O_CREAT | os.O_RDWR)
    d.attempt("write", os.write, fd, b"0123456789")
    again = os.dup(fd)
    d.attempt("read at the shared position", os.read, again, 5)
    d.attempt("seek", os.lseek, again, 3, os.SEEK_SET)
    d.attempt("read", os.read, fd, 2)
    os.close(again)
    other = d.open("file", os.O_RDONLY)
    d.attempt("a position of its own", os.read, other, 3)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    d.attempt("append from now on", os.pwrite, fd, b"tail", 0)
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    d.attempt("and no longer", os.pwrite, fd, b"HEAD", 0)
    d.attempt("append once", os.pwritev, fd, [b"more"], 0, os.RWF_APPEND)
    d.attempt("write through once", os.pwritev, fd, [b"sync"], 4, os.RWF_DSYNC)
    d.read_file("file")
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("negative length", lambda: os.ftruncate(fd, -5)),
        ("too far", lambda: os.pwrite(fd, b"x", (1 << 63) - 1)),
        ("seek, whence", lambda: os.lseek(fd, 0, 99)),
        ("readahead", lambda: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)),
        ("advice", lambda: os.posix_fadvise(fd, 0, 0, 99)),
        ("syncfs", lambda: call(libc.syncfs, fd)),
        ("sync_file_range", lambda: call(libc.sync_file_range, fd, ctypes.c_long(0), ctypes.c_long(0), 7)),
        ("bad address", lambda: call(libc.pwrite, fd, 8, 100, 0)),
        ("read there", lambda: call(libc.pread, fd, 8, 5, 0)),
        ("fcntl", lambda: fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE),
        ("no terminal", lambda: os.tcgetpgrp(fd)),
    ]
    for what, attempt in attempts:
        d.attempt(what, attempt)
    d.read_file("file")


@case
def limits_of_a_process(d: Side) -> None:
    """RLIMIT_FSIZE: short at the limit, then EFBIG and a signal."""

    def within(side: Side) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        fd = os.open(side.path("file"), os.O_CREAT | os.O_RDWR, 0o644)
        side.attempt("within", os.pwrite, fd, b"x" * 9_000, 0)
        side.attempt("across", os.pwrite, fd, b"y" * 9_000, 5_000)
        side.attempt("behind", os.pwrite, fd, b"z", 10_000)
        side.attempt("truncate behind", os.ftruncate, fd, 10_001)
        side.attempt("truncate to it", os.ftruncate, fd, 10_000)
        side.attempt("truncate by name", os.truncate, side.path("file"), 20_000)
        side.fstat(fd)

    d.as_user("limited", within, 0, 0)
    d.read_file("file")


@case
def locks_of_one_process(d: Side) -> None:
    d.write_file("file", b"x" * 100)
    readable, writable = d.open("file", os.O_RDONLY), d.open("file", os.O_WRONLY)
    for fd, kind in itertools.product((readable, writable), (fcntl.LOCK_SH, fcntl.LOCK_EX)):
        d.attempt("POSIX", fcntl.lockf, fd, kind | fcntl.LOCK_NB, 10, 0)
        d.attempt("flock", fcntl.flock, fd, kind | fcntl.LOCK_NB)
        d.attempt("unlock", fcntl.flock, fd, fcntl.LOCK_UN)
    for start, length in ((0, 0), (-1, 5), (5, -3), (5, -9), ((1 << 63) - 1, 2)):
        d.attempt(f"range {start} {length}", fcntl.lockf, writable, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    os.mkdir(d.path("directory"))
    directory = d.open("directory", os.O_RDONLY)
    d.attempt("flock of a directory", fcntl.flock, directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    d.attempt("shared POSIX lock of a directory", fcntl.lockf, directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    other = d.open("directory", os.O_RDONLY)
    d.attempt("again", fcntl.flock, other, fcntl.LOCK_SH | fcntl.LOCK_NB)


@case
def handles_that_outlive_descriptors(d: Side) -> None:
    """name_to_handle_at and open_by_handle_at, as NFS servers and some watchers use them."""
    if os.geteuid() != 0:
        return
    os.mkdir(d.path("directory"))
    d.write_file("directory/file", b"content")
    mount = os.open(d.path("."), os.O_RDONLY)
    try:
        for name in ("directory", "directory/file"):
            handle, mount_id = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 8 + 128), ctypes.c_int()
            d.attempt("handle", call, libc.name_to_handle_at, -100, d.path(name), handle, ctypes.byref(mount_id), 0)
            fd = call(libc.open_by_handle_at, mount, handle, os.O_RDONLY)
            d.see("the same", os.fstat(fd).st_ino == os.stat(d.path(name)).st_ino)
            os.close(fd)
    finally:
        os.close(mount)


# What may be refused, with the right errno


def test_fallocate_in_every_mode(same: Callable[..., None]) -> None:
    """As on a plain directory or EOPNOTSUPP, never ENOSYS, and a refusal of one file is not remembered for others."""
    modes = (
        0, KEEP, PUNCH | KEEP, PUNCH, COLLAPSE, ZERO, ZERO | KEEP, INSERT, UNSHARE, UNSHARE | KEEP, COLLAPSE | KEEP, 128
    )  # fmt: skip
    ranges = ((0, 4096), (4096, 8192), (100, 5000), (0, 0), (-1, 10), (0, -1), (30_000, 10_000), ((1 << 62), 1 << 62))
    found: list[list[tuple[object, ...]]] = []

    def try_all(d: Side) -> None:
        results: list[tuple[object, ...]] = []
        for mode, (offset, length) in itertools.product(modes, ranges):
            d.write_file("file", bytes(range(256)) * 100)
            fd = os.open(d.path("file"), os.O_RDWR)
            allocate = libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length))
            number = ctypes.get_errno() if allocate else 0
            results.append((mode, offset, length, number, os.fstat(fd).st_size, os.pread(fd, 100_000, 0)))
            os.close(fd)
        d.write_file("file", b"")
        found.append(results)

    same(try_all)
    unchanged = (25_600, bytes(range(256)) * 100)
    for plain, mounted in zip(*found, strict=True):
        assert mounted[3] != errno.ENOSYS
        if mounted != plain:
            assert mounted[3:] in ((errno.EOPNOTSUPP, *unchanged), (plain[3], *unchanged)), (plain[:5], mounted[:5])


def test_acls_and_flags_are_refused(site: Site) -> None:
    """POSIX ACLs say EOPNOTSUPP and inode flags ENOTTY, and what programs do without them works."""
    root = site.mountpoint / "acls"
    root.mkdir()
    path = root / "file"
    path.write_bytes(b"x")
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in ((1, 6, 0), (4, 4, 0), (32, 4, 0)))
    for name in ("system.posix_acl_access", "system.posix_acl_default"):
        for what, value in ((os.setxattr, (acl,)), (os.getxattr, ()), (os.removexattr, ())):
            with pytest.raises(OSError) as refusal:
                what(root, name, *value)
            assert refusal.value.errno == errno.EOPNOTSUPP
    with open(path, "rb") as file, pytest.raises(OSError) as refusal:
        fcntl.ioctl(file, 0x80086601, b"\0" * 8)  # FS_IOC_GETFLAGS
    assert refusal.value.errno == errno.ENOTTY
    subprocess.run(["cp", "-a", path, root / "copy"], check=True, timeout=60)
    assert (root / "copy").read_bytes() == b"x"


def fill(pieces: tuple[tuple[int, int], ...], size: int | None = None) -> Callable[[int], None]:
    """Writes (offset, length) *pieces* and truncates to *size*."""

    def change(fd: int) -> None:
        for offset, length in pieces:
            os.pwrite(fd, b"x" * length, offset)
        if size is not None:
            os.ftruncate(fd, size)

    return change


def allocate(*modes_and_ranges: tuple[int, int, int]) -> Callable[[int], None]:
    """Fills 300,000 bytes, flushed to the disk, and has (mode, offset, length) each allocated or made a hole."""

    def change(fd: int) -> None:
        fill(((0, 300_000),))(fd)
        os.fsync(fd)
        for mode, offset, length in modes_and_ranges:
            call(libc.fallocate, fd, mode, ctypes.c_long(offset), ctypes.c_long(length))

    return change


FILES: dict[str, Callable[[int], None]] = {
    "dense": fill(((0, 300_000),)),
    "sparse": fill(((0, 5), (500_000, 9)), 10_000_000),
    "hole": fill((), 1 << 28),
    "cut": fill(((0, 300_000),), 100),
    "empty": fill(()),
    "punched": allocate((PUNCH | KEEP, 8192, 100_000), (PUNCH | KEEP, 200_001, 50_000)),
    "punched whole": allocate((PUNCH | KEEP, 0, 1 << 20)),
    "allocated": allocate((0, 0, 1 << 20)),
    "allocated behind the end": allocate((KEEP, 0, 1 << 20)),
    "zeroed": allocate((ZERO, 4096, 100_000), (ZERO | KEEP, 300_000, 100_000)),
}


@pytest.mark.parametrize("name", FILES)
def test_blocks_are_what_is_allocated(site: Site, tmp_path: Path, name: str) -> None:
    """st_blocks are the disk's own: while the file is open, when it is closed, and when it is sealed."""
    blocks = []
    for root in (site.mountpoint, tmp_path):
        path = root / name
        with open(path, "wb") as file:
            try:
                FILES[name](file.fileno())
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP and not site.has_passthrough():
                    pytest.skip("fallocate takes passthrough")
                raise
            os.fsync(file.fileno())
            opened = os.fstat(file.fileno()).st_blocks
        blocks.append((opened, os.stat(path).st_blocks))
    assert blocks[0] == blocks[1]
    path = site.mountpoint / name
    until(lambda: os.getxattr(path, STATE) == b"sealed", "the file to be sealed")
    assert os.stat(path).st_blocks == blocks[1][1]
    assert path.read_bytes() == (tmp_path / name).read_bytes()
