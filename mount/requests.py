"""What each request on the control socket does: asks the engine, or takes part in the mount's end.

Every handler may be cancelled at any await, when its client hangs up. Those that take long report progress twice a
second, which is also how the client knows that the daemon lives. When the mount ends first, they fail with MountError.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import trio

from ckptfs.client import TARGETS
from ckptfs.engine import Engine
from ckptfs.errors import InvalidArgument, MountError
from ckptfs.ids import Inode
from ckptfs.prefetching import Fetching
from ckptfs.repair.pace import Scrubbing
from ckptfs.repair.scrub import ScrubOptions

from .control import CLIENT_GONE, Handler, Reply, Request

_REPORT_EVERY_S = 0.5

T = TypeVar("T")


class Life(Protocol):
    """The daemon's life, as far as requests take part in it."""

    closing: trio.Event
    """The engine is about to stop: what waits for it must give up."""
    ended: trio.Event
    """The store is closed and `summary` is final."""
    summary: Mapping[str, Any]

    def describe(self) -> dict[str, Any]:
        """What is mounted where, since when and by which process."""
        ...

    def waive_drain(self) -> None:
        """Somebody chose not to wait for uploads: when the mount ends, end at once."""
        ...

    def demand_drain(self) -> None:
        """Take back one `waive_drain`."""
        ...


