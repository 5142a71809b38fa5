"""Group sync: one thread's round of fdatasync makes images and catalog commits durable for everyone who waits.

Who calls: the event loop. A request made while a round runs belongs to the next round. A round flushes the images
concerned, then the images' directory entries once per new image, then the catalog's WAL, and then deletes the image
files whose rows are now durably gone (invariant 2). The same round runs every few seconds unasked.

Between the images and the WAL the loop is told which images are whole on the disk now: those that somebody asked for,
and those that nobody was writing. What they replaced need not be kept any more (`catalog.replaced`), and that must be
durable with the same round: who was told that a file is safe must not find the old one after a power cut.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import trio

from ckptfs.ids import ImageId
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.images import Images, begin_writing_out

log = logging.getLogger(__name__)


_GATHER_S = 0.05
"""How long files that are to be deleted wait for more of them."""
_LEAST_REST = 0.2
"""Between two rounds that nobody asked for, as a share of their period: the disk has others to serve."""


@dataclass
class _Round:
    images: set[ImageId] = field(default_factory=set)
    asked: set[ImageId] = field(default_factory=set)
    """Those of them that somebody waits for."""
    done: trio.Event = field(default_factory=trio.Event)
    failed: dict[ImageId, OSError] = field(default_factory=dict)
    unopened: dict[ImageId, OSError] = field(default_factory=dict)
    error: OSError | None = None
    undeleted: list[ImageId] = field(default_factory=list)


class GroupSync:
    """What is dirty, who waits for it, and the thread that flushes.

    `poisoned` holds images of which a flush failed: their bytes are in doubt for ever (the kernel forgets a failed
    page), so that every later fsync and close of them fails and they are never sealed.
    """

    def __init__(
        self, catalog: Catalog, images: Images, deleted: Callable[[list[ImageId]], None] = lambda images: None
    ) -> None:
        """*deleted* is called on the loop once the files of images that were to be deleted are."""
        self._catalog = catalog
        self._images = images
        self._deleted = deleted
        self._next = _Round()
        self._wanted, self._hurry = trio.Event(), trio.Event()
        self._unsynced_names: set[ImageId] = set()
        self._dirty: set[ImageId] = set()
        self._unfinished: set[ImageId] = set()
        self._never_flushed: set[ImageId] = set()
        self._flushing: set[ImageId] = set()
        self._doomed: list[ImageId] = []
        self._unforgotten: list[ImageId] = []
        self._synced_commits = -1
        self.poisoned: dict[ImageId, OSError] = {}
        self.is_being_written: Callable[[ImageId], bool] = lambda image: False
        self.on_flushed: Callable[[Collection[ImageId]], None] = lambda images: None
        """Called with images that are whole on the disk; what it commits is durable with the round."""
        self.on_poisoned: Callable[[ImageId], None] = lambda image: None

    def created(self, image: ImageId) -> None:
        """A new image file exists: its directory entry needs a sync."""
        self._unsynced_names.add(image)
        self._never_flushed.add(image)
        self.wrote(image)

    def wrote(self, image: ImageId) -> None:
        """*image* has bytes that were not flushed."""
        self._dirty.add(image)
        self._unfinished.add(image)

    def may_have_been_written(self, image: ImageId) -> None:
        """*image* is as it was when it was flushed, as far as can be seen: it is flushed once more, unasked."""
        self._dirty.add(image)

    def is_flushed(self, image: ImageId) -> bool:
        """Whether *image* is whole on the disk, as it is."""
        return image not in self._unfinished and image not in self._flushing and image not in self.poisoned

    def was_flushed(self, image: ImageId) -> bool:
        """Whether *image* was whole on the disk before: written in place since, it still is a version to go back to."""
        return image not in self._never_flushed and image not in self.poisoned

    def delete_later(self, image: ImageId) -> None:
        """Delete the file once the removal of its rows is durable."""
        self._doomed.append(image)
        for each in (self._dirty, self._unsynced_names, self._unfinished, self._never_flushed):
            each.discard(image)
        self.poisoned.pop(image, None)
        self._wanted.set()

    async def sync(self, *images: ImageId) -> None:
        """Return when these images, their names and every commit so far survive a power cut.

        Raises OSError when one of them could not be flushed, now or ever before. Cancelling leaves the round running.
        """
        for image in images:
            if image in self.poisoned:
                raise OSError(errno.EIO, f"an earlier flush of image {image:016x} failed: {self.poisoned[image]}")
        waiting = self._next
        waiting.images.update(images)
        waiting.asked.update(images)
        self._wanted.set()
        self._hurry.set()
        await waiting.done.wait()
        for image in images:
            error = waiting.failed.get(image) or waiting.unopened.get(image)
            if error:
                raise OSError(errno.EIO, f"flushing image {image:016x} failed: {error}")
        if waiting.error:
            raise OSError(errno.EIO, f"flushing the catalog failed: {waiting.error}")

    async def run(self, every_s: float) -> None:
        """Serve rounds until cancelled: those that somebody asks for, and one over everything each *every_s*."""
        due = trio.current_time() + every_s
        while True:
            with trio.move_on_at(due):
                await self._wanted.wait()
            if self._wanted.is_set():  # nobody waits for a deletion, and others will follow: one flush for all
                with trio.move_on_after(_GATHER_S):
                    await self._hurry.wait()
                self._wanted, self._hurry = trio.Event(), trio.Event()
                await self._serve()
            if trio.current_time() >= due:  # however often somebody asks for something else
                self._wanted, self._hurry = trio.Event(), trio.Event()
                self._next.images.update(self._dirty)
                began = trio.current_time()
                await self._serve()  # a slow disk's rounds come as often: what waits for the next one waits long enough
                due = max(began + every_s, trio.current_time() + _LEAST_REST * every_s)

    async def flush(self) -> None:
        """Rounds over everything dirty, for a clean stop. Use when `run` is not running."""
        self._next.images.update(self._dirty)
        await self._serve()
        if self._doomed:  # what was replaced, and need not be kept any more
            await self._serve()

    async def _serve(self) -> None:
        current, self._next = self._next, _Round()
        names, self._unsynced_names = self._unsynced_names, set()
        doomed, self._doomed = self._doomed, []
        self._dirty -= current.images
        finished = current.asked | {image for image in current.images if not self.is_being_written(image)}
        self._unfinished -= finished
        self._flushing = finished
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._flush_images, current)
                self._flushing = set()
                self._dirty |= current.unopened.keys()
                self._unfinished |= finished & current.unopened.keys()
                for image, error in current.failed.items():
                    self.poisoned[image] = error
                    self.on_poisoned(image)
                flushed = finished - self.poisoned.keys() - current.unopened.keys()
                self._never_flushed -= flushed
                self.on_flushed(flushed)
                if self._catalog.in_doubt:
                    self._begin_wal_anew()
                commits = self._catalog.commits
                await trio.to_thread.run_sync(
                    self._flush_catalog, current, names, doomed, commits != self._synced_commits
                )
            if current.error is None:
                self._synced_commits = commits
                self._doomed = current.undeleted + self._doomed
                self._forget([image for image in doomed if image not in current.undeleted])
            else:
                self._doomed = doomed + self._doomed
                self._unsynced_names |= names
        except BaseException as error:  # nothing is known, and the next round does it all again
            current.error = OSError(errno.EIO, f"a flush ended with {error!r}")
            self._doomed = doomed + self._doomed
            self._unsynced_names |= names
            self._dirty |= current.images
            self._unfinished |= finished
            raise
        finally:
            self._flushing = set()
            current.done.set()

    def _forget(self, deleted: list[ImageId]) -> None:
        self._unforgotten += deleted
        try:
            if self._unforgotten:
                self._deleted(self._unforgotten)
        except OSError as error:  # a full disk; the next round does it, or the next mount
            log.warning("the rows of %d deleted images stay for now: %s", len(self._unforgotten), error)
        else:
            self._unforgotten = []

    def _begin_wal_anew(self) -> None:
        try:
            self._catalog.begin_wal_anew()
        except OSError as error:
            log.error("the catalog's log, of which a flush failed, cannot be begun anew: %s", error)

    def _flush_images(self, current: _Round) -> None:
        if len(current.images) > 1:
            begin_writing_out(map(self._images.file, current.images))
        for image in current.images:
            try:
                fd = self._images.open(image)
            except FileNotFoundError:  # deleted since: nobody can miss its bytes
                continue
            except OSError as error:  # no descriptor left, say: nothing is known to be lost
                current.unopened[image] = error
                continue
            try:
                os.fdatasync(fd)
            except OSError as error:
                log.error("flushing image %016x failed; what was written to it may be lost: %s", image, error)
                current.failed[image] = error
            finally:
                os.close(fd)

    def _flush_catalog(
        self, current: _Round, names: set[ImageId], doomed: list[ImageId], catalog_changed: bool
    ) -> None:
        try:
            if names:
                self._images.sync_directories(names)
            if catalog_changed or doomed:
                self._catalog.sync_wal()
        except OSError as error:
            log.error("flushing the catalog failed: %s", error)
            current.error = error
            return
        for image in doomed:
            try:
                self._images.delete(image)
            except OSError as error:  # tried again with the next round
                log.warning("image %016x cannot be deleted: %s", image, error)
                current.undeleted.append(image)
