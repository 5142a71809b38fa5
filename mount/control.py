"""The control socket's server: one JSON request a connection, progress lines, one result. Its client: `ckptfs.client`.

Runs on the daemon's event loop, one task a connection. What the requests mean is `requests`' business. A connection
that closes cancels its request, so a handler must leave nothing half done when it is cancelled. A handler's error is
the client's answer; it never ends the server.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from ckptfs.client import CONTROL_SOCKET
from ckptfs.errors import CkptfsError

log = logging.getLogger(__name__)

_MOST_REQUEST_BYTES = 1 << 20  # the largest, handing over an environment, is a few KiB
_SLOW_CLIENT_S = 30.0  # a client that does not read this long is gone

CLIENT_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)
"""What `Reply.progress` raises when nobody reads any more."""

Request = Mapping[str, Any]


class Reply:
    """Where a handler reports before it returns its result, which the server sends."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def progress(self, report: Mapping[str, Any]) -> None:
        await self.send({"progress": report})

    async def send(self, message: Mapping[str, Any]) -> None:
        with trio.fail_after(_SLOW_CLIENT_S):
            await self._stream.send_all(json.dumps(message).encode() + b"\n")


Handler = Callable[[Request, Reply], Awaitable[Any]]


class ControlServer:
    """Listens in *store* and answers with *handlers*, by the request's `op`."""

    def __init__(self, store: Path, handlers: Mapping[str, Handler]) -> None:
        self._store = store
        self._handlers = handlers
        self._listening = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, or until retired and every open connection got its answer.

        The socket exists once *task_status* was told.
        """
        directory = os.open(self._store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        name = f"/proc/self/fd/{directory}/{CONTROL_SOCKET}"  # a socket's own path ends at 107 bytes
        try:
            listener = _listen(name)
            async with trio.open_nursery() as nursery:
                with listener, self._listening:
                    task_status.started()
                    await self._accept(listener, nursery)
        finally:
            os.close(directory)

    def retire(self) -> None:
        """Take no new connections; those that are open go on.

        Comes before the store's lock is given up: the socket's name belongs to the lock's holder.
        """
        try:
            os.unlink(self._store / CONTROL_SOCKET)
        except FileNotFoundError:
            pass  # the store was deleted under us
        self._listening.cancel()

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            try:
                connection, _ = await listener.accept()
            except OSError as error:
                log.error("the control socket accepts nothing now: %s", error)
                await trio.sleep(1)  # out of descriptors, most likely; some will be closed
            else:
                nursery.start_soon(self._serve, trio.SocketStream(connection))

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                await self._converse(stream)
            except Exception:  # one client's trouble; the mount lives on
                log.exception("a control connection failed")

    async def _converse(self, stream: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            request = await _receive(stream) if _trusted(stream.socket) else None
            if request is not None:
                nursery.start_soon(_cancel_on_hangup, stream, nursery.cancel_scope)
                await self._answer(request, Reply(stream))
            nursery.cancel_scope.cancel()

    async def _answer(self, request: Request, reply: Reply) -> None:
        op = str(request.get("op"))
        handler = self._handlers.get(op)
        answer: dict[str, Any]
        try:
            if handler is None:
                answer = {"error": f"this daemon does not know the request {op!r}: another version?", "kind": ""}
            else:
                answer = {"result": await handler(request, reply)}
        except CkptfsError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        except CLIENT_GONE:
            return
        except Exception as error:
            log.exception("control request %s failed", op)
            answer = {"error": f"{op} failed in the daemon: {error!r}; see daemon.log", "kind": ""}
        try:
            await reply.send(answer)
        except CLIENT_GONE:
            log.debug("a control client went away")


def _listen(name: str) -> trio.socket.SocketType:
    try:
        os.unlink(name)  # a killed daemon's; we hold the store's lock
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_umask = os.umask(0o177)
    try:
        listener.bind(name)
        listener.listen(16)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(old_umask)
    return trio.socket.from_stdlib_socket(listener)


def _trusted(connection: trio.socket.SocketType) -> bool:
    """Whether the peer is this user or root; the socket's mode says the same, but a store's directory may be copied."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    assert isinstance(raw, bytes)
    _, uid, _ = struct.unpack("3i", raw)
    return uid in (0, os.geteuid())


async def _receive(stream: trio.SocketStream) -> Request | None:
    """The request, None when the client went away or sent something else."""
    data = bytearray()
    try:
        with trio.fail_after(_SLOW_CLIENT_S):
            while b"\n" not in data:
                more = await stream.receive_some()
                if not more or len(data) > _MOST_REQUEST_BYTES:
                    return None
                data += more
    except CLIENT_GONE:
        return None
    try:
        request = json.loads(bytes(data).partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


async def _cancel_on_hangup(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    try:
        while await stream.receive_some():
            pass
    except CLIENT_GONE:
        pass
    scope.cancel()
