"""Sealing: turn the image of a closed file into a manifest. Flush, find boundaries, hash, record.

Who calls: opening code submits an image when its last writer closed it; `run` takes a large one, or several small ones,
at a time and has them read and hashed in the background. A
seal is discarded when its image was written since it began: the next close submits it again. Cancelling leaves nothing
behind.

Hashing is `ckptfs.background.hashing`; logs, which stay open, are `ckptfs.replica.logs`'.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from itertools import accumulate, islice
from typing import Protocol

import trio

from ckptfs.background.caller import Background, Threads
from ckptfs.background.hashing import Hashed
from ckptfs.ids import ImageId, Inode
from ckptfs.local.store import Store

log = logging.getLogger(__name__)

_BATCH_IMAGES, _BATCH_BYTES = 256, 16 << 20
"""Sealed together at most: three flushes of the disk for all instead of for each; none waits long for the rest."""

_LIGHT_IMAGES = 16
"""More than so many files are no light work: each costs a fifth of a millisecond however small it is."""

_BURST_GAP_S, _BURST_S = 0.1, 30.0
"""Small files that are closed one after the other, with no longer gap than this, are sealed when no more of them come,
or after so long. Sealing them meanwhile doubled what creating each cost: both want the interpreter, and a flush of the
disk's journal makes every file being created wait."""

_RETRY_S = 5.0
"""Until images whose seal could not be committed are tried again."""

_LOCATIONS_AT_ONCE, _RECORDED_TOGETHER = 500, 16
"""Rows, and seals, in one transaction: 5 to 10 ms at most, in which no request is served."""


class WriteState(Protocol):
    """What sealing must know of open files."""

    def generation(self, image: ImageId) -> int: ...
    def is_being_written(self, image: ImageId) -> bool: ...
    def sealed(self, image: ImageId, manifest: int) -> None: ...


