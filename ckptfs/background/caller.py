"""Having background work done.

Who calls: the event loop's thread. Cancelling a call forgets its result; the work itself goes on to its end.
"""

from __future__ import annotations

import errno
import itertools
import logging
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from ckptfs.background.tasks import TASKS
from ckptfs.background.worker import LENGTH

log = logging.getLogger(__name__)

_TRIES = 2
_READ_BYTES = 1 << 18


class Background(Protocol):
    """Does a task of `tasks`, somewhere."""

    async def call(self, task: str, *arguments: Any, light: bool = False) -> Any:
        """The result, as plain values. Raises OSError when the task could not be done.

        *light*: it takes no longer than beginning a process would.
        """
        ...

    def urgent(self) -> AbstractContextManager[None]:
        """What is asked for in this block is done as fast as can be: somebody waits for the end."""
        ...


class Threads:
    """Does the work in threads of this process."""

    async def call(self, task: str, *arguments: Any, light: bool = False) -> Any:
        return await trio.to_thread.run_sync(TASKS[task], *arguments)

    def urgent(self) -> AbstractContextManager[None]:
        return nullcontext()


def _without_credentials() -> dict[str, str]:
    """Our environment without what only the remote's client needs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


@dataclass
class _Call:
    done: trio.Event = field(default_factory=trio.Event)
    result: Any = None
    error: OSError | None = None
    lost: bool = False
    """The worker ended before it answered."""


class Worker:
    """Does the work in a process of its own, begun when there is something to do and again when it was killed.

    Light work before that, and urgent work, which must not wait for a processor that nobody else wants, is done in
    threads.
    """

    def __init__(self) -> None:
        self._threads = Threads()
        self._urgent = 0
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._wanted = trio.Event()
        self._stream: trio.SocketStream | None = None
        self._connected = trio.Event()
        self._sending = trio.Lock()
        self.pid: int | None = None

    async def call(self, task: str, *arguments: Any, light: bool = False) -> Any:
        if self._urgent or (light and self.pid is None):
            return await self._threads.call(task, *arguments)
        for _ in range(_TRIES):
            call = await self._ask(task, arguments)
            if call.error is not None:
                raise call.error
            if not call.lost:
                return call.result
        raise OSError(errno.EIO, f"the background process ended while it was to {task}")

    @contextmanager
    def urgent(self) -> Iterator[None]:
        self._urgent += 1
        try:
            yield
        finally:
            self._urgent -= 1

    async def _ask(self, task: str, arguments: tuple[Any, ...]) -> _Call:
        number, call = next(self._numbers), _Call()
        request = marshal.dumps((number, task, arguments))
        self._wanted.set()
        await self._connected.wait()
        self._calls[number] = call
        try:
            with trio.CancelScope(shield=True):  # half a request would garble all that follow
                async with self._sending:
                    if self._stream is None:
                        call.lost = True
                        return call
                    await self._stream.send_all(LENGTH.pack(len(request)) + request)
            await call.done.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            call.lost = True
        finally:
            self._calls.pop(number, None)
        return call

    async def run(self) -> None:
        """Keep a process while there is work, until cancelled."""
        while True:
            await self._wanted.wait()
            ours, theirs = socket.socketpair()
            process = self._start(theirs)
            theirs.close()
            self.pid = process.pid
            self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            self._connected.set()
            try:
                await self._receive(self._stream)
                log.warning("the background process ended; another one goes on")
            finally:
                self._wanted, self._connected = trio.Event(), trio.Event()
                stream, self._stream, self.pid = self._stream, None, None
                with trio.CancelScope(shield=True):
                    await stream.aclose()
                    process.kill()
                    await trio.to_thread.run_sync(process.wait)
                for call in self._calls.values():
                    call.lost = True
                    call.done.set()

    def _start(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "ckptfs.background.worker", str(connection.fileno())],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            cwd="/",  # not the user's directory, from which Python would import
            env={**_without_credentials(), "MALLOC_ARENA_MAX": "2"},
            start_new_session=True,
        )

    async def _receive(self, stream: trio.SocketStream) -> None:
        """Hand out answers until there are no more."""
        waiting = bytearray()
        while True:
            while len(waiting) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(waiting)
                end = LENGTH.size + length
                if len(waiting) < end:
                    break
                self._answered(*marshal.loads(memoryview(waiting)[LENGTH.size : end]))
                del waiting[:end]
            try:
                data = await stream.receive_some(_READ_BYTES)
            except trio.BrokenResourceError:
                return
            if not data:
                return
            waiting += data

    def _answered(self, number: int, succeeded: bool, result: Any) -> None:
        call = self._calls.get(number)
        if call is None:  # nobody waits any more
            return
        if succeeded:
            call.result = result
        else:
            code, message = result
            call.error = OSError(code or errno.EIO, message)
        call.done.set()