class Requests:
    """The handlers, over one engine and one life."""

    def __init__(self, engine: Engine, life: Life) -> None:
        self._engine = engine
        self._life = life

    def handlers(self) -> dict[str, Handler]:
        return {
            "hello": self.hello,
            "status": self.status,
            "wait": self.wait,
            "publish": self.publish,
            "prefetch": self.prefetch,
            "scrub": self.scrub,
            "learn": self.learn,
            "credentials": self.credentials,
            "unmount": self.unmount,
        }

    async def hello(self, request: Request, reply: Reply) -> dict[str, Any]:
        """What is mounted here."""
        return self._life.describe()

    async def status(self, request: Request, reply: Reply) -> dict[str, Any]:
        """The engine's status document with the mount's part filled in."""

        async def ask() -> dict[str, Any]:
            return await self._engine.status(_path(request))

        document = await self._work(ask, None)
        document["mount"] = self._life.describe()
        return document

    async def wait(self, request: Request, reply: Reply) -> dict[str, Any]:
        """Wait until *path* has reached *target*; {"reached": False} when *timeout_s* passed before."""
        path, target, timeout_s = _path(request), request.get("target"), request.get("timeout_s")
        if target not in TARGETS:
            raise InvalidArgument(f"nothing waits for {target!r}: it is one of {', '.join(TARGETS)}")

        async def reach() -> bool:
            return await self._engine.wait(path, str(target), timeout_s)

        async def state() -> str:
            return await self._engine.state(path)

        reached = await self._work(reach, reply)
        return {"reached": reached, "state": await self._work(state, None)}

    async def prefetch(self, request: Request, reply: Reply) -> dict[str, Any]:
        """Bring everything under *path* to this disk; progress says how much is still to come."""
        path, fetching = _path(request), Fetching()

        def report() -> dict[str, Any]:
            return {
                "pending_files": fetching.files - fetching.fetched_files,
                "pending_bytes": fetching.total_bytes - fetching.fetched_bytes,
                "sent_bytes": fetching.fetched_bytes,
                "eta_s": fetching.eta_s,
                "last_error": self._engine.reading_error,
            }

        async def fetch() -> None:
            await self._engine.prefetch(path, fetching)

        await self._work(fetch, reply, report)
        return {"files": fetching.files, "bytes": fetching.total_bytes}

    async def scrub(self, request: Request, reply: Reply) -> dict[str, Any]:
        """Read everything under *path* again and mend it; the report, see `ckptfs.repair.findings`."""
        path, progress, options = _path(request), Scrubbing(), scrub_options(request)

        async def scrub() -> dict[str, Any]:
            return (await self._engine.scrub(path, options, progress)).document()

        return await self._work(scrub, reply, lambda: scrub_progress(progress))

    async def learn(self, request: Request, reply: Reply) -> dict[str, Any]:
        """Have directories and manifests, numbers of the catalog, looked up on the remote; why some are not."""
        directories, manifests = _numbers(request, "directories"), _numbers(request, "manifests")

        async def learn() -> tuple[list[str], bool]:
            return await self._engine.learn([Inode(each) for each in directories], manifests)

        failures, stopped = await self._work(learn, reply)  # the progress only tells that we live
        return {"failures": failures, "stopped": stopped}

    async def publish(self, request: Request, reply: Reply) -> dict[str, Any]:
        """Cut at once and return when the head is acknowledged."""
        path = _path(request)

        async def publish() -> list[bytes]:
            return await self._engine.publish(path)

        unfinished = await self._work(publish, reply)
        return {**self._uploads(), "unfinished": [os.fsdecode(each) for each in unfinished]}

    async def credentials(self, request: Request, reply: Reply) -> dict[str, Any]:
        """Give the remote another shell's AWS_* environment."""
        env = request.get("env")
        if not isinstance(env, dict) or not all(
            isinstance(name, str) and isinstance(value, str) and name.startswith("AWS_") for name, value in env.items()
        ):
            raise InvalidArgument("credentials are AWS_* variables")
        refusal = await self._engine.take_credentials(env)
        return {"names": sorted(env), "refusal": refusal}

    async def unmount(self, request: Request, reply: Reply) -> Mapping[str, Any]:
        """Prepare the end: drain if *wait*, say {"ready": true}, and give the summary once the mount has ended.

        The client unmounts when it hears "ready", because the kernel knows whether it may. What was closed in between
        is uploaded after that.
        """

        async def drain() -> bool:
            return await self._engine.drain(None)

        waits = bool(request.get("wait"))
        if waits:
            await self._work(drain, reply)
        else:
            self._life.waive_drain()
        try:
            await reply.progress({"ready": True, **dataclasses.asdict(self._engine.progress())})
            while not self._life.ended.is_set():
                with trio.move_on_after(_REPORT_EVERY_S):
                    await self._life.ended.wait()
                    break
                await reply.progress({"closing": True, **dataclasses.asdict(self._engine.progress())})
        finally:
            if not waits:
                self._life.demand_drain()
        return self._life.summary

    async def _work(
        self, work: Callable[[], Awaitable[T]], reply: Reply | None, report: Callable[[], dict[str, Any]] | None = None
    ) -> T:
        """The result of *work*, with progress to *reply* meanwhile; MountError when the mount ends before."""
        results: list[T] = []
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_up, nursery.cancel_scope)
            if reply is not None:
                nursery.start_soon(self._report, reply, report or self._uploads, nursery.cancel_scope)
            try:
                results.append(await work())
            except Exception as error:
                failure = error  # raised below, outside the nursery, which would wrap it in a group
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if not results:
            raise MountError("the mount ended meanwhile")
        return results[0]

    async def _give_up(self, scope: trio.CancelScope) -> None:
        await self._life.closing.wait()
        scope.cancel()

    def _uploads(self) -> dict[str, Any]:
        return dataclasses.asdict(self._engine.progress())

    async def _report(
        self, reply: Reply, report: Callable[[], dict[str, Any]], scope: trio.CancelScope
    ) -> None:
        try:
            while True:
                await reply.progress(report())
                await trio.sleep(_REPORT_EVERY_S)
        except CLIENT_GONE:
            scope.cancel()


def scrub_options(request: Request, *, alone: bool = False) -> ScrubOptions:
    """Raises InvalidArgument."""
    names = {field.name for field in dataclasses.fields(ScrubOptions)} - {"alone"}
    options = ScrubOptions(alone=alone, **{name: value for name, value in request.items() if name in names})
    rate = options.rate_bytes_s
    if not 0 < options.sample <= 1 or (rate is not None and rate <= 0):
        raise InvalidArgument("a scrub looks at a share above 0 and up to 1, at a rate above 0")
    return options


def scrub_progress(progress: Scrubbing) -> dict[str, Any]:
    """As `Waiting` shows it."""
    return {
        "pending_files": progress.files - progress.done_files,
        "pending_bytes": max(0, progress.total_bytes - progress.done_bytes),
        "sent_bytes": progress.done_bytes,
        "eta_s": progress.eta_s,
        "last_error": None,
    }


def _numbers(request: Request, name: str) -> list[int]:
    numbers = request.get(name)
    if not isinstance(numbers, list) or not all(type(each) is int for each in numbers):
        raise InvalidArgument(f"{name} are numbers")
    return numbers


def _path(request: Request) -> bytes:
    return os.fsencode(str(request.get("path", "/")))
