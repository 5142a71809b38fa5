"""Sealing: turn the image of a closed file into a manifest. Flush, find boundaries, hash, record.

Who calls: opening code submits an image when its last writer closed it; `run` takes one at a time and does the reading
and hashing in a worker thread, which touches the image's descriptor and nothing else. A seal is discarded when its
image was written since it began: the next close submits it again. Cancelling leaves nothing behind.

How a file is cut is `ckptfs.formats`' work; logs, which stay open, are `ckptfs.replica.logs`'.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
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
        self._busy: ImageId | None = None
        self.on_sealed: Callable[[Inode | None, ImageId, int], None] = lambda ino, image, manifest: None

        self.on_failed: Callable[[ImageId], None] = lambda image: None
        """Called with an image whose bytes the disk did not give: no cut may wait for it."""

    def submit(self, image: ImageId) -> None:
        """Seal *image* soon; asking twice is asking once."""
        self._queue[image] = None
        self._wanted.set()

    @property
    def idle(self) -> bool:
        return not self._queue and self._busy is None

    @property
    def backlog(self) -> int:
        return len(self._queue) + (self._busy is not None)

    async def run(self) -> None:
        """Seal what is submitted, beginning with what an earlier stop left unsealed, until cancelled."""
        for image in self._store.contents.unsealed_images():
            if not self._writes.is_being_written(image):
                self.submit(image)
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            while self._queue:
                image = next(iter(self._queue))
                del self._queue[image]
                self._busy = image
                try:
                    await self._seal(image)
                except FileNotFoundError:
                    pass  # deleted while it waited
                except FormatError:
                    log.debug("image %016x was truncated while it was sealed", image)  # its close submits it again
                except OSError as error:
                    log.error("image %016x could not be sealed: %s", image, error)
                    self.on_failed(image)
                except Exception:
                    log.exception("image %016x could not be sealed", image)  # invariant 9: the mount lives on
                finally:
                    self._busy = None

    async def _seal(self, image: ImageId) -> None:
        if image in self._store.sync.poisoned or not self._store.contents.needs_seal(image):
            return
        generation = self._writes.generation(image)
        if self._writes.is_being_written(image):
            return
        path = self._store.images.path(image)
        content = await trio.to_thread.run_sync(hash_image, os.fspath(path), self._store.settings.tuning)
        await self._store.sync.sync(image)  # also flushes the image's name
        if self._writes.generation(image) != generation or self._writes.is_being_written(image):
            return
        if not self._store.contents.needs_seal(image):
            return
        self._record(image, content)

    def _record(self, image: ImageId, content: Content) -> None:
        # Times as they are now: nobody wrote since the hashing began, but utimens may have set them.
        status = os.stat(self._store.images.path(image))
        located = [
            (chunk.id, offset, chunk.length) for chunk, offset in zip(content.chunks, content.offsets(), strict=True)
        ]
        contents, names = self._store.contents, self._store.names
        with self._store.catalog.transaction():
            manifest = contents.add_manifest(size=content.size, body=encode_content(content))
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
            contents.add_locations(image, located)
        if ino is not None:
            self._writes.sealed(image, manifest)
        self.on_sealed(ino, image, manifest)


def hash_image(path: str, tuning: Tuning) -> Content:
    """Flush, cut and hash an image file. Blocking; for a worker thread.

    Raises OSError; FormatError when the file shrank meanwhile.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
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
