"""Directories, links and renames: the mount does what a plain directory does."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable

import pytest

from tests.posix.sides import Case, Side
from tests.support.mounts import Site

CASES: list[Case] = []
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_same_as_a_plain_directory(same: Callable[..., None], function: Case) -> None:
    """Each case gives the same results, errnos, stats and bytes on both."""
    same(function)


def renameat2(source: bytes, target: bytes, flags: int) -> None:
    if _libc.renameat2(-100, source, -100, target, flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@case
def mkdir_and_rmdir(d: Side) -> None:
    d.changed("mkdir", ["."], lambda: os.mkdir(d.path("a")))
    d.changed("mkdir below", ["a", "."], lambda: os.mkdir(d.path("a/b")))
    for name in ("a", "a/b", "a/b/c/d", "a/.", "a/..", "."):
        d.attempt(f"mkdir {name}", os.mkdir, d.path(name))
    d.write_file("file", b"x")
    os.symlink("gone", d.path("dangling"))
    for name in ("file", "file/x", "dangling", "dangling/x"):
        d.attempt(f"mkdir {name}", os.mkdir, d.path(name))
    d.stat(".")
    d.stat("a")
    for name in ("a", "file", "file/x", "dangling", "nothing", "a/b/..", "a/.", "."):
        d.attempt(f"rmdir {name}", os.rmdir, d.path(name))
    d.changed("rmdir", ["a", "."], lambda: os.rmdir(d.path("a/b")))
    d.stat("a")
    d.changed("rmdir", ["."], lambda: os.rmdir(d.path("a")))
    d.stat(".")
    for mode in (0o000, 0o700, 0o777, 0o1777, 0o2755, 0o4755):
        d.attempt("mkdir", os.mkdir, d.path(f"{mode:o}"), mode)
        d.stat(f"{mode:o}")


@case
def unlink(d: Side) -> None:
    d.write_file("file", b"x")
    os.mkdir(d.path("directory"))
    os.symlink("directory", d.path("link"))
    for name in ("directory", "nothing", "file/", "file/x", "link/", "directory/."):
        d.attempt(f"unlink {name}", os.unlink, d.path(name))
    d.changed("unlink a link", [".", "directory"], lambda: os.unlink(d.path("link")))
    d.changed("unlink", ["."], lambda: os.unlink(d.path("file")))
    d.attempt("again", os.unlink, d.path("file"))
    d.names()


@case
def listed_again(d: Side) -> None:
    """The kernel may keep the names it was told: what changes them, here or in another process, shows at once."""
    os.mkdir(d.path("d"))
    fd = d.open("d", os.O_RDONLY | os.O_DIRECTORY)
    for number in range(300):
        d.write_file(f"d/{number}", b"")
    for change in (
        lambda: None,
        lambda: os.unlink(d.path("d/7")),
        lambda: d.write_file("d/new", b"1"),
        lambda: os.rename(d.path("d/new"), d.path("d/newer")),
        lambda: os.rename(d.path("d/8"), d.path("8")),
        lambda: os.rename(d.path("8"), d.path("d/9")),
        lambda: os.mkdir(d.path("d/directory")),
        lambda: os.link(d.path("d/10"), d.path("d/link")),
        lambda: d.as_user("another process", lambda side: side.write_file("d/theirs", b""), uid=0, gid=0),
    ):
        change()
        for _ in range(2):
            d.names("d")
            d.attempt("list what is open", lambda: sorted(os.listdir(fd)))


@case
def a_removed_directory_that_is_still_open(d: Side) -> None:
    os.mkdir(d.path("gone"))
    fd = d.open("gone", os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir(d.path("gone"))
    d.fstat(fd)
    d.attempt("list", os.listdir, fd)
    d.attempt("create", lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    d.attempt("mkdir", lambda: os.mkdir("x", dir_fd=fd))
    d.attempt("symlink", lambda: os.symlink("x", "y", dir_fd=fd))
    d.attempt("stat", lambda: os.stat("x", dir_fd=fd))
    d.attempt("fsync", os.fsync, fd)
    d.attempt("chmod", os.fchmod, fd, 0o700)
    d.fstat(fd)
    os.mkdir(d.path("gone"))
    d.attempt("the new one is another", lambda: os.fstat(fd).st_ino == os.stat(d.path("gone")).st_ino)


@case
def names_of_any_bytes(d: Side) -> None:
    odd = [
        b"\xff\xfe",
        b"new\nline",
        b"\x01\x7f",
        b" ",
        b"-rf",
        b"*",
        b"\\",
        "Ünï".encode(),
        "U\u0308".encode(),
        b"\xc3",
    ]
    odd += [b"a" * 255, b"\xff" * 255, "ä".encode() * 127, b"...", b".hidden"]
    for name in odd:
        d.attempt("create", d.write_file, name, name)
        d.attempt("mkdir", os.mkdir, d.path(name + b"/x"))
    d.names(b".")
    for name in odd:
        d.read_file(name)
        d.attempt("rename", os.rename, d.path(name), d.path(name[:-1] + b"~"))
    d.names(b".")


@case
def names_that_are_too_long(d: Side) -> None:
    long = "n" * 256
    d.write_file("file", b"x")
    for function in (os.mkdir, os.rmdir, os.unlink, os.stat, os.listdir, os.readlink):
        d.attempt(function.__name__, function, d.path(long))
    d.attempt("create", d.write_file, long, b"")
    d.attempt("create below", d.write_file, f"nothing/{long}", b"")
    d.attempt("rename to", os.rename, d.path("file"), d.path(long))
    d.attempt("rename from", os.rename, d.path(long), d.path("file"))
    d.attempt("link to", os.link, d.path("file"), d.path(long))
    d.attempt("symlink to", os.symlink, "file", d.path(long))
    d.attempt("mknod", os.mkfifo, d.path(long))
    d.attempt("very long", os.mkdir, d.path("n" * 2000))
    d.attempt("whole path too long", os.stat, d.path("/".join(["n" * 250] * 20)))
    d.names()


@case
def errors_in_the_middle_of_a_path(d: Side) -> None:
    d.write_file("file", b"x")
    os.mkdir(d.path("directory"))
    os.symlink("loop", d.path("loop"))
    for prefix in ("file", "gone", "loop", "directory/gone", "file/gone"):
        for function in (os.stat, os.lstat, os.mkdir, os.rmdir, os.unlink, os.readlink, os.listdir):
            d.attempt(f"{function.__name__} below {prefix}", function, d.path(f"{prefix}/x"))
        d.attempt("rename", os.rename, d.path(f"{prefix}/x"), d.path("y"))
        d.attempt("rename", os.rename, d.path("file"), d.path(f"{prefix}/x"))
        d.attempt("link", os.link, d.path("file"), d.path(f"{prefix}/x"))
        d.attempt("symlink", os.symlink, "file", d.path(f"{prefix}/x"))
        d.open(f"{prefix}/x", os.O_CREAT | os.O_RDWR)
    d.attempt("list a file", os.listdir, d.path("file"))
    d.names()


@case
def rename_of_everything_onto_everything(d: Side) -> None:
    kinds = ("file", "other", "empty", "full", "link", "nothing", "full/inner")

    def build() -> None:
        for top, folders, files in os.walk(d.path("w"), topdown=False):
            for name in files:
                os.unlink(os.path.join(top, name))
            for name in folders:
                path = os.path.join(top, name)
                os.unlink(path) if os.path.islink(path) else os.rmdir(path)
        if not os.path.exists(d.path("w")):
            os.mkdir(d.path("w"))
        for name in ("empty", "full", "full/deeper"):
            os.mkdir(d.path(f"w/{name}"))
        for name in ("file", "other", "full/inner"):
            d.write_file(f"w/{name}", name.encode())
        os.symlink("file", d.path("w/link"))

    for flags in (0, NOREPLACE, EXCHANGE):
        for source in kinds:
            for target in kinds:
                build()
                what = f"rename {source} {target} {flags}"
                d.attempt(what, renameat2, d.path(f"w/{source}"), d.path(f"w/{target}"), flags)
                for name in (*kinds, "."):
                    d.lstat(f"w/{name}")
                d.names("w")
                d.names("w/full")
    build()
    for flags in (NOREPLACE | EXCHANGE, WHITEOUT | EXCHANGE, 64):
        d.attempt(f"flags {flags}", renameat2, d.path("w/file"), d.path("w/other"), flags)
    for source, target in (
        (".", "x"),
        ("empty", "."),
        ("empty", "empty/x"),
        ("full", "full/deeper/x"),
        ("empty", "full/.."),
    ):
        d.attempt(f"{source} {target}", os.rename, d.path(f"w/{source}"), d.path(f"w/{target}"))
    d.attempt("exchange with an ancestor", renameat2, d.path("w/full"), d.path("w/full/deeper"), EXCHANGE)
    for source, target in (("file/", "x"), ("empty/", "x/"), ("file", "y/"), ("link/", "z")):
        d.attempt(f"{source} {target}", os.rename, d.path(f"w/{source}"), d.path(f"w/{target}"))


@case
def times_that_rename_changes(d: Side) -> None:
    for name in ("a", "b", "a/inner", "b/inner"):
        os.mkdir(d.path(name))
    d.write_file("a/file", b"x")
    d.write_file("b/file", b"y")
    watched: list[str | bytes | int] = ["a", "b", "b/moved", "b/file", "b/inner", "a/inner", "."]
    d.changed("within", watched, lambda: os.rename(d.path("a/file"), d.path("a/moved")))
    d.changed("across", watched, lambda: os.rename(d.path("a/moved"), d.path("b/moved")))
    d.changed("over", watched, lambda: os.rename(d.path("b/moved"), d.path("b/file")))
    d.changed("directory", watched, lambda: os.rename(d.path("a/inner"), d.path("b/inner")))
    d.changed("exchange", watched, lambda: renameat2(d.path("b/inner"), d.path("a"), EXCHANGE))
    d.changed("to itself", watched, lambda: os.rename(d.path("b/file"), d.path("b/file")))
    os.link(d.path("b/file"), d.path("b/moved"))
    d.changed("to another name of itself", watched, lambda: os.rename(d.path("b/file"), d.path("b/moved")))
    d.names("b")
    for name in (".", "a", "b", "b/inner"):
        d.stat(name)


@case
def directory_times_change_when_entries_do_and_only_then(d: Side) -> None:
    os.mkdir(d.path("w"))
    d.write_file("w/file", b"x")
    os.mkdir(d.path("w/sub"))
    watch: list[str | bytes | int] = ["w", "."]
    steps: list[tuple[str, Callable[[], object]]] = [
        ("write", lambda: d.write_file("w/file", b"longer")),
        ("chmod", lambda: os.chmod(d.path("w/file"), 0o600)),
        ("utime", lambda: os.utime(d.path("w/file"), ns=(5, 6))),
        ("setxattr", lambda: os.setxattr(d.path("w/file"), "user.a", b"b")),
        ("truncate", lambda: os.truncate(d.path("w/file"), 1)),
        ("create below", lambda: d.write_file("w/sub/file", b"x")),
        ("list", lambda: sorted(os.listdir(d.path("w")))),
        ("create", lambda: d.write_file("w/new", b"")),
        ("mkdir", lambda: os.mkdir(d.path("w/dir"))),
        ("symlink", lambda: os.symlink("x", d.path("w/link"))),
        ("link", lambda: os.link(d.path("w/file"), d.path("w/hard"))),
        ("mkfifo", lambda: os.mkfifo(d.path("w/fifo"))),
        ("rename", lambda: os.rename(d.path("w/new"), d.path("w/renamed"))),
        ("unlink", lambda: os.unlink(d.path("w/renamed"))),
        ("unlink a hard link", lambda: os.unlink(d.path("w/hard"))),
        ("rmdir", lambda: os.rmdir(d.path("w/dir"))),
        ("fails", lambda: os.mkdir(d.path("w/sub"))),
        ("fails too", lambda: os.rmdir(d.path("w/sub"))),
        ("chmod of itself", lambda: os.chmod(d.path("w"), 0o700)),
        ("setxattr of itself", lambda: os.setxattr(d.path("w"), "user.a", b"b")),
        ("move away", lambda: os.rename(d.path("w/fifo"), d.path("fifo"))),
    ]
    for what, step in steps:
        d.changed(what, watch, step)


@case
def hard_links(d: Side) -> None:
    d.write_file("file", b"content")
    os.mkdir(d.path("directory"))
    os.symlink("file", d.path("link"))
    os.mkfifo(d.path("fifo"))
    d.changed("link", ["file", "."], lambda: os.link(d.path("file"), d.path("hard")))
    for source, target in (
        ("file", "hard"), ("directory", "x"), ("nothing", "x"), ("file", "directory"),
        ("file", "nothing/x"), ("file", "link"),
    ):  # fmt: skip
        d.attempt(f"link {source} {target}", os.link, d.path(source), d.path(target))
    d.attempt("link of a link", os.link, d.path("link"), d.path("link2"), follow_symlinks=False)
    d.attempt("link through a link", os.link, d.path("link"), d.path("hard3"), follow_symlinks=True)
    d.attempt("link of a fifo", os.link, d.path("fifo"), d.path("fifo2"))
    for name in ("file", "hard", "hard3", "fifo2"):
        d.stat(name)
    d.lstat("link2")
    d.see("same inode", len({os.stat(d.path(name)).st_ino for name in ("file", "hard", "hard3")}))
    with open(d.path("hard"), "ab") as file:
        file.write(b" more")
    d.read_file("file")
    os.chmod(d.path("file"), 0o600)
    d.stat("hard3")
    d.changed("unlink one", ["hard"], lambda: os.unlink(d.path("file")))
    d.stat("hard")
    d.write_file("new", b"replacing")
    d.changed("replace one", ["hard3"], lambda: os.replace(d.path("new"), d.path("hard")))
    d.read_file("hard3")
    d.read_file("hard")
    d.stat("hard3")


@case
def symbolic_links(d: Side) -> None:
    os.mkdir(d.path("directory"))
    d.write_file("directory/file", b"content")
    targets = {
        "relative": b"directory/file", "absolute": d.path("directory/file"), "dangling": b"gone", "up": b"../../../x",
        "long": b"t" * 255, "longest": b"l/" * 2047 + b"l", "odd": b"\xff\n ", "dot": b".", "self": b"self",
        "l" * 255: b"directory", "empty": b"", "too long": b"t" * 4096,
    }  # fmt: skip
    for name, target in targets.items():
        d.attempt(f"symlink {name}", os.symlink, target, d.path(name))
        if name != "absolute":  # differs in its target, and so in its size
            d.attempt(f"readlink {name}", os.readlink, d.path(name))
            d.lstat(name)
        d.stat(name)
    d.attempt("read", d.read_file, "relative")
    d.attempt("read", d.read_file, "absolute")
    d.attempt("list through", lambda: os.listdir(d.path("l" * 255)))
    d.attempt("readlink of a file", os.readlink, d.path("directory/file"))
    d.attempt("readlink of a directory", os.readlink, d.path("directory"))
    d.attempt("exists", os.symlink, "x", d.path("dangling"))
    d.attempt("chmod through", os.chmod, d.path("dangling"), 0o600)
    d.attempt("lchown", os.lchown, d.path("dangling"), 1, 2)
    d.attempt("utime of a link", lambda: os.utime(d.path("dangling"), ns=(1, 2), follow_symlinks=False))
    d.lstat("dangling")
    d.see("mtime", os.lstat(d.path("dangling")).st_mtime_ns)
    os.symlink("new", d.path("next"))
    d.attempt("replace a link", os.replace, d.path("next"), d.path("dangling"))
    d.attempt("readlink", os.readlink, d.path("dangling"))
    for number in range(45):
        os.symlink(f"chain{number + 1}", d.path(f"chain{number}"))
    d.write_file("chain45", b"end")
    d.stat("chain0")
    d.stat("chain5")
    d.stat("chain6")
    os.unlink(d.path("absolute"))


@case
def special_files(d: Side) -> None:
    d.changed("mkfifo", ["."], lambda: os.mkfifo(d.path("fifo"), 0o640))
    for name, mode, device in (
        ("regular", stat.S_IFREG | 0o600, 0), ("zero", stat.S_IFCHR | 0o666, os.makedev(1, 5)),
        ("block", stat.S_IFBLK | 0o600, os.makedev(259, 70000)), ("socket", stat.S_IFSOCK | 0o700, 0),
        ("directory", stat.S_IFDIR | 0o700, 0), ("fifo", stat.S_IFIFO | 0o600, 0), ("nofmt", 0o600, 0),
    ):  # fmt: skip
        d.attempt(f"mknod {name}", os.mknod, d.path(name), mode, device)
        d.lstat(name)
    d.write_file("regular", b"written")
    d.read_file("regular")
    d.attempt("no reader", os.open, d.path("fifo"), os.O_WRONLY | os.O_NONBLOCK)
    writer = threading.Thread(target=d.write_file, args=("fifo", b"through the fifo"))
    writer.start()
    d.read_file("fifo")
    writer.join()
    d.open("socket", os.O_RDONLY)
    d.attempt("truncate a fifo", os.truncate, d.path("fifo"), 0)
    d.attempt("rename", os.rename, d.path("fifo"), d.path("pipe"))
    d.attempt("unlink", os.unlink, d.path("pipe"))
    d.names()


@case
def a_unix_socket(d: Side) -> None:
    import socket

    here = os.getcwd()
    os.chdir(d.root)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind("socket")
            server.listen()
            client.connect("socket")
            with server.accept()[0] as accepted:
                client.sendall(b"hello")
                d.see("received", accepted.recv(5))
        d.lstat("socket")
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect("socket")
            except OSError as error:
                d.see("nobody listens", error.errno)
    finally:
        os.chdir(here)


@case
def deletion_while_listing(d: Side) -> None:
    os.mkdir(d.path("many"))
    for number in range(500):
        d.write_file(f"many/{number}", b"")
    seen = 0
    with os.scandir(d.path("many")) as listing:
        for entry in listing:
            os.unlink(entry.path)
            seen += 1
    d.see("deleted", seen)
    d.names("many")
    d.attempt("rmdir", os.rmdir, d.path("many"))


@case
def what_stays_is_listed_once_whatever_happens_meanwhile(d: Side) -> None:
    os.mkdir(d.path("many"))
    for number in range(300):
        d.write_file(f"many/stays{number}", b"")
        d.write_file(f"many/goes{number}", b"")
    seen: list[bytes] = []
    with os.scandir(d.path("many")) as listing:
        for count, entry in enumerate(listing):
            seen.append(entry.name)
            if count < 300:
                os.unlink(d.path(f"many/goes{count}"))
                d.write_file(f"many/comes{count}", b"")
                if count % 3 == 0:
                    os.rename(d.path(f"many/comes{count}"), d.path(f"many/renamed{count}"))
    d.see("stays", sorted(name for name in seen if name.startswith(b"stays")))
    d.see("twice", len(seen) - len(set(seen)))
    for count in range(300):  # an old listing must not bring names back
        for name in ("goes", "comes", "renamed"):
            d.see(f"{name}{count}", os.path.exists(d.path(f"many/{name}{count}")))
    d.names("many")


@case
def a_huge_directory_and_positions_in_it(d: Side) -> None:
    os.mkdir(d.path("huge"))
    for number in range(5000):
        os.symlink("x", d.path(f"huge/entry {number:05}"))
    d.see("names", sorted(_read_with_positions(d.path("huge"))))
    d.see("kinds", sorted({(entry.is_symlink(), entry.is_dir()) for entry in os.scandir(d.path("huge"))}))
    d.attempt("find one", os.lstat, d.path("huge/entry 04999"))


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64), ("off", ctypes.c_int64), ("reclen", ctypes.c_ushort), ("type", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )  # fmt: skip


def _read_with_positions(path: bytes) -> list[bytes]:
    """Every name of a directory, read in jumps: telldir at each 500th, then stretch by stretch, the last one first."""
    _libc.opendir.restype = ctypes.c_void_p
    _libc.readdir.restype = ctypes.POINTER(_Dirent)
    _libc.telldir.restype = ctypes.c_long
    for function in (_libc.readdir, _libc.telldir, _libc.closedir):
        function.argtypes = (ctypes.c_void_p,)
    _libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
    stream = _libc.opendir(path)
    try:
        positions, total = [], 0
        while True:
            if total % 500 == 0:
                positions.append(_libc.telldir(stream))
            if not _libc.readdir(stream):
                break
            total += 1
        found: list[bytes] = []
        for index, position in reversed(list(enumerate(positions))):
            _libc.seekdir(stream, position)
            for _ in range(min(500, total - 500 * index)):
                found.append(_libc.readdir(stream).contents.name)
        return found
    finally:
        _libc.closedir(stream)


@case
def deep_paths(d: Side) -> None:
    deep = "/".join(["d"] * 200)
    d.attempt("makedirs", os.makedirs, d.path(deep))
    d.write_file(f"{deep}/file", b"deep")
    d.read_file(f"{deep}/file")
    d.attempt("rename the top", os.rename, d.path("d"), d.path("e"))
    d.read_file("e" + deep[1:] + "/file")
    d.attempt("into itself", os.rename, d.path("e"), d.path("e" + deep[1:] + "/x"))
    d.attempt("removedirs", lambda: os.unlink(d.path("e" + deep[1:] + "/file")))


@case
def many_threads_make_the_same_directories(d: Side) -> None:
    failures: list[BaseException] = []

    def make() -> None:
        try:
            os.makedirs(d.path("a/b/c/d"), exist_ok=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    d.see("failures", failures)
    d.stat("a/b/c")


@case
def paths_with_dots_and_slashes(d: Side) -> None:
    os.makedirs(d.path("a/b"))
    d.write_file("a/file", b"x")
    for name in (
        "a/../a//b/./..//file",
        "a/b/../../a/file",
        "./a/",
        "a/file/",
        "a/file/.",
        "a/file/..",
        "a/gone/..",
        "a/b/..",
    ):
        d.stat(name)
    d.see("parent", os.stat(d.path("a/b/..")).st_ino == os.stat(d.path("a")).st_ino)
    d.see("dots", [os.stat(d.path(name)).st_ino == os.stat(d.path("a")).st_ino for name in ("a/.", "a/b/..")])


def test_whiteouts_are_refused(site: Site) -> None:
    """RENAME_WHITEOUT, which only overlayfs needs, says EINVAL, and nothing is renamed."""
    path = site.mountpoint / "whiteout"
    path.write_bytes(b"x")
    for flags in (WHITEOUT, WHITEOUT | NOREPLACE):
        with pytest.raises(OSError) as refusal:
            renameat2(os.fsencode(path), os.fsencode(path.with_name("renamed")), flags)
        assert refusal.value.errno == errno.EINVAL
    assert path.read_bytes() == b"x" and not path.with_name("renamed").exists()
