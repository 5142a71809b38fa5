"""Opening, reading, writing, truncating and mapping files: the mount does what a plain directory does."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import tempfile
from collections.abc import Callable

import pytest

from tests.posix.sides import Case, Side
from tests.support.mounts import Site

CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@pytest.mark.parametrize("seal", [False, True], ids=["unsealed", "sealed"])
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_same_as_a_plain_directory(same: Callable[..., None], function: Case, seal: bool) -> None:
    """Each case gives the same results, errnos, stats and bytes on both, whether or not files were sealed between."""
    same(function, seal=seal)


@case
def open_with_every_combination_of_flags(d: Side) -> None:
    bits = (os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_DIRECTORY, os.O_NOFOLLOW)
    os.mkdir(d.path("directory"))
    os.symlink("file", d.path("link"))
    os.symlink("nothing", d.path("dangling"))
    d.write_file("file", b"content")
    for chosen in itertools.product((0, 1), repeat=len(bits)):
        extra = sum(bit for bit, use in zip(bits, chosen, strict=True) if use)
        for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            for name in ("file", "new", "directory", "link", "dangling", "file/below", "gone/below"):
                fd = d.open(name, access | extra)
                if fd >= 0:
                    d.fstat(fd)
                    d.close(fd)
            d.names()
            d.stat("file")
            for name in ("new", "nothing"):
                if os.path.lexists(d.path(name)):
                    os.unlink(d.path(name))
            if os.stat(d.path("file")).st_size == 0:
                d.write_file("file", b"content")


@case
def open_through_links_to_links(d: Side) -> None:
    os.symlink("b", d.path("a"))
    os.symlink("a", d.path("b"))
    for flags in (
        os.O_RDONLY,
        os.O_CREAT | os.O_WRONLY,
        os.O_CREAT | os.O_EXCL | os.O_WRONLY,
        os.O_NOFOLLOW,
        os.O_PATH,
    ):
        d.open("a", flags)


@case
def mode_and_umask_of_a_new_file(d: Side) -> None:
    for mask in (0, 0o022, 0o077, 0o777):
        os.umask(mask)
        for mode in (0o000, 0o644, 0o777, 0o4755, 0o2755, 0o1777):
            name = f"{mask:o}-{mode:o}"
            d.close(d.open(name, os.O_CREAT | os.O_WRONLY, mode))
            d.stat(name)
            os.umask(mask)
    os.umask(0o022)


@case
def a_descriptor_opened_for_one_thing_refuses_the_other(d: Side) -> None:
    d.write_file("file", b"content")
    reader, writer = d.open("file", os.O_RDONLY), d.open("file", os.O_WRONLY)
    d.attempt("write", os.write, reader, b"x")
    d.attempt("read", os.read, writer, 1)
    d.attempt("ftruncate", os.ftruncate, reader, 0)
    d.attempt("truncate below 0", os.ftruncate, writer, -1)
    d.attempt("pread before 0", os.pread, reader, 1, -1)
    d.attempt("seek before 0", os.lseek, reader, -1, os.SEEK_SET)
    d.read_file("file")


@case
def write_and_read_anywhere(d: Side) -> None:
    fd = d.open("file", os.O_CREAT | os.O_RDWR)
    for offset, length in (
        (0, 10),
        (5, 10),
        (100, 1),
        (99, 3),
        (4095, 2),
        (20000, 5000),
        (8192, 4096),
        (0, 0),
        (1 << 20, 3),
    ):
        d.attempt("pwrite", os.pwrite, fd, bytes([length % 251]) * length, offset)
        d.fstat(fd)
        d.attempt("pread", os.pread, fd, 30000, max(0, offset - 10))
    d.attempt("read past the end", os.pread, fd, 10, 1 << 30)
    d.attempt("seek", os.lseek, fd, 98, os.SEEK_SET)
    d.attempt("readv", lambda: [os.readv(fd, parts := [bytearray(3), bytearray(5)]), *map(bytes, parts)])
    d.attempt("writev", os.writev, fd, [b"one", b"", b"three"])
    d.attempt("tell", os.lseek, fd, 0, os.SEEK_CUR)
    d.attempt("end", os.lseek, fd, -3, os.SEEK_END)
    d.attempt("write at the end", os.write, fd, b"abcdef")
    d.close(fd)
    d.sealed("file")
    d.read_file("file")
    fd = d.open("file", os.O_RDWR)
    d.attempt("in place", os.pwrite, fd, b"replaced", 100)
    d.fstat(fd)
    d.attempt("all", os.pread, fd, 2 << 20, 0)
    d.close(fd)
    d.stat("file")


@case
def append_through_two_descriptors(d: Side) -> None:
    d.write_file("log", b"begin:")
    d.sealed("log")
    one, two = (d.open("log", os.O_WRONLY | os.O_APPEND) for _ in range(2))
    for round_number in range(5):
        d.attempt("one", os.write, one, b"1" * round_number)
        d.attempt("two", os.write, two, b"2" * 10)
        d.fstat(one)
    d.attempt("pwrite on an appender appends", os.pwrite, one, b"at 0?", 0)
    d.attempt("truncate", os.ftruncate, two, 3)
    d.attempt("append after that", os.write, one, b"end")
    d.read_file("log")


@case
def truncate_both_ways_by_path_and_descriptor(d: Side) -> None:
    d.write_file("file", bytes(range(256)) * 64)
    fd = d.open("file", os.O_RDWR)
    d.sealed("file")
    for size in (20000, 16384, 100, 5000, 0, 12345, 12345):
        d.attempt("truncate", os.truncate, d.path("file"), size)
        d.fstat(fd)
        d.read_file("file")
        d.attempt("ftruncate", os.ftruncate, fd, size // 2)
        d.attempt("write", os.pwrite, fd, b"mark", size // 4)
        d.stat("file")
        d.read_file("file")
    os.mkdir(d.path("directory"))
    d.attempt("truncate a directory", os.truncate, d.path("directory"), 0)
    d.attempt("truncate nothing", os.truncate, d.path("nothing"), 0)
    d.attempt("truncate below a file", os.truncate, d.path("file/x"), 0)
    d.attempt("truncate beyond every limit", os.truncate, d.path("file"), (1 << 63) - 1)
    d.stat("file")


@case
def times_that_truncation_changes(d: Side) -> None:
    d.write_file("file", b"x" * 100)
    d.sealed("file")
    for size in (100, 50, 50, 0, 0):
        d.changed(f"truncate to {size}", ["file", "."], lambda size=size: os.truncate(d.path("file"), size))
    fd = d.open("file", os.O_RDWR)
    for size in (100, 50, 50, 0, 0):
        d.changed(f"ftruncate to {size}", ["file", "."], lambda size=size: os.ftruncate(fd, size))
    d.changed("O_TRUNC of nothing", ["file"], lambda: d.close(d.open("file", os.O_WRONLY | os.O_TRUNC)))


@case
def holes_are_zeros(d: Side) -> None:
    fd = d.open("file", os.O_CREAT | os.O_RDWR)
    d.attempt("far", os.pwrite, fd, b"end", 300000)
    d.attempt("middle", os.pwrite, fd, b"middle", 150000)
    d.attempt("longer", os.ftruncate, fd, 400000)
    d.attempt("all", os.pread, fd, 500000, 0)
    d.close(fd)
    d.sealed("file")
    d.read_file("file")
    d.attempt("shorter", os.truncate, d.path("file"), 150003)
    d.sealed("file")
    d.attempt("longer again", os.truncate, d.path("file"), 160000)
    d.read_file("file")


@case
def holes_are_found(d: Side) -> None:
    for name, written in (("sparse", (100_000, 500_000, 999_990)), ("full", (0,)), ("hole", ()), ("empty", None)):
        fd = d.open(name, os.O_CREAT | os.O_WRONLY)
        if written is not None:
            os.ftruncate(fd, 1_000_000)
        for offset in written or ():
            os.pwrite(fd, b"data" * (250_000 if name == "full" else 2), offset)
        d.close(fd)
        d.sealed(name)
        fd = d.open(name, os.O_RDONLY)
        for offset in (0, 1, 99_999, 100_000, 100_001, 131_072, 499_999, 999_999, 1_000_000, 1_000_001, -1):
            for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                d.attempt(f"seek from {offset}", os.lseek, fd, offset, whence)
                d.see("position", os.lseek(fd, 0, os.SEEK_CUR))


@case
def rewriting_with_o_trunc(d: Side) -> None:
    for round_number in range(4):
        d.write_file("file", b"round %d" % round_number * 1000)
        d.sealed("file")
        reader = d.open("file", os.O_RDONLY)
        d.write_file("file", b"new %d" % round_number)
        d.attempt("an open reader sees the new bytes", os.pread, reader, 100, 0)
        d.fstat(reader)
        d.close(reader)
        d.read_file("file")
    d.changed("O_TRUNC", ["file", "."], lambda: d.close(d.open("file", os.O_WRONLY | os.O_TRUNC)))
    d.write_file("file", b"abc")
    d.sealed("file")
    d.close(d.open("file", os.O_RDONLY | os.O_TRUNC))
    d.stat("file")
    d.read_file("file")


@case
def a_reader_that_stays_while_writers_come_and_go(d: Side) -> None:
    d.write_file("file", b"first")
    reader = d.open("file", os.O_RDONLY)
    for number in range(4):
        d.sealed("file")
        writer = d.open("file", os.O_WRONLY)
        d.attempt("write", os.pwrite, writer, b"writer %d" % number, 10 * number)
        d.fstat(reader)
        d.attempt("read", os.pread, reader, 100, 0)
        d.close(writer)
        d.sealed("file")
        d.attempt("truncate", os.truncate, d.path("file"), 10 * number + 5)
        d.fstat(reader)
        d.attempt("read", os.pread, reader, 100, 0)
    d.close(reader)
    d.sealed("file")
    d.stat("file")
    d.read_file("file")


@case
def a_writer_that_wrote_nothing_yet(d: Side) -> None:
    d.write_file("file", b"content")
    writer = d.open("file", os.O_RDWR)
    d.sealed("file")
    d.changed("write", ["file"], lambda: os.pwrite(writer, b"more", 100))
    d.fstat(writer)
    d.attempt("read", os.pread, writer, 200, 0)
    d.close(writer)
    d.read_file("file")


@case
def unlinked_while_open(d: Side) -> None:
    os.mkdir(d.path("directory"))
    d.write_file("directory/file", b"content" * 1000)
    d.sealed("directory/file")
    fd = d.open("directory/file", os.O_RDWR)
    d.changed("unlink", ["directory", fd], lambda: os.unlink(d.path("directory/file")))
    d.names("directory")
    d.fstat(fd)
    d.attempt("read", os.pread, fd, 10000, 0)
    d.attempt("write", os.pwrite, fd, b"written after", 3)
    d.attempt("read", os.pread, fd, 10000, 0)
    d.attempt("ftruncate", os.ftruncate, fd, 20)
    d.fstat(fd)
    d.attempt("fsync", os.fsync, fd)
    d.attempt("fchmod", os.fchmod, fd, 0o600)
    d.attempt("futimens", lambda: os.utime(fd, ns=(1, 2)))
    d.fstat(fd)
    d.attempt("setxattr", os.setxattr, fd, "user.late", b"value")
    d.attempt("getxattr", os.getxattr, fd, "user.late")
    d.attempt("link back", os.link, f"/proc/self/fd/{fd}", d.path("back"), follow_symlinks=True)
    d.attempt("open again", lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)))
    d.write_file("directory/file", b"another")
    d.attempt("the old one", os.pread, fd, 100, 0)
    d.attempt("rmdir of a directory with another file", os.rmdir, d.path("directory"))
    os.unlink(d.path("directory/file"))
    d.attempt("rmdir", os.rmdir, d.path("directory"))
    d.attempt("write without a directory", os.pwrite, fd, b"still", 0)
    d.close(fd)


@case
def replaced_while_open(d: Side) -> None:
    d.write_file("target", b"old")
    d.write_file("source", b"new bytes")
    d.sealed("target", "source")
    old, moving = d.open("target", os.O_RDWR), d.open("source", os.O_RDWR)
    d.changed("rename", ["target", ".", old], lambda: os.rename(d.path("source"), d.path("target")))
    d.fstat(old)
    d.fstat(moving)
    d.attempt("old", os.pread, old, 100, 0)
    d.attempt("write to the moved one", os.pwrite, moving, b"NEW", 0)
    d.attempt("write to the old one", os.pwrite, old, b"OLD", 0)
    d.read_file("target")
    d.close(old)
    d.close(moving)
    d.sealed("target")
    d.read_file("target")
    d.stat("target")


@case
def renamed_while_it_is_written(d: Side) -> None:
    fd = d.open("part", os.O_CREAT | os.O_WRONLY)
    d.attempt("write", os.write, fd, b"1" * 5000)
    d.attempt("rename", os.rename, d.path("part"), d.path("final"))
    d.attempt("write", os.write, fd, b"2" * 5000)
    d.attempt("fsync", os.fsync, fd)
    d.stat("final")
    d.close(fd)
    d.read_file("final")
    d.names()


@case
def times_that_reading_and_writing_change(d: Side) -> None:
    d.write_file("file", b"content")
    d.sealed("file")
    fd = d.open("file", os.O_RDWR)
    d.changed("open and read", ["file", "."], lambda: os.pread(fd, 10, 0))
    d.changed("write", ["file", "."], lambda: os.pwrite(fd, b"C", 0))
    d.changed("write again", ["file", "."], lambda: os.pwrite(fd, b"D", 0))
    d.changed("write nothing", ["file", "."], lambda: os.pwrite(fd, b"", 0))
    d.changed("fsync", ["file", "."], lambda: os.fsync(fd))
    d.changed("close", ["file", "."], lambda: d.close(fd))
    d.changed("seal", ["file", "."], lambda: d.sealed("file"))
    d.changed("create", ["file", "."], lambda: d.write_file("other", b""))
    d.changed("rewrite", ["file", "."], lambda: d.write_file("file", b"again"))


@case
def direct_io_agrees_with_buffered(d: Side) -> None:
    page = mmap.mmap(-1, 8192)
    fd = d.open("file", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    buffered = d.open("file", os.O_RDWR)
    page.write(b"d" * 8192)
    d.attempt("direct write", lambda: os.pwritev(fd, [page], 4096))
    d.attempt("buffered read", os.pread, buffered, 20000, 0)
    d.attempt("buffered write", os.pwrite, buffered, b"b" * 5000, 1000)
    d.attempt("direct read", lambda: (os.preadv(fd, [page], 0), page[:]))
    d.fstat(fd)
    d.close(fd)
    d.close(buffered)
    d.sealed("file")
    fd = d.open("file", os.O_RDONLY | os.O_DIRECT)
    d.attempt("direct read", lambda: (os.preadv(fd, [page], 4096), page[:]))
    page.close()


@case
def shared_maps_and_descriptors_see_each_other(d: Side) -> None:
    d.write_file("file", bytes(3 * mmap.PAGESIZE))
    d.sealed("file")
    fd = d.open("file", os.O_RDWR)
    other = d.open("file", os.O_RDWR)
    with mmap.mmap(fd, 0) as shared, mmap.mmap(other, 0, access=mmap.ACCESS_COPY) as private:
        private[0:7] = b"private"
        for number in range(20):
            offset = number * 601
            shared[offset : offset + 9] = b"mapped %02d" % number
            d.attempt("pread", os.pread, other, 9, offset)
            d.attempt("pwrite", os.pwrite, other, b"written %02d" % number, offset + 100)
            d.see("map", shared[offset + 100 : offset + 110])
        d.attempt("msync", shared.flush)
        d.attempt("fsync", os.fsync, fd)
        d.see("private", private[0:16])
        d.close(fd)
        shared[5:10] = b"later"  # no descriptor of it is open for writing but the map's own
        d.attempt("msync", shared.flush)
        d.attempt("pread", os.pread, other, 20, 0)
    d.close(other)
    d.sealed("file")
    d.read_file("file")
    with open(d.path("file"), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as readonly:
        d.see("mapped again", readonly[:])


@case
def a_map_outlives_replacement_and_unlink(d: Side) -> None:
    d.write_file("file", b"old bytes" * 1000)
    d.sealed("file")
    with open(d.path("file"), "rb") as file:
        old = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    d.write_file("new", b"new")
    d.attempt("replace", os.replace, d.path("new"), d.path("file"))
    d.see("old", old[:])
    d.attempt("unlink", os.unlink, d.path("file"))
    d.see("old", old[8990:])
    old.close()


@case
def copy_file_range_and_sendfile(d: Side) -> None:
    data = os.urandom(1000) * 300
    d.write_file("source", bytes(1000) * 300)
    d.sealed("source")
    source = d.open("source", os.O_RDWR)
    os.pwrite(source, b"x" * 1000, 5000)
    copy = d.open("copy", os.O_CREAT | os.O_RDWR)
    d.attempt("copy_file_range", lambda: _copy(source, copy, len(data)))
    d.attempt("copied", os.pread, copy, len(data), 0)
    sent = d.open("sent", os.O_CREAT | os.O_RDWR)
    d.attempt("sendfile", lambda: _send(source, sent, len(data)))
    d.attempt("sent", os.pread, sent, len(data), 0)
    d.attempt("copy within a file, overlapping", os.copy_file_range, copy, copy, 5000, 0, 100)
    d.attempt("copy past the end", os.copy_file_range, copy, sent, 5000, 1 << 40, 0)


def _copy(source: int, target: int, size: int) -> int:
    done = 0
    while count := os.copy_file_range(source, target, size - done, done, done):
        done += count
    return done


def _send(source: int, target: int, size: int) -> int:
    done = 0
    while count := os.sendfile(target, source, done, size - done):
        done += count
    return done


@case
def fsync_of_everything(d: Side) -> None:
    d.write_file("file", b"x")
    os.mkdir(d.path("directory"))
    for name, flags in (("file", os.O_RDONLY), ("file", os.O_RDWR), (".", os.O_RDONLY), ("directory", os.O_DIRECTORY)):
        fd = d.open(name, flags)
        d.attempt("fsync", os.fsync, fd)
        d.attempt("fdatasync", os.fdatasync, fd)
    fd = d.open("synchronous", os.O_CREAT | os.O_WRONLY | os.O_SYNC)
    d.attempt("write", os.write, fd, b"now")
    d.sealed("file")
    fd = d.open("file", os.O_WRONLY | os.O_DSYNC)
    d.attempt("write", os.write, fd, b"now")
    d.read_file("file")


@case
def executing_a_file(d: Side) -> None:
    with open("/bin/true", "rb") as file:
        d.write_file("true", file.read())
    d.attempt("not yet executable", lambda: os.spawnv(os.P_WAIT, d.path("true"), [b"true"]))
    os.chmod(d.path("true"), 0o755)
    d.attempt("run", lambda: os.spawnv(os.P_WAIT, d.path("true"), [b"true"]))


def test_what_the_mount_cannot_do_is_refused_cleanly(site: Site) -> None:
    """O_TMPFILE and fallocate say EOPNOTSUPP, and programs' fallbacks work."""
    root = site.mountpoint / "refusals"
    root.mkdir()
    with pytest.raises(OSError) as refusal:
        os.open(root, os.O_TMPFILE | os.O_RDWR)
    assert refusal.value.errno == errno.EOPNOTSUPP
    with tempfile.TemporaryFile(dir=root) as file:
        file.write(b"x")
        assert os.fstat(file.fileno()).st_nlink == 0
    assert os.listdir(root) == []
    fd = os.open(root / "file", os.O_CREAT | os.O_RDWR)
    try:
        os.pwrite(fd, b"end", 1 << 20)
        os.posix_fallocate(fd, 0, 2 << 20)  # glibc writes zeros where there is nothing
        assert os.fstat(fd).st_size == 2 << 20
        assert os.pread(fd, 3, 1 << 20) == b"end"
    finally:
        os.close(fd)
