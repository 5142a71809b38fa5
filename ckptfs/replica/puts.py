"""Putting many small objects at once: manifests, trees, indexes. Packs and heads go their own ways.

Who calls: one task on the loop, inside `async with`. Workers put in threads; at most two objects per worker wait. The
first error is raised by the next `put` or at the end, when everything that was on its way has come through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType

import trio

from ckptfs.encoding.canonical import seal_object
from ckptfs.errors import ObjectExists, RemoteError
from ckptfs.remote.base import ObjectStore


class Puts:
    """A batch of objects on their way. *done* holds the keys that the remote acknowledged, and grows."""

    def __init__(self, remote: ObjectStore, done: set[str], threads: int, count: Callable[[], None]) -> None:
        self._remote = remote
        self._done = done
        self._threads = threads
        self._count = count
        self._limiter = trio.CapacityLimiter(threads)
        self._error: RemoteError | None = None
        self._send, self._receive = trio.open_memory_channel[tuple[str, bytes, Callable[[], None] | None]](threads)
        self._manager = trio.open_nursery()
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Puts:
        self._nursery = await self._manager.__aenter__()
        for _ in range(self._threads):
            self._nursery.start_soon(self._work)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._send.close()
        if error is not None and not isinstance(error, Exception):  # cancelled: the nursery's own business
            return bool(await self._manager.__aexit__(kind, error, trace))
        if error is not None and error is not self._error and self._nursery is not None:
            self._nursery.cancel_scope.cancel()
        await self._manager.__aexit__(None, None, None)
        if error is None and self._error is not None:
            raise self._error
        return False

    async def put(self, key: str, body: bytes, then: Callable[[], None] | None = None) -> None:
        """Take over canonical JSON *body*; *then* is called on the loop once the remote has it."""
        if self._error is not None:
            raise self._error
        if key not in self._done:
            await self._send.send((key, body, then))
        elif then is not None:
            then()

    async def _work(self) -> None:
        async for key, body, then in self._receive:
            if self._error is not None:
                continue
            try:
                if key not in self._done:
                    self._count()
                    await trio.to_thread.run_sync(
                        partial(put_object, self._remote, key, body), limiter=self._limiter, abandon_on_cancel=True
                    )
                    self._done.add(key)
                if then is not None:
                    then()
            except RemoteError as failure:
                self._error = self._error or failure


def put_object(remote: ObjectStore, key: str, body: bytes) -> None:
    """Put canonical JSON under the key that its digest gives. Blocks. One that is there already is the same one."""
    try:
        remote.put(key, seal_object(body), if_absent=True)
    except ObjectExists:
        pass
