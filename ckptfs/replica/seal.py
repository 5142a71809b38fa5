"""Sealing: turn the image of a closed file into a manifest. Flush, find boundaries, hash, record.

Who calls: opening code submits an image when its last writer closed it; `run` takes a large one, or several small ones,
at a time and does the reading and hashing in a worker thread, which touches the image's descriptor and nothing else. A
seal is discarded when its image was written since it began: the next close submits it again. Cancelling leaves nothing
behind.

How a file is cut is `ckptfs.formats`' work; logs, which stay open, are `ckptfs.replica.logs`'.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from itertools import accumulate, islice
from typing import Protocol

import trio

from ckptfs.config import Tuning
from ckptfs.encoding.manifest import Chunk, Content, TensorSpan, encode_content
from ckptfs.errors import FormatError
from ckptfs.formats.base import FileSource
from ckptfs.formats.cutting import pieces
from ckptfs.formats.recognise import recognise
from ckptfs.ids import ChunkId, ImageId, Inode, digest
from ckptfs.local.images import begin_writing_out, data_spans
from ckptfs.local.store import Store
from ckptfs.spans import SpanSet

log = logging.getLogger(__name__)

_BATCH_IMAGES, _BATCH_BYTES = 256, 16 << 20
"""Sealed together at most: three flushes of the disk for all instead of for each; none waits long for the rest."""

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

    def __init__(self, store: Store, writes: WriteState) -> None:
        self._store = store
        self._writes = writes
        self._queue: dict[ImageId, int] = {}
        """What is to be sealed, and how many bytes each had when it was submitted."""
        self._wanted = trio.Event()
        self._busy: list[ImageId] = []
        self._submitted_at, self._burst_began = -math.inf, math.inf
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
            await self._wanted.wait()
            self._wanted = trio.Event()
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
                    self._busy = []
            self._burst_began = math.inf

    def _take(self) -> list[ImageId]:
        """The next images to seal: a large one on its own; small ones share the flushes of the disk.

        None when there are only small ones, and more are coming in.
        """
        taken = [image for image, size in self._queue.items() if size > _BATCH_BYTES][:1]
        if not taken and (len(self._queue) == 1 or not self._is_burst()):
            first = list(islice(self._queue.items(), _BATCH_IMAGES))
            totals = accumulate(size for _, size in first)
            taken = [image for (image, _), total in zip(first, totals, strict=True) if total <= _BATCH_BYTES]
        for image in taken:
            del self._queue[image]
        return taken

    def _is_burst(self) -> bool:
        now = trio.current_time()
        self._burst_began = min(self._burst_began, now)
        return now - self._submitted_at < _BURST_GAP_S and now - self._burst_began < _BURST_S

    async def _seal(self, images: list[ImageId]) -> None:
        generations = {
            image: self._writes.generation(image)
            for image in images
            if image not in self._store.sync.poisoned and self._is_due(image)
        }
        paths = {image: self._store.images.file(image) for image in generations}
        contents, failed = await trio.to_thread.run_sync(hash_images, paths, self._store.settings.tuning)
        try:
            await self._store.sync.sync(*contents)  # also flushes the images' names
        except OSError as error:
            poisoned = contents.keys() & self._store.sync.poisoned.keys()
            log.error("%d images could not be sealed: %s", len(poisoned or contents), error)
            failed |= poisoned or contents.keys()  # none poisoned: it was the catalog that could not be flushed
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
                await self._locate_rest(image, manifest, contents[image][0])

    def _is_due(self, image: ImageId) -> bool:
        return self._store.contents.needs_seal(image) and not self._writes.is_being_written(image)

    def _record(self, hashed: Mapping[ImageId, tuple[Content, bytes]]) -> dict[ImageId, int]:
        """Commit the seals of some images, with the first locations of their chunks. Returns their manifests."""
        with self._store.catalog.transaction():
            seals = {image: self._record_one(image, *each) for image, each in hashed.items()}
        for image, (ino, manifest) in seals.items():
            if ino is not None:
                self._writes.sealed(image, manifest)
            self.on_sealed(ino, image, manifest)
        return {image: manifest for image, (_, manifest) in seals.items()}

    def _record_one(self, image: ImageId, content: Content, encoded: bytes) -> tuple[Inode | None, int]:
        # Times as they are now: nobody wrote since the hashing began, but utimens may have set them.
        status = self._store.images.status(image)
        contents, names = self._store.contents, self._store.names
        manifest = contents.add_manifest(size=content.size, body=encoded)
        contents.sealed(image, manifest)
        ino = contents.inode_of_image(image)
        if ino is not None:
            names.update_inode(
                ino,
                manifest=manifest,
                size=content.size,
                mtime_ns=status.st_mtime_ns,
                ctime_ns=max(names.inode(ino).ctime_ns, status.st_ctime_ns),
            )
        contents.add_locations(image, _located(content, 0))
        return ino, manifest

    async def _locate_rest(self, image: ImageId, manifest: int, content: Content) -> None:
        """Commit the locations that `_record` left out, in steps, while the image stays sealed.

        A kill in between costs locations, which are only another place to find a chunk; the image itself is whole.
        """
        for start in range(_LOCATIONS_AT_ONCE, len(content.chunks), _LOCATIONS_AT_ONCE):
            if not self._store.contents.is_sealed_as(image, manifest):  # it is being written, or gone: invariant 1
                break
            self._store.contents.add_locations(image, _located(content, start))
            await trio.lowlevel.checkpoint()


def _located(content: Content, start: int) -> list[tuple[ChunkId, int, int]]:
    """(chunk, offset, length) of so many chunks from number *start* on as one transaction takes."""
    some = slice(start, start + _LOCATIONS_AT_ONCE)
    return [
        (chunk.id, offset, chunk.length)
        for chunk, offset in zip(content.chunks[some], content.offsets()[some], strict=True)
    ]


def hash_images(
    paths: Mapping[ImageId, str], tuning: Tuning
) -> tuple[dict[ImageId, tuple[Content, bytes]], set[ImageId]]:
    """`hash_image` of each, also encoded, and those that the disk failed to give. Blocking; for a worker thread."""
    found: dict[ImageId, tuple[Content, bytes]] = {}
    failed: set[ImageId] = set()
    if len(paths) > 1:
        begin_writing_out(paths.values())
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
