"""Several users on one mount: sticky directories, set-id bits, times, attributes, and which refusal comes first."""

from __future__ import annotations

import ctypes
import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.sides import Case, Side
from tests.support.mounts import TINY, Site

CASES: list[Case] = []
ALICE, BOB, GROUP, OTHERS = 1001, 1002, 2000, 3000
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2

_libc = ctypes.CDLL(None, use_errno=True)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="being several users takes root")


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_same_as_a_plain_directory(same: Callable[..., None], function: Case) -> None:
    """Each case gives the same results, errnos, stats and bytes on both."""
    same(function)


def make_as(d: Side, uid: int, gid: int, name: str, mode: int = 0o644) -> None:
    if name.endswith("/"):
        os.mkdir(d.path(name))
    else:
        d.write_file(name, b"content")
    os.chown(d.path(name), uid, gid)
    os.chmod(d.path(name), mode)


@case
def sticky_directories(d: Side) -> None:
    """Who may take a name away: the owner of the file, the owner of the directory, root; nobody else, in no way."""
    for number, (uid, mode) in enumerate(((0, 0o1777), (ALICE, 0o1777), (BOB, 0o1777), (0, 0o777), (BOB, 0o1775))):
        top = f"top{number}"
        make_as(d, uid, GROUP, f"{top}/", mode)
        for owner in (ALICE, BOB):
            for kind in ("file", "other", "target"):
                make_as(d, owner, owner, f"{top}/{kind}{owner}", 0o666)
            make_as(d, owner, owner, f"{top}/dir{owner}/", 0o777)
            make_as(d, owner, owner, f"{top}/full{owner}/", 0o777)
            make_as(d, owner, owner, f"{top}/full{owner}/below", 0o666)
        away = f"from{number}"
        make_as(d, BOB, BOB, f"{away}/", 0o777)
        make_as(d, BOB, BOB, f"{away}/mine")
        d.as_user(f"{uid} {mode:o}", functools.partial(_take_away, top=top, away=away), BOB, GROUP)
        d.names(top)


def _take_away(side: Side, top: str, away: str) -> None:
    for owner in (ALICE, BOB):
        path = side.path
        side.attempt("rename", os.rename, path(f"{top}/file{owner}"), path(f"{top}/new{owner}"))
        side.attempt("over", os.rename, path(f"{away}/mine"), path(f"{top}/target{owner}"))
        side.attempt("unlink", os.unlink, path(f"{top}/other{owner}"))
        side.attempt("rmdir", os.rmdir, path(f"{top}/dir{owner}"))
        side.attempt("not empty", os.rmdir, path(f"{top}/full{owner}"))
        side.attempt("unlink a directory", os.unlink, path(f"{top}/full{owner}"))
        side.attempt("away", os.rename, path(f"{top}/full{owner}"), path(f"{away}/{owner}"))
        side.attempt("link", os.link, path(f"{top}/target{owner}"), path(f"{top}/hard{owner}"))
        side.attempt("write", side.write_file, f"{top}/target{owner}", b"x")
    side.attempt("missing", os.unlink, side.path(f"{top}/nothing"))


