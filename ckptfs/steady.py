"""Background tasks that outlive their own failures: one that fails says so in the log and begins anew (invariant 9).

A task must be fit for that: what it was doing is lost, or found again in the catalog, and whoever waits for it is told.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""A task that fails at once each time must not fill the log."""


async def steadily(
    task: Callable[..., Awaitable[None]],
    *arguments: Any,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run *task* until it returns or is cancelled, again whenever it fails. Started as soon as it is begun."""
    task_status.started()
    while True:
        try:
            await task(*arguments)
            return
        except Exception:
            log.exception("%s failed and begins anew", getattr(task, "__qualname__", task))
        await trio.sleep(_AGAIN_S)


async def steadily_started(
    task: Callable[..., Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """As `steadily`, for a task that says itself when it has started."""

    class Once:
        told = False

        def started(self, value: None = None) -> None:
            if not self.told:
                self.told = True
                task_status.started(value)

    once = Once()

    async def with_status() -> None:
        await task(task_status=once)

    with_status.__qualname__ = getattr(task, "__qualname__", "a task")
    await steadily(with_status)
