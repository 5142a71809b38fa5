"""Healing: what readers found damaged or gone is looked at again, and packs are made anew from bytes that are here.

As a scrub would do with that one pack. A remote may also heal by itself: a bucket that is put back, an object that is
restored. So what cannot be mended is looked at again and again, ever more rarely.

Who calls: one task on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Hashable
from typing import TypeVar

import trio

from ckptfs.errors import CkptfsError

log = logging.getLogger(__name__)

Doubted = TypeVar("Doubted", bound=Hashable)

_RAREST = 60
"""The pause between two looks at a pack grows up to so many times the first: to an hour."""


async def heal(
    doubted: Callable[[], Collection[Doubted]], mend: Callable[[Doubted], Awaitable[None]], every_s: float
) -> None:
    """Have each of what is *doubted* looked at by *mend*, *every_s* after it is found at first, until cancelled.

    *mend* raises CkptfsError or OSError when it cannot now.
    """
    looks: dict[Doubted, tuple[float, float]] = {}  # when next, and the pause after that
    while True:
        await trio.sleep(every_s / 2)
        names = doubted()
        for name in names:
            due, pause_s = looks.get(name, (trio.current_time() + every_s, every_s))
            if trio.current_time() >= due:
                pause_s = min(2 * pause_s, _RAREST * every_s)
                due = trio.current_time() + pause_s
                try:
                    await mend(name)
                except (CkptfsError, OSError) as error:
                    log.info("what readers missed cannot be mended now: %s", error)
            looks[name] = due, pause_s
        looks = {name: each for name, each in looks.items() if name in names}