@case
def which_refusal_comes_first(d: Side) -> None:
    """Every call on every kind of name, by somebody who may write here and somebody who may not."""
    for name, mode in (("open", 0o777), ("closed", 0o755), ("hidden", 0o700)):
        os.mkdir(d.path(name))
        d.write_file(f"{name}/file", b"x")
        os.makedirs(d.path(f"{name}/full/below"))
        os.mkdir(d.path(f"{name}/empty"))
        os.symlink("nowhere", d.path(f"{name}/dangling"))
        os.symlink("loop", d.path(f"{name}/loop"))
        os.chmod(d.path(f"{name}/file"), 0o644)
        os.chmod(d.path(name), mode)
    names = (
        "file",
        "full",
        "empty",
        "dangling",
        "loop",
        "nothing",
        "file/x",
        "nothing/x",
        "n" * 256,
        "full/..",
        "file/",
    )
    calls: list[tuple[str, Callable[[bytes], object]]] = [
        ("mkdir", os.mkdir), ("rmdir", os.rmdir), ("unlink", os.unlink), ("readlink", os.readlink),
        ("listdir", lambda path: sorted(os.listdir(path))), ("stat", os.stat),
        ("truncate", lambda path: os.truncate(path, 0)),
        ("chmod", lambda path: os.chmod(path, 0o600)), ("chown", lambda path: os.chown(path, 0, 0)),
        ("utime", os.utime), ("mkfifo", os.mkfifo), ("symlink", lambda path: os.symlink("x", path)),
        ("create", lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))),
        ("append", lambda path: os.close(os.open(path, os.O_APPEND | os.O_WRONLY | os.O_NONBLOCK))),
        ("directory", lambda path: os.close(os.open(path, os.O_DIRECTORY))),
        ("device", lambda path: os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(7, 7))),
        ("setxattr", lambda path: os.setxattr(path, "user.a", b"b")),
        ("listxattr", lambda path: sorted(os.listxattr(path))),
        ("acl", lambda path: os.setxattr(path, "nonsense.a", b"b")),
    ]  # fmt: skip

    def try_all(side: Side) -> None:
        for folder in ("open", "closed", "hidden"):
            for name in names:
                for what, call in calls:
                    side.attempt(f"{what} {folder}/{name}", call, side.path(f"{folder}/{name}"))
                for other in names:
                    paths = side.path(f"{folder}/{name}"), side.path(f"closed/{other}")
                    side.attempt(f"rename {folder}/{name} closed/{other}", os.rename, *paths)
                    side.attempt(f"link {folder}/{name} closed/{other}", os.link, *paths)

    d.as_user("bob", try_all, BOB, BOB)


@case
def set_id_bits_and_groups(d: Side) -> None:
    """What a change clears depends on who makes it, and on whether the group may execute."""
    modes = (0o6777, 0o6767, 0o2644)
    changes: list[tuple[str, Callable[[Side], object]]] = [
        ("write", lambda side: _with(side, os.O_WRONLY, lambda fd: os.pwrite(fd, b"y", 0))),
        ("append", lambda side: _with(side, os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, b"y"))),
        ("write nothing", lambda side: _with(side, os.O_WRONLY, lambda fd: os.pwrite(fd, b"", 0))),
        ("ftruncate", lambda side: _with(side, os.O_WRONLY, lambda fd: os.ftruncate(fd, 3))),
        ("truncate to the same", lambda side: os.truncate(side.path("file"), 7)),
        ("copy", lambda side: _with(side, os.O_RDWR, lambda fd: os.copy_file_range(fd, fd, 2, 0, 5))),
        ("chown group", lambda side: os.chown(side.path("file"), -1, GROUP)),
        ("chown nobody", lambda side: os.chown(side.path("file"), -1, -1)),
        ("chmod", lambda side: os.chmod(side.path("file"), 0o6755)),
        ("chmod 2644", lambda side: os.chmod(side.path("file"), 0o2644)),
        ("utime", lambda side: os.utime(side.path("file"), (1, 1))),
        ("setxattr", lambda side: os.setxattr(side.path("file"), "user.a", b"b")),
    ]
    for owner, group in ((BOB, BOB), (BOB, ALICE), (BOB, GROUP)):
        for mode in modes:
            for what, change in changes:
                # Under KILLPRIV_V2 a writer's S_ISGID goes, also where ext4 leaves it to a group that may not execute.
                if what in ("write", "append", "ftruncate", "truncate to the same", "copy") and not mode & 0o010:
                    continue
                make_as(d, owner, group, "file", mode)
                d.as_user(f"{what} {mode:o}", lambda side: side.attempt("it", change, side), BOB, GROUP)  # noqa: B023
                d.stat("file")
                os.unlink(d.path("file"))


