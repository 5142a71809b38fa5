"""Several processes at one file: locks, appends, maps. The mount does what a plain directory does."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
from collections.abc import Callable

import pytest

from tests.posix.sides import Case, Side

CASES: list[Case] = []
F_OFD_SETLK = 37  # fcntl.h; the fcntl module has no name for it


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_same_as_a_plain_directory(same: Callable[..., None], function: Case) -> None:
    """Each case gives the same results, errnos, stats and bytes on both."""
    same(function)


class Child:
    """A forked process that calls *function* with a way to say a byte and to wait for one."""

    def __init__(self, function: Callable[[Callable[[bytes], None], Callable[[], bytes]], None]) -> None:
        from_child, to_parent = os.pipe()
        from_parent, to_child = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(to_child)  # so that a parent that fails ends our waiting
                function(lambda data: os.write(to_parent, data) and None, lambda: os.read(from_parent, 1))
                os._exit(0)
            finally:
                os._exit(1)
        os.close(to_parent)
        os.close(from_parent)
        self._in, self._out = from_child, to_child

    def hear(self) -> bytes:
        return os.read(self._in, 100)

    def say(self) -> None:
        os.write(self._out, b".")

    def end(self) -> int:
        """Its exit status."""
        os.close(self._out)
        os.close(self._in)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def lock(kind: int, start: int = 0, length: int = 0) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


FLAGS = {fcntl.F_WRLCK: fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.F_RDLCK: fcntl.LOCK_SH | fcntl.LOCK_NB}


def holder(fd: int) -> tuple[int, ...]:
    """Kind, start and length of a lock that is in the way."""
    return struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, lock(fcntl.F_WRLCK)))[:4]


LOCKS: list[tuple[str, Callable[[int, int], object]]] = [
    ("flock", lambda fd, kind: fcntl.flock(fd, FLAGS[kind])),
    ("POSIX", lambda fd, kind: fcntl.lockf(fd, FLAGS[kind], 10, 5)),
    ("OFD", lambda fd, kind: fcntl.fcntl(fd, F_OFD_SETLK, lock(kind, 5, 10)) and None),
]


@case
def locks_between_processes(d: Side) -> None:
    d.write_file("file", b"x" * 100)
    for name, take in LOCKS:
        for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):

            def hold(say: Callable[[bytes], None], wait: Callable[[], bytes]) -> None:
                fd = os.open(d.path("file"), os.O_RDWR)
                take(fd, kind)  # noqa: B023
                say(b"held")
                wait()

            child = Child(hold)
            d.see("child", child.hear())
            fd = d.open("file", os.O_RDWR)
            d.attempt(f"{name} exclusive", take, fd, fcntl.F_WRLCK)
            d.attempt(f"{name} shared", take, fd, fcntl.F_RDLCK)
            if name == "POSIX":
                elsewhere = fcntl.LOCK_EX | fcntl.LOCK_NB
                d.attempt("another range", fcntl.lockf, fd, elsewhere, 5, 0)
                d.attempt("who", holder, fd)
            d.close(fd)
            child.say()
            d.see("ended", child.end())
            fd = d.open("file", os.O_RDWR)
            d.attempt(f"{name} after it ended", take, fd, fcntl.F_WRLCK)
            d.close(fd)


@case
def locks_of_a_killed_process_are_free(d: Side) -> None:
    d.write_file("file", b"x" * 100)
    for name, take in LOCKS:

        def hold(say: Callable[[bytes], None], wait: Callable[[], bytes]) -> None:
            fd = os.open(d.path("file"), os.O_RDWR)
            take(fd, fcntl.F_WRLCK)  # noqa: B023
            say(b"held")
            signal.pause()

        child = Child(hold)
        child.hear()
        os.kill(child.pid, signal.SIGKILL)
        d.see("status", child.end())
        fd = d.open("file", os.O_RDWR)
        d.attempt(name, take, fd, fcntl.F_WRLCK)
        d.close(fd)


@case
def a_waiting_lock_is_given(d: Side) -> None:
    d.write_file("file", b"x")
    fd = d.open("file", os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX)

    def wait_for_it(say: Callable[[bytes], None], wait: Callable[[], bytes]) -> None:
        other = os.open(d.path("file"), os.O_RDWR)
        say(b"ready")
        fcntl.lockf(other, fcntl.LOCK_EX)
        say(b"got it")

    child = Child(wait_for_it)
    d.see("child", child.hear())
    fcntl.lockf(fd, fcntl.LOCK_UN)
    d.see("child", child.hear())
    d.see("status", child.end())


@case
def appends_of_processes_stay_whole(d: Side) -> None:
    d.write_file("log", b"")

    def append(letter: bytes) -> Callable[[Callable[[bytes], None], Callable[[], bytes]], None]:
        def run(say: Callable[[bytes], None], wait: Callable[[], bytes]) -> None:
            fd = os.open(d.path("log"), os.O_WRONLY | os.O_APPEND)
            for _ in range(300):
                os.write(fd, letter * 99 + b"\n")

        return run

    children = [Child(append(letter)) for letter in (b"a", b"b", b"c")]
    d.see("status", [child.end() for child in children])
    with open(d.path("log"), "rb") as file:
        lines = file.read().splitlines()
    d.see("records", (len(lines), sorted({line for line in lines})))
    d.write_file("log", b"".join(line + b"\n" for line in sorted(lines)))  # their order is nobody's promise


@case
def maps_and_descriptors_of_two_processes(d: Side) -> None:
    d.write_file("file", bytes(4 * mmap.PAGESIZE))

    def answer(say: Callable[[bytes], None], wait: Callable[[], bytes]) -> None:
        fd = os.open(d.path("file"), os.O_RDWR)
        with mmap.mmap(fd, 0) as shared:
            for number in range(200):
                wait()
                offset = number * 61
                mine = os.pread(fd, 4, offset)  # what the other stored through its map
                shared[offset + 4 : offset + 8] = mine
                say(b".")

    child = Child(answer)
    fd = d.open("file", os.O_RDWR)
    wrong = 0
    with mmap.mmap(fd, 0) as shared:
        for number in range(200):
            offset, word = number * 61, struct.pack("I", number * 7919)
            shared[offset : offset + 4] = word
            child.say()
            child.hear()
            wrong += os.pread(fd, 4, offset + 4) != word
            wrong += shared[offset + 4 : offset + 8] != word
    d.see("mismatches", wrong)
    d.see("status", child.end())


@case
def a_file_is_there_as_soon_as_another_process_says_so(d: Side) -> None:
    def write(say: Callable[[bytes], None], wait: Callable[[], bytes]) -> None:
        for number in range(100):
            wait()
            with open(d.path(f"{number}.part"), "wb") as file:
                file.write(b"%d" % number * 50)
            os.rename(d.path(f"{number}.part"), d.path(f"{number}"))
            say(b".")

    child = Child(write)
    for number in range(100):
        d.stat(f"{number}")
        child.say()
        child.hear()
        d.read_file(f"{number}")
    d.see("status", child.end())
