"""Sealing: turn the image of a closed file into a manifest. Flush, find boundaries, hash, record.

Who calls: opening code submits an image when its last writer closed it; `run` takes a large one, or several small ones,
at a time and does the reading and hashing in a worker thread, which touches the image's descriptor and nothing else. A
seal is discarded when its image was written since it began: the next close submits it again. Cancelling leaves nothing
behind.

How a file is cut is `ckptfs.formats`' work; logs, which stay open, are `ckptfs.replica.logs`'.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Protocol

import trio

from ckptfs.config import Tuning
from ckptfs.encoding.manifest import Chunk, Content, TensorSpan, encode_content
from ckptfs.errors import FormatError
from ckptfs.formats.base import FileSource
from ckptfs.formats.cutting import pieces
from ckptfs.formats.recognise import recognise
from ckptfs.ids import ChunkId, ImageId, Inode, digest
from ckptfs.local.images import data_spans
from ckptfs.local.store import Store
from ckptfs.spans import SpanSet

log = logging.getLogger(__name__)

_BATCH_IMAGES, _BATCH_BYTES = 256, 16 << 20
"""Sealed together at most: three flushes of the disk for all instead of for each; none waits long for the rest."""

_PAUSE_S = 0.5
"""Longest pause between two batches that others are still being added to. Each flushes the disk's journal, for which
every file being created waits; so they take a third of the time and hold three times as much."""

_LOCATIONS_AT_ONCE = 500
"""Rows per transaction: 5 to 10 ms, in which no request is served."""


class WriteState(Protocol):
    """What sealing must know of open files."""

    def generation(self, image: ImageId) -> int: ...
    def is_being_written(self, image: ImageId) -> bool: ...
    def sealed(self, image: ImageId, manifest: int) -> None: ...


class Sealer:
    """The queue of closed images and the worker that seals them.

    `on_sealed(ino, image, manifest)` is called on the loop after each commit; ino is None when only a cut has it.
    """

    def __init__(self, store: Store, writes: WriteState) -> None:
        self._store = store
        self._writes = writes
        self._queue: dict[ImageId, None] = {}
        self._wanted = trio.Event()
        self._busy: list[ImageId] = []
        self.on_sealed: Callable[[Inode | None, ImageId, int], None] = lambda ino, image, manifest: None

        self.on_failed: Callable[[ImageId], None] = lambda image: None
        """Called with an image whose bytes the disk did not give: no cut may wait for it."""

    def submit(self, image: ImageId) -> None:
        """Seal *image* soon; asking twice is asking once."""
        self._queue[image] = None
        self._wanted.set()

    @property
    def idle(self) -> bool:
        return not self._queue and not self._busy

    async def run(self) -> None:
        """Seal what is submitted, beginning with what an earlier stop left unsealed, until cancelled."""
        for image in self._store.contents.unsealed_images():
            if not self._writes.is_being_written(image):
                self.submit(image)
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            while self._queue:
                started = trio.current_time()
                self._busy = self._take()
                try:
                    await self._seal(self._busy)
                except Exception:
                    log.exception("%d images could not be sealed", len(self._busy))  # invariant 9: the mount lives on
                finally:
                    self._busy = []
                if self._queue and len(self._queue) < _BATCH_IMAGES:  # small files are coming in one after the other
                    await trio.sleep(min(_PAUSE_S, 2 * (trio.current_time() - started)))

    def _take(self) -> list[ImageId]:
        """The next images to seal: small ones share the flushes of the disk, a large one is on its own."""
        taken: list[ImageId] = []
        room = _BATCH_BYTES
        for image in list(islice(self._queue, _BATCH_IMAGES)):
            try:
                room -= os.stat(self._store.images.path(image)).st_size
            except FileNotFoundError:
                pass  # deleted while it waited
            if taken and room < 0:
                break
            taken.append(image)
            del self._queue[image]
        return taken

    async def _seal(self, images: list[ImageId]) -> None:
        generations = {
            image: self._writes.generation(image)
            for image in images
            if image not in self._store.sync.poisoned and self._is_due(image)
        }
        paths = {image: os.fspath(self._store.images.path(image)) for image in generations}
        contents, failed = await trio.to_thread.run_sync(hash_images, paths, self._store.settings.tuning)
        try:
            await self._store.sync.sync(*contents)  # also flushes the images' names
        except OSError as error:
            poisoned = contents.keys() & self._store.sync.poisoned.keys()
            log.error("%d images could not be sealed: %s", len(poisoned or contents), error)
            failed |= poisoned or contents.keys()  # none poisoned: it was the catalog that could not be flushed
        for image in failed:
            self.on_failed(image)
        for image in contents.keys() - failed:
            if self._writes.generation(image) == generations[image] and self._is_due(image):
                await self._record(image, *contents[image])
                await trio.lowlevel.checkpoint()  # requests come first

    def _is_due(self, image: ImageId) -> bool:
        return self._store.contents.needs_seal(image) and not self._writes.is_being_written(image)

    async def _record(self, image: ImageId, content: Content, encoded: bytes) -> None:
        """Commit the seal, and the locations of its chunks: those of a large image in steps, while it stays sealed.

        A kill in between costs locations, which are only another place to find a chunk; the image itself is whole.
        """
        # Times as they are now: nobody wrote since the hashing began, but utimens may have set them.
        status = os.stat(self._store.images.path(image))
        located = [
            (chunk.id, offset, chunk.length) for chunk, offset in zip(content.chunks, content.offsets(), strict=True)
        ]
        contents, names = self._store.contents, self._store.names
        with self._store.catalog.transaction():
            manifest = contents.add_manifest(size=content.size, body=encoded)
            contents.sealed(image, manifest)
            ino = contents.inode_of_image(image)
            if ino is not None:
                row = names.inode(ino)
                names.update_inode(
                    ino,
                    manifest=manifest,
                    size=content.size,
                    mtime_ns=status.st_mtime_ns,
                    ctime_ns=max(row.ctime_ns, status.st_ctime_ns),
                )
            contents.add_locations(image, located[:_LOCATIONS_AT_ONCE])
        if ino is not None:
            self._writes.sealed(image, manifest)
        self.on_sealed(ino, image, manifest)
        for start in range(_LOCATIONS_AT_ONCE, len(located), _LOCATIONS_AT_ONCE):
            await trio.lowlevel.checkpoint()
            if not contents.is_sealed_as(image, manifest):  # it is being written, or gone: invariant 1
                break
            contents.add_locations(image, located[start : start + _LOCATIONS_AT_ONCE])


def hash_images(
    paths: Mapping[ImageId, str], tuning: Tuning
) -> tuple[dict[ImageId, tuple[Content, bytes]], set[ImageId]]:
    """`hash_image` of each, also encoded, and those that the disk failed to give. Blocking; for a worker thread."""
    found: dict[ImageId, tuple[Content, bytes]] = {}
    failed: set[ImageId] = set()
    for image, path in paths.items():
        try:
            content = hash_image(path, tuning)
            content.offsets()  # computed here, not on the loop
            found[image] = content, encode_content(content)
        except FileNotFoundError:
            pass  # deleted while it waited
        except FormatError:
            log.debug("image %016x was truncated while it was sealed", image)  # its close submits it again
        except OSError as error:
            log.error("image %016x could not be sealed: %s", image, error)
            failed.add(image)
        except Exception:
            log.exception("image %016x could not be sealed", image)
            failed.add(image)
    return found, failed


def hash_image(path: str, tuning: Tuning) -> Content:
    """Flush, cut and hash an image file. Blocking; for a worker thread.

    Raises OSError; FormatError when the file shrank meanwhile.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        size = os.fstat(fd).st_size
        spans = data_spans(fd, size)
        source = FileSource(fd, size)
        tensors = recognise(source)
        chunks = tuple(
            Chunk(ChunkId(digest(data)), piece.end - piece.start, piece.dtype)
            for piece in pieces(size, tensors, spans, tuning, source.read)
            for data in (source.read(piece.start, piece.end - piece.start),)
        )
    finally:
        os.close(fd)
    return Content(
        size=size,
        holes=tuple(SpanSet(spans).missing(0, size)),
        chunks=chunks,
        tensors=tuple(TensorSpan(each.name, each.dtype, each.shape, each.start, each.end) for each in tensors),
    )
