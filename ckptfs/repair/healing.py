"""Healing: packs that readers found damaged or gone are looked at again, and made anew from bytes that are here.

As a scrub would do with that one pack. A remote may also heal by itself: a bucket that is put back, an object that is
restored. So what cannot be mended is looked at again and again, ever more rarely.

Who calls: one task on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from ckptfs.encoding.keys import pack_key
from ckptfs.errors import CkptfsError
from ckptfs.ids import ObjectId
from ckptfs.replica.doubts import Doubts

log = logging.getLogger(__name__)

_RAREST = 60
"""The pause between two looks at a pack grows up to so many times the first: to an hour."""


async def heal(doubts: Doubts, mend: Callable[[ObjectId], Awaitable[None]], every_s: float) -> None:
    """Have each pack in doubt looked at by *mend*, *every_s* after it is found at first, until cancelled.

    *mend* raises CkptfsError or OSError when it cannot now.
    """
    looks: dict[ObjectId, tuple[float, float]] = {}  # when next, and the pause after that
    while True:
        await trio.sleep(every_s / 2)
        names = doubts.doubted()
        for name in names:
            due, pause_s = looks.get(name, (trio.current_time() + every_s, every_s))
            if trio.current_time() >= due:
                pause_s = min(2 * pause_s, _RAREST * every_s)
                due = trio.current_time() + pause_s
                try:
                    await mend(name)
                except (CkptfsError, OSError) as error:
                    log.info("%s stays in doubt: %s", pack_key(name), error)
            looks[name] = due, pause_s
        looks = {name: each for name, each in looks.items() if name in names}
