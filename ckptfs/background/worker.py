"""The process that does the work: `python -m ckptfs.background.worker FD`, FD a socket to the daemon.

A request is a frame (length, then marshal of (number, task, arguments)), an answer one of (number, True, result) or
(number, False, (errno or 0, message)). It ends when the socket does.

Its priority is low, but not the lowest: beside a program that keeps every core busy it gets some 3 % of them, so that
uploads go on. Linux may divide the processor among sessions before it looks at single processes (autogroup, sched(7)),
and then it is the session's priority that counts; so this process has a session of its own.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import platform
import signal
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptfs.background.tasks import TASKS
from ckptfs.config import usable_cores

LENGTH = struct.Struct("<Q")

_NICE = 15
_IOPRIO_LOWEST_BEST_EFFORT = 2 << 13 | 7
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of the system call, which the C library does not wrap."""


def main() -> None:
    lower_priority()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the daemon drains first, and then ends us
    serve(socket.socket(fileno=int(sys.argv[1])))


def lower_priority() -> None:
    """As far as the system lets us."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(_NICE))
    except OSError:
        pass
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_LOWEST_BEST_EFFORT)


def serve(connection: socket.socket) -> None:
    """Answer requests, several at a time, until nobody is there to ask."""
    sending = threading.Lock()
    threads = ThreadPoolExecutor(usable_cores(), "work")

    def answer(number: int, task: str, arguments: tuple[Any, ...]) -> None:
        reply = marshal.dumps((number, *_do(task, arguments)))
        try:
            with sending:
                connection.sendall(LENGTH.pack(len(reply)) + reply)
        except OSError:
            os._exit(0)  # the daemon is gone

    try:
        with connection.makefile("rb") as requests:
            while len(header := requests.read(LENGTH.size)) == LENGTH.size:
                threads.submit(answer, *marshal.loads(requests.read(*LENGTH.unpack(header))))
    except ConnectionResetError:  # killed with an answer of ours unread
        pass
    os._exit(0)  # without waiting for what nobody wants any more


def _do(task: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, _plain(TASKS[task](*arguments))
    except Exception as error:
        return False, (getattr(error, "errno", None) or 0, f"{type(error).__name__}: {error}")


def _plain(value: Any) -> Any:
    """*value* as marshal knows it: named tuples become tuples."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return [_plain(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