class Sealer:
    """The queue of closed images and the worker that seals them.

    `on_sealed(ino, image, manifest)` is called on the loop after each commit; ino is None when only a cut has it.
    """

    def __init__(self, store: Store, writes: WriteState, background: Background | None = None) -> None:
        self._store = store
        self._background = background or Threads()
        self._writes = writes
        self._queue: dict[ImageId, int] = {}
        """What is to be sealed, and how many bytes each had when it was submitted."""
        self._wanted = trio.Event()
        self._busy: dict[ImageId, int] = {}
        self._submitted_at, self._burst_began = -math.inf, math.inf
        self._read_again_at = math.inf
        self.on_sealed: Callable[[Inode | None, ImageId, int], None] = lambda ino, image, manifest: None
        self.on_failed: Callable[[ImageId], None] = lambda image: None
        """Called with an image whose bytes the disk did not give: no cut may wait for it."""

    def submit(self, image: ImageId) -> None:
        """Seal *image* soon; asking twice is asking once."""
        try:
            self._queue[image] = self._store.images.status(image).st_size
        except FileNotFoundError:
            return  # deleted
        self._submitted_at = trio.current_time()
        self._wanted.set()

    def hurry(self) -> None:
        """Somebody waits: do not wait for more small files before what is there is sealed."""
        if not self.idle:
            self._burst_began = -math.inf

    @property
    def idle(self) -> bool:
        return not self._queue and not self._busy

    async def run(self) -> None:
        """Seal what is submitted, beginning with what an earlier stop left unsealed, until cancelled."""
        for image in self._store.contents.unsealed_images():
            if not self._writes.is_being_written(image):
                self.submit(image)
        while True:
            with trio.move_on_at(self._read_again_at):
                await self._wanted.wait()
            self._wanted = trio.Event()
            self._submit_unreadable()
            while self._queue:
                self._busy = self._take()
                if not self._busy:
                    await trio.sleep(_BURST_GAP_S)
                    continue
                try:
                    await self._seal(self._busy)
                except Exception:  # the disk is full, say; invariant 9: the mount lives on
                    log.exception("%d images could not be sealed and are tried again", len(self._busy))
                    for image in self._busy:
                        self.submit(image)
                    await trio.sleep(_RETRY_S)
                finally:
                    self._busy = {}
            self._burst_began = math.inf

    def _submit_unreadable(self) -> None:
        """Once more what the disk did not give, when it is time."""
        if trio.current_time() < self._read_again_at:
            return
        self._read_again_at = math.inf
        for image in self._store.unreadable:
            self.submit(image)
        self._store.unreadable.intersection_update(self._queue)  # others were deleted

    def _take(self) -> dict[ImageId, int]:
        """The next images to seal, and their bytes: a large one on its own; small ones share the flushes of the disk.

        Nothing when there are only small ones, and more are coming in.
        """
        taken = [image for image, size in self._queue.items() if size > _BATCH_BYTES][:1]
        if not taken and (len(self._queue) == 1 or not self._is_burst()):
            first = list(islice(self._queue.items(), _BATCH_IMAGES))
            totals = accumulate(size for _, size in first)
            taken = [image for (image, _), total in zip(first, totals, strict=True) if total <= _BATCH_BYTES]
        return {image: self._queue.pop(image) for image in taken}

    def _is_burst(self) -> bool:
        now = trio.current_time()
        self._burst_began = min(self._burst_began, now)
        return now - self._submitted_at < _BURST_GAP_S and now - self._burst_began < _BURST_S

    async def _seal(self, images: Mapping[ImageId, int]) -> None:
        generations = {
            image: self._writes.generation(image)
            for image in images
            if image not in self._store.sync.poisoned and self._is_due(image)
        }
        paths = [(image, self._store.images.file(image)) for image in generations]
        tuning = dataclasses.astuple(self._store.settings.tuning)
        light_bytes = self._store.settings.tuning.light_bytes
        light = len(images) <= _LIGHT_IMAGES and sum(images.values()) <= light_bytes
        found, refused = await self._background.call("hash_images", paths, tuning, light=light)
        contents = {ImageId(image): Hashed._make(each) for image, each in found}
        failed = {ImageId(image) for image, _ in refused}
        for image, why in refused:
            if image not in self._store.unreadable:
                log.error("image %016x could not be sealed, and is tried again: %s", image, why)
        self._store.unreadable.difference_update(images.keys() - generations.keys())
        self._store.unreadable |= failed
        if failed:
            self._read_again_at = trio.current_time() + self._store.settings.tuning.retry_most_s
        try:
            await self._store.sync.sync(*contents)  # also flushes the images' names
        except OSError as error:
            poisoned = contents.keys() & self._store.sync.poisoned.keys()
            if not poisoned:  # it was the catalog that could not be flushed: they are tried again
                raise
            log.error("%d images could not be sealed: %s", len(poisoned), error)
            failed |= poisoned
            for image in contents.keys() - poisoned:  # whether these were flushed was not told
                self.submit(image)
            contents = {}
        for image in failed:
            self.on_failed(image)
        hashed = [image for image in contents if image not in failed]
        for start in range(0, len(hashed), _RECORDED_TOGETHER):
            seals = self._record(
                {
                    image: contents[image]
                    for image in hashed[start : start + _RECORDED_TOGETHER]
                    if self._writes.generation(image) == generations[image] and self._is_due(image)
                }
            )
            await trio.lowlevel.checkpoint()  # requests come first
            for image, manifest in seals.items():
                await self._locate_rest(image, manifest, contents[image])

    def _is_due(self, image: ImageId) -> bool:
        return self._store.contents.needs_seal(image) and not self._writes.is_being_written(image)

    def _record(self, hashed: Mapping[ImageId, Hashed]) -> dict[ImageId, int]:
        """Commit the seals of some images, with the first locations of their chunks. Returns their manifests."""
        with self._store.catalog.transaction():
            seals = {image: self._record_one(image, each) for image, each in hashed.items()}
        for image, (ino, manifest) in seals.items():
            if ino is not None:
                self._writes.sealed(image, manifest)
            self.on_sealed(ino, image, manifest)
            self._store.unreadable.discard(image)
        return {image: manifest for image, (_, manifest) in seals.items()}

    def _record_one(self, image: ImageId, hashed: Hashed) -> tuple[Inode | None, int]:
        # Times as they are now: nobody wrote since the hashing began, but utimens may have set them.
        status = self._store.images.status(image)
        contents, names = self._store.contents, self._store.names
        manifest = contents.add_manifest(size=hashed.size, body=hashed.encoded)
        contents.sealed(image, manifest)
        ino = contents.inode_of_image(image)
        if ino is not None:
            names.update_inode(
                ino,
                manifest=manifest,
                size=hashed.size,
                mtime_ns=status.st_mtime_ns,
                ctime_ns=max(names.inode(ino).ctime_ns, status.st_ctime_ns),
            )
        contents.add_locations(image, hashed.located(0, _LOCATIONS_AT_ONCE))
        return ino, manifest

    async def _locate_rest(self, image: ImageId, manifest: int, hashed: Hashed) -> None:
        """Commit the locations that `_record` left out, in steps, while the image stays sealed.

        A kill in between costs locations, which are only another place to find a chunk; the image itself is whole.
        """
        for start in range(_LOCATIONS_AT_ONCE, len(hashed.lengths), _LOCATIONS_AT_ONCE):
            if not self._store.contents.is_sealed_as(image, manifest):  # it is being written, or gone: invariant 1
                break
            self._store.contents.add_locations(image, hashed.located(start, _LOCATIONS_AT_ONCE))
            await trio.lowlevel.checkpoint()
