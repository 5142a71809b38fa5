"""Modes, owners, times and extended attributes: the mount does what a plain directory does."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest

from tests.posix.sides import Case, Side

CASES: list[Case] = []
SECOND_NS = 1_000_000_000
needs_root = os.geteuid() == 0


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@pytest.mark.parametrize("seal", [False, True], ids=["unsealed", "sealed"])
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_same_as_a_plain_directory(same: Callable[..., None], function: Case, seal: bool) -> None:
    """Each case gives the same results, errnos, stats and bytes on both, whether or not files were sealed between."""
    same(function, seal=seal)


@case
def what_opening_changes(d: Side) -> None:
    """No times, whoever has a file open already: neither reading nor that somebody could write it now."""
    d.write_file("file", b"contents")
    d.sealed("file")
    reader = d.open("file", os.O_RDONLY)
    d.attempt("read", os.pread, reader, 100, 0)
    for flags in (os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDONLY):
        d.changed("open", ["file", reader], lambda flags=flags: d.open("file", flags) > 0)
    d.changed("read again", ["file", reader], lambda: os.pread(reader, 100, 0))


@case
def what_reading_changes(d: Side) -> None:
    """atime, once after each change (relatime)."""
    if os.statvfs(d.root).f_flag & os.ST_NOATIME:
        pytest.skip("reading changes no time where the plain directory is")

    def read(name: str, flags: int = os.O_RDONLY) -> bytes:
        fd = os.open(d.path(name), flags)
        try:
            return os.read(fd, 100)
        finally:
            os.close(fd)

    d.write_file("file", b"contents")
    os.mkdir(d.path("directory"))
    os.symlink("file", d.path("link"))
    for change in (
        lambda: None,
        lambda: d.write_file("file", b"other contents"),
        lambda: os.chmod(d.path("file"), 0o600),
        lambda: os.utime(d.path("file"), ns=(5, 5)),
    ):
        change()
        d.sealed("file")
        d.accessed("look", "file", os.stat, d.path("file"))
        for flags in (os.O_RDONLY, os.O_RDWR, os.O_RDONLY):
            d.accessed("read", "file", read, "file", flags)
    d.accessed("write", "file", d.write_file, "file", b"new")
    for _ in range(2):
        for _ in range(2):
            d.accessed("list", "directory", lambda: sorted(os.listdir(d.path("directory"))))
        d.write_file("directory/entry", b"")
    for _ in range(2):
        d.accessed("readlink", "link", os.readlink, d.path("link"))
    d.accessed("follow", "link", read, "link")


@case
def chmod(d: Side) -> None:
    d.write_file("file", b"x")
    os.mkdir(d.path("directory"))
    d.sealed("file")
    for name in ("file", "directory"):
        for mode in (0, 0o400, 0o777, 0o4755, 0o2755, 0o2745, 0o6777, 0o1644, 0o7777, 0o644):
            d.changed("chmod", [name, "."], lambda name=name, mode=mode: os.chmod(d.path(name), mode))
            d.stat(name)
    fd = d.open("file", os.O_RDWR)
    d.changed("fchmod", ["file"], lambda: os.fchmod(fd, 0o600))
    d.fstat(fd)
    d.attempt("chmod nothing", os.chmod, d.path("nothing"), 0o600)


@case
def chown(d: Side) -> None:
    if os.geteuid() != 0:
        return
    d.write_file("file", b"x")
    os.mkdir(d.path("directory"))
    os.mkfifo(d.path("fifo"))
    os.symlink("file", d.path("link"))
    d.sealed("file")
    for name in ("file", "directory", "fifo"):
        for mode in (0o6777, 0o6767, 0o2644, 0o4644, 0o755):
            for uid, gid in ((1, 2), (-1, 3), (4, -1), (-1, -1), (0, 0)):
                os.chmod(d.path(name), mode)
                d.changed("chown", [name, "."], lambda: os.chown(d.path(name), uid, gid))  # noqa: B023
                d.stat(name)
    d.changed("lchown", ["link", "file"], lambda: os.lchown(d.path("link"), 5, 6))
    d.lstat("link")
    d.attempt("chown through", os.chown, d.path("link"), 7, 8)
    d.stat("file")


@case
def writing_clears_set_id_bits(d: Side) -> None:
    for privileged in (True, False):
        if not privileged and os.geteuid() != 0:
            continue
        for mode in (0o6777, 0o6767, 0o2666, 0o4666):
            for name, change in (
                ("write", lambda side: os.pwrite(fd := side.open("file", os.O_WRONLY), b"y", 0) + fd * 0),
                ("truncate", lambda side: os.truncate(side.path("file"), 1)),
                ("O_TRUNC", lambda side: side.open("file", os.O_WRONLY | os.O_TRUNC) * 0),
                ("nothing", lambda side: side.open("file", os.O_RDWR) * 0),
            ):
                d.write_file("file", b"content")
                os.chmod(d.path("file"), mode)
                d.sealed("file")
                if privileged:
                    d.attempt(name, change, d)
                else:
                    d.as_user(name, lambda side: side.attempt("change", change, side))  # noqa: B023
                d.stat("file")
                d.close_all()


@case
def writing_clears_capabilities(d: Side) -> None:
    """The kernel asks for them when it sees a file written for the first time."""
    if os.geteuid() != 0:
        return
    name, may_bind = "security.capability", bytes.fromhex("0100000200040000000000000000000000000000")
    for number, change in enumerate(
        (
            lambda side, fd: os.pwrite(fd, b"y", 0),
            lambda side, fd: os.ftruncate(fd, 1),
            lambda side, fd: os.fchown(fd, 1, 1),
            lambda side, fd: os.fchmod(fd, 0o755),
            lambda side, fd: os.fallocate(fd, 0, 0, 10) if hasattr(os, "fallocate") else None,
        )
    ):
        file = f"file{number}"
        for written_before in (False, True):
            fd = d.open(file, os.O_RDWR | os.O_CREAT, 0o755)
            if written_before:
                d.attempt("write", os.pwrite, fd, b"content", 0)
            d.attempt("none", os.getxattr, d.path(file), name)
            d.attempt("set", os.setxattr, d.path(file), name, may_bind)
            d.attempt("get", os.getxattr, d.path(file), name)
            d.attempt("change", change, d, fd)
            d.attempt("get again", os.getxattr, d.path(file), name)
            d.close(fd)
            os.unlink(d.path(file))


@case
def set_group_id_directories(d: Side) -> None:
    if os.geteuid() != 0:
        return
    os.mkdir(d.path("shared"))
    os.chown(d.path("shared"), 0, 1234)
    os.chmod(d.path("shared"), 0o2777)

    def make(side: Side) -> None:
        for mode in (0o644, 0o2755, 0o2745, 0o6777):
            side.close(side.open(f"shared/file{mode:o}", os.O_CREAT | os.O_WRONLY, mode))
            side.stat(f"shared/file{mode:o}")
            side.attempt("mkdir", os.mkdir, side.path(f"shared/dir{mode:o}"), mode)
            side.stat(f"shared/dir{mode:o}")
        side.attempt("mkdir below", os.mkdir, side.path("shared/dir644/below"))
        side.attempt("symlink", os.symlink, "x", side.path("shared/link"))
        side.lstat("shared/link")
        side.attempt("mknod", os.mknod, side.path("shared/node"), stat.S_IFREG | 0o2775)
        side.stat("shared/node")
        side.attempt("own a file of another group", os.chmod, side.path("shared/file644"), 0o2755)
        side.stat("shared/file644")
        side.attempt("take the bit off", os.chmod, side.path("shared/dir644"), 0o755)

    make(d)
    d.stat("shared/dir644/below")
    for name in os.listdir(d.path("shared")):
        path = d.path("shared/" + os.fsdecode(name))
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
    for name in ("dir644/below", "dir644", "dir2755", "dir2745", "dir6777"):
        os.rmdir(d.path(f"shared/{name}"))
    d.as_user("a user", make)


@case
def permissions_of_others(d: Side) -> None:
    if os.geteuid() != 0:
        return
    for name, mode in (("open", 0o777), ("closed", 0o700), ("sticky", 0o1777), ("listed", 0o744), ("entered", 0o711)):
        os.mkdir(d.path(name))
        for file, file_mode in (("public", 0o666), ("private", 0o600), ("readable", 0o644)):
            d.write_file(f"{name}/{file}", b"x")
            os.chmod(d.path(f"{name}/{file}"), file_mode)
        os.chmod(d.path(name), mode)

    def try_everything(side: Side) -> None:
        for name in ("open", "closed", "sticky", "listed", "entered"):
            side.names(name)
            for file in ("public", "private", "readable"):
                path = f"{name}/{file}"
                side.stat(path)
                side.read_file(path)
                side.attempt("access", os.access, side.path(path), os.W_OK)
                side.close(side.open(path, os.O_WRONLY))
                side.attempt("chmod", os.chmod, side.path(path), 0o777)
                side.attempt("chown", os.chown, side.path(path), 65534, 65534)
                side.attempt("utime to a time", os.utime, side.path(path), (1, 1))
                side.attempt("utime to now", os.utime, side.path(path))
                side.attempt("setxattr", os.setxattr, side.path(path), "user.x", b"y")
                side.attempt("trusted", os.setxattr, side.path(path), "trusted.x", b"y")
                side.attempt("truncate", os.truncate, side.path(path), 0)
                side.attempt("rename", os.rename, side.path(path), side.path(f"{name}/renamed"))
                side.attempt("rename back", os.rename, side.path(f"{name}/renamed"), side.path(path))
            side.attempt("mkdir", os.mkdir, side.path(f"{name}/new"))
            side.attempt("unlink", os.unlink, side.path(f"{name}/public"))
            side.attempt("own", lambda: side.write_file(f"{name}/own", b"z"))  # noqa: B023
            side.attempt("give away", os.chown, side.path(f"{name}/own"), 1, -1)
            side.attempt("another group", os.chown, side.path(f"{name}/own"), -1, 1)
            side.attempt("same owner", os.chown, side.path(f"{name}/own"), 65534, 65534)
            side.attempt("device", os.mknod, side.path(f"{name}/device"), stat.S_IFCHR | 0o600, os.makedev(1, 3))
            side.attempt("fifo", os.mkfifo, side.path(f"{name}/fifo"))

    d.as_user("a user", try_everything)


@case
def times(d: Side) -> None:
    d.write_file("file", b"x")
    os.mkdir(d.path("directory"))
    os.symlink("file", d.path("link"))
    d.sealed("file")
    moments = [
        (0, 0), (1, 999_999_999), (-1, -1), (-SECOND_NS - 1, 5), (-(10**9) * SECOND_NS, -SECOND_NS),
        ((1 << 31) * SECOND_NS + 7, (1 << 32) * SECOND_NS + 123456789), (9 * 10**18, 9 * 10**18 + 1),
        (1700000000123456789, 1700000001987654321),
    ]  # fmt: skip
    for name in ("file", "directory"):
        for ns in moments:
            d.changed(f"utime {ns}", [name, "."], lambda name=name, ns=ns: os.utime(d.path(name), ns=ns))
            status = os.stat(d.path(name))
            d.see("times", (status.st_atime_ns, status.st_mtime_ns))
    fd = d.open("file", os.O_RDONLY)
    d.attempt("futimens", lambda: os.utime(fd, ns=(111, 222)))
    d.see("times", (os.fstat(fd).st_atime_ns, os.fstat(fd).st_mtime_ns))
    d.attempt("lutimes", lambda: os.utime(d.path("link"), ns=(333, 444), follow_symlinks=False))
    d.see("of the link", os.lstat(d.path("link")).st_mtime_ns)
    d.see("of the file", os.stat(d.path("file")).st_mtime_ns)
    d.attempt("utime of nothing", os.utime, d.path("nothing"))


@case
def times_set_before_and_after_closing(d: Side) -> None:
    for number in range(20):  # sealing runs meanwhile, and must not bring the old time back
        name = f"file{number}"
        fd = d.open(name, os.O_CREAT | os.O_RDWR)
        os.write(fd, b"x" * 100 * number)
        if number % 2:
            os.utime(fd, ns=(10, 20 + number))
        d.close(fd)
        if not number % 2:
            os.utime(d.path(name), ns=(10, 20 + number))
        d.see("at once", os.stat(d.path(name)).st_mtime_ns)
    for number in range(20):
        d.sealed(f"file{number}")
        d.see("later", os.stat(d.path(f"file{number}")).st_mtime_ns)
    fd = d.open("file3", os.O_RDWR)
    d.see("opened for writing", os.fstat(fd).st_mtime_ns)
    os.pwrite(fd, b"y", 0)
    d.see("written", os.fstat(fd).st_mtime_ns > 1000)
    os.utime(fd, ns=(10, 7))
    d.see("set while open", os.fstat(fd).st_mtime_ns)
    d.attempt("a rename keeps it", os.rename, d.path("file3"), d.path("renamed"))
    d.attempt("chmod keeps it", os.chmod, d.path("renamed"), 0o600)
    d.see("kept", os.fstat(fd).st_mtime_ns)
    d.close(fd)
    d.see("closed", os.stat(d.path("renamed")).st_mtime_ns)
    d.sealed("renamed")
    d.see("sealed", os.stat(d.path("renamed")).st_mtime_ns)


@case
def extended_attributes(d: Side) -> None:
    d.write_file("file", b"x")
    os.mkdir(d.path("directory"))
    os.symlink("file", d.path("link"))
    os.mkfifo(d.path("fifo"))
    d.sealed("file")
    for name in ("file", "directory"):
        path = d.path(name)
        d.attempt("none", os.listxattr, path)
        d.attempt("get none", os.getxattr, path, "user.none")
        d.attempt("remove none", os.removexattr, path, "user.none")
        d.attempt("replace none", os.setxattr, path, "user.a", b"1", os.XATTR_REPLACE)
        d.changed("create", [name, "."], lambda path=path: os.setxattr(path, "user.a", b"1", os.XATTR_CREATE))
        d.attempt("create again", os.setxattr, path, "user.a", b"2", os.XATTR_CREATE)
        d.attempt("get", os.getxattr, path, "user.a")
        d.changed("replace", [name], lambda path=path: os.setxattr(path, "user.a", b"22", os.XATTR_REPLACE))
        d.changed("the same again", [name], lambda path=path: os.setxattr(path, "user.a", b"22"))
        d.attempt("set", os.setxattr, path, "user.a", b"333")
        d.attempt("get", os.getxattr, path, "user.a")
        d.attempt("empty value", os.setxattr, path, "user.empty", b"")
        d.attempt("get empty", os.getxattr, path, "user.empty")
        d.attempt("odd name", os.setxattr, path, b"user.\xff\n", b"\x00\xff")
        d.attempt("get odd", os.getxattr, path, b"user.\xff\n")
        d.attempt("longest name", os.setxattr, path, "user." + "n" * 250, b"v")
        d.attempt("name too long", os.setxattr, path, "user." + "n" * 251, b"v")
        d.attempt("get a name too long", os.getxattr, path, "user." + "n" * 251)
        d.attempt("no name", os.setxattr, path, "", b"v")
        d.attempt("only a prefix", os.setxattr, path, "user.", b"v")
        d.attempt("no namespace", os.setxattr, path, "name", b"v")
        d.attempt("unknown namespace", os.setxattr, path, "foo.bar", b"v")
        d.attempt("get of an unknown namespace", os.getxattr, path, "foo.bar")
        d.attempt("remove of an unknown namespace", os.removexattr, path, "foo.bar")
        d.attempt("large", os.setxattr, path, "user.large", b"v" * 2000)
        d.attempt("larger than any", os.setxattr, path, "user.larger", b"v" * 65537)
        d.attempt("list", lambda path=path: sorted(os.listxattr(path)))
        d.changed("remove", [name], lambda path=path: os.removexattr(path, "user.a"))
        d.attempt("list", lambda path=path: sorted(os.listxattr(path)))
        d.attempt("of nothing", os.setxattr, d.path("nothing"), "user.a", b"1")
    for name in ("link", "fifo"):
        d.attempt(
            "user of a special file", lambda name=name: os.setxattr(d.path(name), "user.a", b"1", follow_symlinks=False)
        )
        d.attempt("list", lambda name=name: os.listxattr(d.path(name), follow_symlinks=False))
    if os.geteuid() == 0:
        d.attempt("trusted", os.setxattr, d.path("file"), "trusted.a", b"secret")
        d.attempt("trusted of a link", lambda: os.setxattr(d.path("link"), "trusted.a", b"l", follow_symlinks=False))
        d.attempt("list", lambda: sorted(os.listxattr(d.path("file"))))
        d.as_user("a user", lambda side: side.attempt("list", lambda: sorted(os.listxattr(side.path("file")))))
        d.as_user("a user", lambda side: side.attempt("get", os.getxattr, side.path("file"), "trusted.a"))
    os.link(d.path("file"), d.path("hard"))
    d.attempt("through a hard link", os.getxattr, d.path("hard"), "user.large")
    d.write_file("file", b"rewritten")
    d.attempt("after a rewrite", lambda: sorted(os.listxattr(d.path("file"))))
    os.rename(d.path("file"), d.path("renamed"))
    d.attempt("after a rename", os.getxattr, d.path("renamed"), "user.large")


@case
def space_on_the_disk(d: Side) -> None:
    status = os.statvfs(d.path("."))
    d.see("name", status.f_namemax)
    d.see("sizes", (status.f_frsize, status.f_blocks))
    d.see("room", status.f_bavail > 0 and status.f_bfree >= status.f_bavail and status.f_favail > 0)
    d.write_file("file", b"x" * (1 << 20))
    d.sealed("file")
    fd = d.open("file", os.O_RDONLY)
    os.fsync(fd)
    d.see("blocks", os.stat(d.path("file")).st_blocks)
