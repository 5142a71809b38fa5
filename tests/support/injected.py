"""The real daemon, in which one function raises when a test asks for it: `python -m tests.support.injected mount ...`.

The file that CKPTFS_INJECT names holds what is to fail next, a name of `PLACES`; who fails removes it. A task of
`TASKS` fails wherever it waits.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from ckptfs_mount.cli import main
from ckptfs_mount.errnos import answers, replies
from ckptfs_mount.operations import Operations

REQUEST = Path(os.environ.get("CKPTFS_INJECT", "/nonexistent"))

HANDLERS = sorted(
    name
    for name, function in vars(Operations).items()
    if inspect.iscoroutinefunction(inspect.unwrap(function)) and hasattr(function, "__wrapped__")
)

TASKS = (
    "ckptfs.background.caller:Worker.run",
    "ckptfs.engine:Engine._checkpoints",
    "ckptfs.engine:Engine._heal",
    "ckptfs.held:HeldFiles.run",
    "ckptfs.local.groupsync:GroupSync.run",
    "ckptfs.replica.evict:Evictor.run",
    "ckptfs.replica.follow:Follower.run",
    "ckptfs.replica.hydrate:Hydrator.run",
    "ckptfs.replica.logs:LogSealer.run",
    "ckptfs.replica.publish:Publisher.run",
    "ckptfs.reclaiming:Reclaimer.run",
    "ckptfs.replica.recording:Recorder.run",
    "ckptfs.replica.seal:Sealer.run",
    "ckptfs.replica.settle:Settler.run",
    "ckptfs.replica.tombstones:TombstoneCollector.run",
    "ckptfs.siblings:Siblings.run",
)

ANSWERS = {"is_plain": False, "is_sound": False, "to_read": -1, "to_write": -1, "wrote": False}
"""What the C module asks the operations, and what leaves a request to its handler."""

INSIDE = (
    "ckptfs.filesystem:FileSystem.unpin",
    "ckptfs.held:HeldFiles.look",
    "ckptfs.local.catalog.catalog:Catalog.sync_wal",
    "ckptfs.local.catalog.catalog:Catalog.wal_bytes",
    "ckptfs.local.groupsync:GroupSync._flush_catalog",
    "ckptfs.local.groupsync:GroupSync._flush_images",
    "ckptfs.replica.chunks:ChunkFetcher._fetch_run",
    "ckptfs.replica.chunks:ChunkFetcher._get_run",
    "ckptfs.replica.chunks:ChunkFetcher.fetch",
    "ckptfs.replica.doubts:Doubts.doubted",
    "ckptfs.replica.follow:Follower.check",
    "ckptfs.replica.hydrate:Hydrator.record",
    "ckptfs.replica.manifests:Manifests._learn",
    "ckptfs.replica.merge:Merger.apply",
    "ckptfs.replica.publish:Publisher._put_head",
    "ckptfs.replica.publish:Publisher._step",
    "ckptfs.replica.puts:Puts._work",
    "ckptfs.replica.seal:Sealer._record",
    "ckptfs.replica.seal:Sealer._take",
    "ckptfs.replica.settle:Settler._blocked",
    "ckptfs.replica.upload:Uploader._build",
    "ckptfs.replica.upload:Uploader._carry",
    "ckptfs_mount.control:ControlServer._converse",
    "ckptfs_mount.operations:Operations.changed_elsewhere",
)


STOPPING = ("ckptfs_mount.daemon:Daemon._watch_writers", "ckptfs_mount.daemon:Daemon._write_back")
"""Called when the daemon is told to end."""


class Injected(Exception):
    pass


def due(name: str) -> bool:
    """Whether it is this one's turn; then it is nobody's any more."""
    try:
        if REQUEST.read_text() != name:
            return False
        REQUEST.unlink()
    except FileNotFoundError:
        return False
    return True


def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def fails(*arguments: Any, **options: Any) -> Any:
            if due(name):
                raise Injected(name)
            return await function(*arguments, **options)

        return fails

    @functools.wraps(function)
    def fails_at_once(*arguments: Any, **options: Any) -> Any:
        if due(name):
            raise Injected(name)
        return function(*arguments, **options)

    return fails_at_once


def failing_while_it_waits(name: str, task: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(task)
    async def fails(*arguments: Any, **options: Any) -> None:
        async def watch() -> None:
            while not due(name):
                await trio.sleep(0.02)
            raise Injected(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await task(*arguments, **options)
            nursery.cancel_scope.cancel()

    return fails


def answering(name: str, function: Callable[..., Any], declined: Any) -> Callable[..., Any]:
    """Leaves every request to its handler, which would be reached by few, but while an answer is to fail."""

    @functools.wraps(function)
    def answer(*arguments: Any) -> Any:
        if due(name):
            raise Injected(name)
        try:
            return function(*arguments) if REQUEST.read_text() in ANSWERS else declined
        except FileNotFoundError:
            return declined

    return answers(declined)(answer)


def place(name: str) -> tuple[type, str]:
    module, _, path = name.partition(":")
    kind, _, attribute = path.partition(".")
    return getattr(importlib.import_module(module), kind), attribute


def inject() -> None:
    for name, declined in ANSWERS.items():
        setattr(Operations, name, answering(name, getattr(Operations, name), declined))
    for handler in HANDLERS:
        original = inspect.unwrap(getattr(Operations, handler))
        setattr(Operations, handler, replies(failing(handler, original)))
    for name in (*INSIDE, *STOPPING):
        kind, attribute = place(name)
        setattr(kind, attribute, failing(name, getattr(kind, attribute)))
    for name in TASKS:
        kind, attribute = place(name)
        setattr(kind, attribute, failing_while_it_waits(name, getattr(kind, attribute)))


if __name__ == "__main__":
    inject()
    main()
