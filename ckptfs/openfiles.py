"""Open files: the images behind them, and what reading and writing does to them.

One `OpenFile` per inode however often it is open. The rules (design.md section 4):

- A file that is not sealed *is* its image: size and times come from there.
- The first change of a sealed file un-seals it: it is hydrated whole, ranges that a cut needs are rescued into another
  image, and its rows are removed durably before the first byte is let through.
- Truncation to nothing by the only opener takes a new image instead; the old one lives while a cut needs it.
- When the last writer closes a changed file, it is stamped and handed to sealing.

Who calls: the event loop's thread. Reads and writes of local bytes happen in the handler (a thread hop costs more than
the copy); whatever may wait for the disk or the remote is awaited. `OpenFile.lock` serialises un-sealing.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from ckptfs.attributes import SET_ID_BITS
from ckptfs.encoding.manifest import Content
from ckptfs.errors import ContentUnavailable, Stale
from ckptfs.ids import ImageId, Inode
from ckptfs.local.images import Image, copy_data
from ckptfs.local.store import Store
from ckptfs.spans import Runs, SpanSet

log = logging.getLogger(__name__)


class ChangeListener(Protocol):
    """Who wants to know of every change made here; called on the loop after the commit (settling does)."""

    def entry_changed(self, parent: Inode, name: bytes) -> None: ...
    def writing(self, ino: Inode, new: bool) -> None: ...
    def grew(self, ino: Inode) -> None: ...
    def closed(self, ino: Inode) -> None: ...
    def attributes_changed(self, ino: Inode) -> None: ...


class ByteSource(Protocol):
    """Where bytes that are not in an image come from (the hydrator)."""

    async def content(self, manifest_row: int) -> Content: ...
    async def ensure(self, image: Image, content: Content, start: int, end: int) -> None: ...
    async def read(self, image: Image, content: Content, start: int, end: int) -> bytes: ...
    def read_ahead(self, image: Image, content: Content, run_start: int, position: int) -> None: ...
    async def record(self, image: Image) -> None: ...


class NoListener:
    """For a mount without a remote."""

    def entry_changed(self, parent: Inode, name: bytes) -> None: ...
    def writing(self, ino: Inode, new: bool) -> None: ...
    def grew(self, ino: Inode) -> None: ...
    def closed(self, ino: Inode) -> None: ...
    def attributes_changed(self, ino: Inode) -> None: ...


@dataclass
class OpenFile:
    """An inode that is open. `image` changes only under `lock`."""

    ino: Inode
    image: Image
    manifest: int | None
    content: Content | None = None
    readers: int = 0
    writers: int = 0
    modified: bool = False
    """Changed since the last writer count went up from 0."""
    lowest_write: int | None = None
    """Smallest offset changed since a log's last seal; None when nothing was."""
    fsynced_at: float | None = None
    opened_for_write_at: float = 0.0
    new: bool = False
    """Created by the open that is going on: nothing of it was ever closed."""
    detached: bool = False
    """Its names belong to another inode, with other content, by now."""
    lock: trio.Lock = field(default_factory=trio.Lock)


