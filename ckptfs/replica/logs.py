"""Logs: files that stay open for hours are sealed from time to time while they grow.

A log's image changes under us, so that nothing in it may be recorded as a location (invariant 1). Instead the bytes
that came since the last seal are copied into a *snapshot* image that nobody else writes, hashed there, and recorded
there: a provisional manifest, whose earlier chunks are those of the seal before. Replication then treats it as any
other sealed file, and sends only what was appended. When the last writer closes the log it is sealed like any file,
and the snapshot goes when no cut needs it.

Who calls: `run` on the loop; copying and hashing happen in a worker thread on its own descriptors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from ckptfs.config import MIB, Settings
from ckptfs.encoding.manifest import Chunk, Content, encode_content
from ckptfs.formats.base import FileSource
from ckptfs.formats.cutting import pieces
from ckptfs.ids import ChunkId, ImageId, Inode, digest
from ckptfs.local.store import Store

log = logging.getLogger(__name__)

MOST_GROWTH_BYTES = 64 * MIB
"""A file that grew by more than this between two looks is a checkpoint being written, not a log: it is not copied."""


@dataclass(frozen=True)
class Provisional:
    """A log as it was last sealed."""

    image: ImageId
    manifest: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass
class _Log:
    source: ImageId
    snapshot: ImageId
    sealed_at: float
    content: Content = field(default_factory=lambda: Content(0, (), ()))
    manifest: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0


@dataclass(frozen=True)
class OpenLog:
    """An open, changed file, as far as this module looks at it."""

    ino: Inode
    image: ImageId
    opened_at: float
    fsynced_at: float | None
    lowest_write: int | None
    """Smallest offset that was written since `forget_writes`; None: nothing was."""
    unwatched: bool = False
    """Nobody tells what is written: `lowest_write` only tells that something was."""


class LogSealer:
    """Finds logs among the open files and seals them. `on_sealed(ino, unchanged)` follows each provisional seal."""

    def __init__(self, store: Store, open_logs: Callable[[], list[OpenLog]]) -> None:
        self._store = store
        self._open_logs = open_logs
        self._logs: dict[Inode, _Log] = {}
        self.on_sealed: Callable[[Inode, bool], None] = lambda ino, unchanged: None
        self.forget_writes: Callable[[Inode], None] = lambda ino: None
        """Resets `lowest_write`: what was written so far is being sealed."""
        self.release: Callable[[ImageId], None] = lambda image: None
        """Drops an image if nothing else needs it."""

    def holds(self, image: ImageId) -> bool:
        """Whether *image* is the snapshot of an open log."""
        return any(each.snapshot == image for each in self._logs.values())

    def provisional(self, ino: Inode) -> Provisional | None:
        """The last seal of an open log; None when it has none yet."""
        found = self._logs.get(ino)
        if found is None or not found.manifest:
            return None
        if not self._store.contents.has_manifest(found.manifest):  # the last cut that had it is published
            found.manifest = self._store.contents.add_manifest(
                size=found.content.size, body=encode_content(found.content)
            )
        return Provisional(found.snapshot, found.manifest, found.content.size, found.mtime_ns, found.ctime_ns)

    def closed(self, ino: Inode) -> None:
        """The last writer is gone: the file is sealed for good now."""
        found = self._logs.pop(ino, None)
        if found:
            self.release(found.snapshot)

    async def run(self) -> None:
        """Look at the open files now and then, until cancelled."""
        settings = self._store.settings
        pause_s = min(1.0, settings.log_seal_s / 4, settings.log_seal_after_fsync_s / 4)
        while True:
            await trio.sleep(pause_s)
            for file in self._open_logs():
                if self._is_due(file, settings):
                    try:
                        await self._seal(file)
                    except OSError as error:
                        log.error("the log with inode %d could not be sealed: %s", file.ino, error)

    def _is_due(self, file: OpenLog, settings: Settings) -> bool:
        if file.lowest_write is None:  # nothing new
            return False
        known = self._logs.get(file.ino)
        now, last = trio.current_time(), known.sealed_at if known else file.opened_at
        if now - last >= settings.log_seal_s:
            return True
        return (
            file.fsynced_at is not None
            and file.fsynced_at > last
            and now - file.fsynced_at >= settings.log_seal_after_fsync_s
        )

    async def _seal(self, file: OpenLog) -> None:
        known = self._logs.get(file.ino)
        unchanged = known is not None and known.source == file.image and await self._only_grew(file, known.content)
        if self._logs.get(file.ino) is not known:
            return  # closed meanwhile
        if known is None or not unchanged:
            self.closed(file.ino)
            snapshot = self._store.images.create()
            os.close(snapshot.fd)
            self._store.sync.created(snapshot.id)
            known = _Log(file.image, snapshot.id, trio.current_time())
            with self._store.catalog.transaction():
                self._store.contents.add_image(snapshot.id, whole=False)
            self._logs[file.ino] = known
        known.sealed_at = trio.current_time()
        before = known.content
        self.forget_writes(file.ino)
        copied = await trio.to_thread.run_sync(self._copy, file.image, known.snapshot, before)
        if copied is None or self._logs.get(file.ino) is not known:
            return
        content, known.mtime_ns, known.ctime_ns = copied
        await self._store.sync.sync(known.snapshot)
        if self._logs.get(file.ino) is not known:
            return
        new = list(zip(content.chunks, content.offsets(), strict=True))[len(before.chunks) :]
        with self._store.catalog.transaction():
            self._store.contents.add_locations(
                known.snapshot, [(chunk.id, offset, chunk.length) for chunk, offset in new]
            )
            known.manifest = self._store.contents.add_manifest(size=content.size, body=encode_content(content))
            known.content = content
            self._store.names.state_changed(file.ino, self._store.clock.tick())
        self.on_sealed(file.ino, unchanged)

    async def _only_grew(self, file: OpenLog, before: Content) -> bool:
        """Whether what was sealed *before* is still there as it was."""
        if file.unwatched:
            return await trio.to_thread.run_sync(self._begins_with, file.image, before)
        return (file.lowest_write or 0) >= before.size

    def _begins_with(self, image: ImageId, content: Content) -> bool:
        fd = self._store.images.open(image)
        try:
            return all(
                digest(os.pread(fd, chunk.length, offset)) == chunk.id
                for chunk, offset in zip(content.chunks, content.offsets(), strict=True)
            )
        finally:
            os.close(fd)

    def _copy(self, source: ImageId, target: ImageId, before: Content) -> tuple[Content, int, int] | None:
        """Copy what came after *before* and hash the copy; None when it is too much for a log, or shrank."""
        source_fd = self._store.images.open(source)
        try:
            target_fd = self._store.images.open(target, writing=True)
            try:
                status = os.fstat(source_fd)
                start, size = before.size, status.st_size
                if not 0 < size - start <= MOST_GROWTH_BYTES:
                    return None
                at = start
                while at < size:
                    data = os.pread(source_fd, min(size - at, MIB), at)
                    if not data:
                        return None
                    at += os.pwrite(target_fd, data, at)
                snapshot = FileSource(target_fd, size)
                chunks = tuple(
                    Chunk(ChunkId(digest(data)), len(data), None)
                    for piece in pieces(size, [], [(start, size)], self._store.settings.tuning, snapshot.read, start)
                    for data in (snapshot.read(piece.start, piece.end - piece.start),)
                )
            finally:
                os.close(target_fd)
        finally:
            os.close(source_fd)
        return Content(size, (), before.chunks + chunks), status.st_mtime_ns, status.st_ctime_ns
