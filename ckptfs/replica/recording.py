"""Recording what was fetched: chunks that came into images are flushed, and their locations committed, now and then.

Also for images that nobody has open any more: those are closed here, once that is done. Who calls: the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from ckptfs.ids import ImageId
from ckptfs.local.images import Image
from ckptfs.replica.hydrate import Hydrator

log = logging.getLogger(__name__)

_EVERY_S = 2.0


class Recorder:
    """`idle` and `reopen` take what `OpenFiles` tells; *open_images* gives the open images that are not whole."""

    def __init__(self, hydrator: Hydrator, open_images: Callable[[], list[Image]]) -> None:
        self._hydrator = hydrator
        self._open_images = open_images
        self._idle: list[Image] = []

    def idle(self, image: Image) -> None:
        """Nobody has *image* open any more, but chunks that were fetched into it are not recorded yet."""
        self._idle.append(image)

    def reopen(self, image: ImageId) -> Image | None:
        """Give back an idle image that is not being recorded yet: somebody opens it."""
        found = next((each for each in self._idle if each.id == image), None)
        if found is not None:
            self._idle.remove(found)
        return found

    def let_go(self, image: ImageId) -> None:
        """Close *image*, if it is idle, without recording: it is to be deleted, or else the rest is fetched again."""
        found = self.reopen(image)
        if found is not None:
            found.close()

    def holds(self, image: ImageId) -> bool:
        return any(each.id == image for each in self._idle)

    async def run(self) -> None:
        """Until cancelled; then `finish`."""
        while True:
            await trio.sleep(_EVERY_S)
            for image in self._open_images():
                if image.unrecorded:
                    await self._record(image)
            await self.finish()

    async def finish(self) -> None:
        """Record and close every idle image."""
        while self._idle:
            image = self._idle.pop()
            try:
                await self._record(image)
            finally:
                image.close()

    async def _record(self, image: Image) -> None:
        try:
            await self._hydrator.record(image)
        except OSError as error:  # it is fetched again when it is needed
            log.error("what was fetched into image %016x is not kept: %s", image.id, error)