@dataclass
class Handle:
    """One open(): what it may do, and what its last reads were."""

    file: OpenFile
    flags: int
    privileged: bool
    runs: Runs = field(default_factory=Runs)

    @property
    def writes(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class OpenFiles:
    """The table of open files and handles."""

    def __init__(self, store: Store, listener: ChangeListener, source: ByteSource | None) -> None:
        self._store = store
        self._listener = listener
        self._source = source
        self._files: dict[Inode, OpenFile] = {}
        self._handles: dict[int, Handle] = {}
        self._next_handle = 1
        self._by_image: dict[ImageId, OpenFile] = {}
        self._written: Counter[ImageId] = Counter()
        self.on_closed: Callable[[ImageId], None] = lambda image: None
        """Called when the last writer of a changed file closed it: time to seal."""
        self.on_idle: Callable[[Image], None] = lambda image: image.close()
        """Takes over an image that nobody has open, but whose fetched chunks are not recorded yet; closes it."""

    # What others ask

    def get(self, ino: Inode) -> OpenFile | None:
        return self._files.get(ino)

    def handle(self, fh: int) -> Handle:
        return self._handles[fh]

    def handles(self) -> list[int]:
        return list(self._handles)

    def files(self) -> list[OpenFile]:
        return list(self._files.values())

    def generation(self, image: ImageId) -> int:
        """Counts the changes of an image in this process; sealing compares before and after."""
        return self._written[image]

    def is_being_written(self, image: ImageId) -> bool:
        file = self._by_image.get(image)
        return file is not None and (file.lock.locked() or (file.writers > 0 and file.modified))

    def sealed(self, image: ImageId, manifest: int) -> None:
        """*image* has a manifest now: whoever has it open must un-seal it before the next change."""
        file = self._by_image.get(image)
        if file is not None:
            file.manifest = manifest
        self._written.pop(image, None)

    def forget_image(self, image: ImageId) -> None:
        self._written.pop(image, None)

    # Opening and closing

    def create(self, ino: Inode, image: Image, flags: int, *, privileged: bool) -> int:
        """A handle on a file that was just created with an empty *image*."""
        file = OpenFile(ino, image, None, new=True, modified=True)  # its row has the stamp of its creation
        self._files[ino] = file
        self._by_image[image.id] = file
        fh = self._add_handle(file, flags, privileged)
        self._listener.writing(ino, True)
        return fh

    async def open(self, ino: Inode, flags: int, *, privileged: bool) -> int:
        """Open an existing file and return its handle; with O_TRUNC it is empty afterwards.

        Raises NameMissing, OSError, ContentUnavailable (its manifest is on a remote that does not answer).
        """
        if flags & os.O_TRUNC:
            self._start_over(ino)
        file = await self._acquire(ino)
        try:
            if flags & os.O_TRUNC:  # with O_RDONLY too, as on Linux' own file systems
                await self.truncate(file, 0, privileged=privileged)
            self.check_poison(file)
        except BaseException:
            self._drop_if_idle(file)
            raise
        return self._add_handle(file, flags, privileged)

    async def release(self, fh: int) -> OpenFile:
        """The last descriptor of a handle is gone."""
        handle = self._handles.pop(fh)
        file = handle.file
        if handle.writes:
            file.writers -= 1
            if not file.writers and file.modified:
                self._finish_writing(file)
        else:
            file.readers -= 1
        self._drop_if_idle(file)
        return file

    async def borrow(self, ino: Inode, *, emptied: bool) -> OpenFile:
        """An OpenFile to be truncated without a handle, to nothing when *emptied*; give it back with `give_back`."""
        if emptied:
            self._start_over(ino)
        file = await self._acquire(ino)
        file.readers += 1
        return file

    def give_back(self, file: OpenFile) -> None:
        file.readers -= 1
        if not file.writers and file.modified:
            self._finish_writing(file)
        self._drop_if_idle(file)

    # Bytes

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        """Up to *size* bytes at *offset*; short only at the end of the file."""
        handle = self._handles[fh]
        file = handle.file
        if file.image.whole:
            return os.pread(file.image.fd, size, offset)
        assert file.content is not None and self._source is not None
        end = min(offset + size, file.content.size)
        if offset >= end:
            return b""
        run_start, position = handle.runs.read(offset, end)
        self._source.read_ahead(file.image, file.content, run_start, position)
        if file.image.present is not None and file.image.present.covers(offset, end):
            return os.pread(file.image.fd, end - offset, offset)
        return await self._source.read(file.image, file.content, offset, end)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        """Write *data* at *offset*; returns how much, less than all only where the disk became full.

        Raises OSError (ENOSPC, EIO), ContentUnavailable.
        """
        handle = self._handles[fh]
        file = handle.file
        if not file.modified or file.manifest is not None:
            await self._begin_change(file)
        written = 0
        view = memoryview(data)
        while written < len(data):
            try:
                written += os.pwrite(file.image.fd, view[written:], offset + written)
            except OSError:
                if not written:
                    raise
                break  # a short write, as of any disk that became full; the next one says why
        self._wrote(file, offset)
        if not handle.privileged:
            self.drop_set_id(file.ino)
        return written

    async def truncate(self, file: OpenFile, size: int, *, privileged: bool) -> None:
        """Set the size; bytes that appear are zeros."""
        async with file.lock:
            await self._unseal(file)
            os.ftruncate(file.image.fd, size)
        self._changing(file)
        self._wrote(file, size)
        if not privileged:
            self.drop_set_id(file.ino)

    async def fsync(self, fh: int) -> None:
        """Data and every name so far survive a power cut on this disk. Never waits for the remote."""
        file = self._handles[fh].file
        file.fsynced_at = trio.current_time()
        if file.manifest is not None and not file.modified:
            await self._store.sync.sync()
        else:
            await self._store.sync.sync(file.image.id)

    def check_poison(self, file: OpenFile) -> None:
        """Raises OSError (EIO) when a flush of the image failed before."""
        error = self._store.sync.poisoned.get(file.image.id)
        if error:
            raise OSError(errno.EIO, f"an earlier flush of inode {file.ino} failed: {error}")

    def drop_set_id(self, ino: Inode) -> None:
        """A write by somebody unprivileged clears S_ISUID and S_ISGID."""
        row = self._store.names.inode(ino)
        mode = row.mode & ~SET_ID_BITS
        if mode != row.mode:
            with self._store.catalog.transaction():
                self._store.names.update_inode(ino, mode=mode)
                self._store.names.state_changed(ino, self._store.clock.tick())

    # Within

    async def _acquire(self, ino: Inode) -> OpenFile:
        file = self._files.get(ino)
        if file and not file.detached:
            return file
        row = self._store.names.inode(ino)
        if row.manifest is None and row.image is None:
            raise Stale(f"the content of inode {ino} was replaced by another writer")
        content = None
        if row.manifest is not None and (row.image is None or not self._store.contents.image_is_whole(row.image)):
            if self._source is None:
                raise ContentUnavailable(
                    f"inode {ino} has bytes that only the remote holds: mount with --remote to read it"
                )
            content = await self._source.content(row.manifest)
            file = self._files.get(ino)
            if file:  # somebody else was faster
                return file
            row = self._store.names.inode(ino)
        file = OpenFile(ino, self._open_image(row.image, row.manifest, content), row.manifest, content)
        if row.image is None:
            with self._store.catalog.transaction():
                self._store.contents.add_image(file.image.id, whole=file.image.whole)
                self._store.names.update_inode(ino, image=file.image.id)
        self._files[ino] = file
        self._by_image[file.image.id] = file
        return file

    def _open_image(self, image_id: ImageId | None, manifest: int | None, content: Content | None) -> Image:
        if image_id is None:
            assert content is not None
            image = self._store.images.create()
            self._store.sync.created(image.id)
            os.ftruncate(image.fd, content.size)
            if content.chunks:
                image.present = SpanSet(content.holes)
            return image
        image = Image(image_id, self._store.images.open(image_id))
        if manifest is not None and not self._store.contents.image_is_whole(image_id):
            assert content is not None
            image.present = SpanSet(content.holes)
            for offset, length in self._store.contents.locations_in(image_id):
                image.present.add(offset, offset + length)
        return image

    def _add_handle(self, file: OpenFile, flags: int, privileged: bool) -> int:
        fh = self._next_handle
        self._next_handle += 1
        self._handles[fh] = handle = Handle(file, flags, privileged)
        if handle.writes:
            if not file.writers:
                file.opened_for_write_at = trio.current_time()
            file.writers += 1
        else:
            file.readers += 1
        return fh

    async def _begin_change(self, file: OpenFile) -> None:
        async with file.lock:
            await self._unseal(file)
        self._changing(file)

    async def _unseal(self, file: OpenFile) -> None:
        """Make the image writable: whole, needed by no cut, named by no row (invariants 1 and 2)."""
        self.check_poison(file)
        if file.manifest is None and not self._store.contents.image_in_cut(file.image.id):
            return
        if not file.image.whole:
            assert file.content is not None and self._source is not None
            await self._source.ensure(file.image, file.content, 0, file.content.size)
            await self._source.record(file.image)
        if self._store.contents.image_in_cut(file.image.id):
            await self._rescue(file.image)
        if file.manifest is None:
            return
        with self._store.catalog.transaction():
            self._store.names.update_inode(file.ino, manifest=None)
            self._store.contents.drop_locations(file.image.id)
            self._store.contents.set_image_whole(file.image.id)
            self._store.contents.drop_unneeded_manifests([file.manifest])
        row = self._store.names.inode(file.ino)
        os.utime(file.image.fd, ns=(row.atime_ns, row.mtime_ns))
        file.manifest = file.content = None
        file.image.present = None
        await self._store.sync.sync()

    async def _rescue(self, image: Image) -> None:
        """Copy what a cut still needs before *image* is written again."""
        copy = self._store.images.create()
        self._store.sync.created(copy.id)
        try:
            self._store.contents.add_image(copy.id, whole=True)  # now: a kill must not leave a file without a row
            await trio.to_thread.run_sync(copy_data, image.fd, copy.fd)
            await self._store.sync.sync(copy.id)
        except BaseException:
            self._store.contents.drop_image(copy.id)
            self._store.sync.delete_later(copy.id)
            raise
        finally:
            os.close(copy.fd)
        with self._store.catalog.transaction():
            self._store.contents.copy_locations(image.id, copy.id)
            self._store.contents.move_cuts_to_image(image.id, copy.id)
        self.on_closed(copy.id)  # a cut that was not sealed yet still needs that

    def _start_over(self, ino: Inode) -> None:
        """Give a file that nobody has open, and that is about to be emptied, a new image.

        So nothing of the old one is fetched, un-sealed or copied; it lives on while a cut needs it.
        """
        row = self._store.names.inode(ino)
        if ino in self._files or not stat.S_ISREG(row.mode):
            return
        image = self._store.images.create()
        os.close(image.fd)
        self._store.sync.created(image.id)
        contents = self._store.contents
        with self._store.catalog.transaction():
            contents.add_image(image.id, whole=True)
            self._store.names.update_inode(ino, image=image.id, manifest=None, size=0)
            dropped = row.image is not None and not contents.image_is_needed(row.image)
            if dropped and row.image is not None:
                contents.drop_image(row.image)
            if row.manifest is not None:
                contents.drop_unneeded_manifests([row.manifest])
        if dropped and row.image is not None:
            self._store.sync.delete_later(row.image)

    def _changing(self, file: OpenFile) -> None:
        """The content is unfinished from now until the last writer closes."""
        if not file.modified:
            file.modified = True
            self._store.names.state_changed(file.ino, self._store.clock.tick())
            self._listener.writing(file.ino, file.new)

    def _wrote(self, file: OpenFile, offset: int) -> None:
        self._written[file.image.id] += 1
        self._store.sync.wrote(file.image.id)
        if file.lowest_write is None or offset < file.lowest_write:
            file.lowest_write = offset

    def _finish_writing(self, file: OpenFile) -> None:
        file.modified = file.new = False
        file.lowest_write = None
        try:
            self._store.names.state_changed(file.ino, self._store.clock.tick())
        except OSError as error:  # a full disk: it has the stamp of its first write, and is closed all the same
            log.warning("inode %d was closed without a new stamp: %s", file.ino, error)
        self._listener.closed(file.ino)
        self.on_closed(file.image.id)

    def _drop_if_idle(self, file: OpenFile) -> None:
        if file.readers or file.writers or file.lock.locked():
            return
        if self._files.get(file.ino) is not file:
            return
        if file.modified:
            self._finish_writing(file)
        del self._files[file.ino]
        self._by_image.pop(file.image.id, None)
        if file.image.unrecorded:
            self.on_idle(file.image)
        else:
            file.image.close()

    async def finish(self) -> None:
        """Clean stop: whatever is still open is closed as it is."""
        for file in self.files():
            if file.modified:
                self._finish_writing(file)
            if file.image.unrecorded and self._source is not None:
                await self._source.record(file.image)