def _with(side: Side, flags: int, function: Callable[[int], object]) -> object:
    fd = os.open(side.path("file"), flags)
    try:
        return function(fd)
    finally:
        os.close(fd)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def utimensat(path: bytes, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    both = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
    if _libc.utimensat(-100, path, both, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@case
def times_that_one_may_set(d: Side) -> None:
    """The owner any, who may write the present, others none; UTIME_OMIT leaves one alone."""
    moments = [
        ((1, 2), (3, 4)), ((0, UTIME_OMIT), (5, 6)), ((7, 8), (0, UTIME_OMIT)), ((0, UTIME_OMIT),) * 2,
        ((0, UTIME_NOW),) * 2, ((0, UTIME_NOW), (0, UTIME_OMIT)), ((0, UTIME_NOW), (9, 9)), ((0, 10**9), (0, 0)),
        ((-5, 999_999_999), (1 << 33, 1)), ((0, -1), (0, 0)),
    ]  # fmt: skip

    def try_all(side: Side) -> None:
        for name in ("mine", "writable", "readable"):
            for moment in moments:
                side.attempt(f"{name} {moment}", utimensat, side.path(name), *moment)
                status = os.stat(side.path(name))
                side.see("times", [t if t < 10**18 else "now" for t in (status.st_atime_ns, status.st_mtime_ns)])

    make_as(d, BOB, BOB, "mine", 0o444)
    make_as(d, ALICE, ALICE, "writable", 0o666)
    make_as(d, ALICE, ALICE, "readable", 0o644)
    for name in ("mine", "writable", "readable"):
        os.utime(d.path(name), ns=(11, 12))
    d.as_user("bob", try_all, BOB, BOB)


@case
def attributes_that_one_may_set(d: Side) -> None:
    for name, uid, mode in (
        ("mine", BOB, 0o644),
        ("writable", ALICE, 0o666),
        ("readable", ALICE, 0o644),
        ("closed", 0, 0),
    ):
        make_as(d, uid, uid, name, mode)
        os.setxattr(d.path(name), "user.there", b"value")
        os.setxattr(d.path(name), "trusted.there", b"secret")

    def try_all(side: Side) -> None:
        for name in ("mine", "writable", "readable", "closed"):
            for attribute in ("user.new", "user.there", "trusted.there", "security.new", "nonsense.a", "noprefix"):
                side.attempt(f"get {name} {attribute}", os.getxattr, side.path(name), attribute)
                side.attempt(f"set {name} {attribute}", os.setxattr, side.path(name), attribute, b"1")
                side.attempt(f"remove {name} {attribute}", os.removexattr, side.path(name), attribute)
            side.attempt(f"list {name}", lambda: sorted(os.listxattr(side.path(name))))  # noqa: B023

    os.mkdir(d.path("sticky"))
    os.chmod(d.path("sticky"), 0o1777)
    d.as_user(
        "a user, of a sticky directory",
        lambda side: side.attempt("x", os.setxattr, side.path("sticky"), "user.a", b"b"),
    )
    d.as_user("bob", try_all, BOB, BOB)


@case
def groups_open_directories(d: Side) -> None:
    """Access by group and by nobody's business, for a member and for somebody else, with access(2) of the same mind."""
    for mode in (0o750, 0o770, 0o707, 0o070, 0o130):
        make_as(d, ALICE, GROUP, f"{mode:o}/", mode)
        make_as(d, ALICE, GROUP, f"{mode:o}/file", 0o640)
        os.symlink("file", d.path(f"{mode:o}/link"))

    def try_all(side: Side) -> None:
        for mode in (0o750, 0o770, 0o707, 0o070, 0o130):
            top = f"{mode:o}"
            side.names(top)
            side.read_file(f"{top}/file")
            side.stat(f"{top}/link")
            side.attempt("create", lambda: side.write_file(f"{top}/new", b"x"))  # noqa: B023
            for what in (os.R_OK, os.W_OK, os.X_OK, os.F_OK):
                side.see("access", os.access(side.path(top), what))
                side.see("access", os.access(side.path(f"{top}/file"), what, effective_ids=True))
            fd = os.open(".", os.O_PATH)
            side.attempt("chdir", os.chdir, side.path(top))
            os.fchdir(fd)
            os.close(fd)

    for uid, gid, groups in ((BOB, GROUP, ()), (BOB, BOB, ()), (ALICE, ALICE, ()), (BOB, BOB, (OTHERS, GROUP))):
        d.as_user(f"{uid}:{gid} {groups}", try_all, uid, gid, groups)


@case
def supplementary_groups_of_who_changes(d: Side) -> None:
    """A file may be given to any group one is in and to no other; S_ISGID is only for those who are in its group."""
    changes: list[tuple[str, Callable[[Side], object]]] = [
        (f"chgrp {group}", lambda side, group=group: os.chown(side.path("file"), -1, group))
        for group in (BOB, GROUP, ALICE, OTHERS)
    ]
    changes += [
        (f"chmod {mode:o}", lambda side, mode=mode: os.chmod(side.path("file"), mode))
        for mode in (0o2755, 0o2745, 0o6777)
    ]
    changes += [
        ("chmod and chgrp", lambda side: (os.chmod(side.path("file"), 0o2711), os.chown(side.path("file"), -1, BOB))),
        ("fchmod", lambda side: _with(side, os.O_RDONLY, lambda fd: os.fchmod(fd, 0o2775))),
        ("fchgrp", lambda side: _with(side, os.O_RDONLY, lambda fd: os.fchown(fd, -1, GROUP))),
        ("write", lambda side: _with(side, os.O_WRONLY, lambda fd: os.pwrite(fd, b"y", 0))),
        ("truncate", lambda side: os.truncate(side.path("file"), 3)),
    ]
    for owner, group in ((BOB, BOB), (BOB, GROUP), (BOB, OTHERS), (ALICE, GROUP), (ALICE, OTHERS)):
        for mode, groups in ((0o2777, (GROUP, 4000)), (0o777, (GROUP, 4000)), (0o6777, ()), (0o2770, (4000, GROUP))):
            for what, change in changes:
                make_as(d, owner, group, "file", mode)
                d.as_user(
                    f"{what} of {owner}:{group} {mode:o} in {groups}",
                    lambda side: side.attempt("it", change, side),  # noqa: B023
                    BOB,
                    BOB,
                    groups,
                )
                d.stat("file")
                os.unlink(d.path("file"))


@case
def supplementary_groups_in_set_group_id_directories(d: Side) -> None:
    """What is made there belongs to the directory's group, and is S_ISGID only where its maker is in that group."""
    for group in (BOB, GROUP, OTHERS):
        for mode in (0o2777, 0o777):
            make_as(d, ALICE, group, f"{group} {mode:o}/", mode)

    def make(side: Side) -> None:
        os.umask(0)
        for top in (f"{group} {mode:o}" for group in (BOB, GROUP, OTHERS) for mode in (0o2777, 0o777)):
            for mode in (0o2775, 0o2765, 0o775):
                side.attempt("create", side.open, f"{top}/file {mode:o}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
                side.attempt("mkdir", os.mkdir, side.path(f"{top}/directory {mode:o}"), mode)
                side.attempt("mkfifo", os.mkfifo, side.path(f"{top}/fifo {mode:o}"), mode)
                for kind in ("file", "directory", "fifo"):
                    side.stat(f"{top}/{kind} {mode:o}")

    d.as_user("member", make, BOB, BOB, (GROUP,))


def test_a_mount_of_ones_own_is_closed_to_others(tmp_path: Path) -> None:
    """With --no-allow-other every call of another user says EACCES, whatever the modes, and changes nothing."""
    tmp_path.chmod(0o755)
    (tmp_path / "beside").touch()
    with Site(tmp_path, tuning=TINY) as site:
        site.mount("--owner", "stored", "--no-allow-other")
        top, file = site.mountpoint, site.mountpoint / "file"
        top.chmod(0o777)
        file.write_bytes(b"content")
        file.chmod(0o666)
        opened = os.open(file, os.O_RDONLY)
        attempts: list[tuple[str, Callable[[], object]]] = [
            ("stat", lambda: os.stat("mnt/file")),
            ("stat of the mount", lambda: os.stat("mnt")),
            ("list", lambda: os.listdir("mnt")),
            ("read", lambda: os.open("mnt/file", os.O_RDONLY)),
            ("create", lambda: os.open("mnt/new", os.O_CREAT | os.O_WRONLY)),
            ("mkdir", lambda: os.mkdir("mnt/new")),
            ("unlink", lambda: os.unlink("mnt/file")),
            ("rename", lambda: os.rename("mnt/file", "mnt/new")),
            ("attribute", lambda: os.getxattr("mnt/file", "user.ckptfs.state")),
            ("chdir", lambda: os.chdir("mnt")),
            ("again", lambda: os.open(f"/proc/self/fd/{opened}", os.O_RDONLY)),
        ]
        side = Side(tmp_path, mount=True)
        side.as_user("bob", lambda bob: bob.read_file("beside"))
        assert side.record.pop() == ("bob: read 'beside'", b"")
        side.as_user("bob", lambda bob: [bob.attempt(what, attempt) for what, attempt in attempts], BOB, BOB)
        os.close(opened)
        assert side.record == [(f"bob: {what}", "EACCES") for what, _ in attempts]
        assert [(path.name, path.read_bytes()) for path in top.iterdir()] == [("file", b"content")]
        site.umount()
