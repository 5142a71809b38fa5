"""Open files: the images behind them, and what reading and writing does to them.

One `OpenFile` per inode however often it is open. The rules (design.md section 4):

- A file that is not sealed *is* its image: size and times come from there.
- The first change of a sealed file un-seals it: it is hydrated whole, ranges that a cut needs are rescued into another
  image, and its rows are removed durably before the first byte is let through.
- Truncation to nothing by the only opener takes a new image instead; the old one lives while a cut needs it.
- When the last writer closes a changed file, it is stamped and handed to sealing.
- Where the kernel can, it reads and writes whole images itself from open to close (passthrough). Then we are not told
  of writes: a file is un-sealed, and counts as changed, when it is opened for writing; a sealed one that nobody has
  open is served by us instead, so that opening alone changes nothing. The first open decides for all until the last
  close. The last writer is gone when nobody can write the image any more, by map or descriptor (`held`).

Who calls: the event loop's thread. Reads and writes of local bytes happen in the handler (a thread hop costs more than
the copy); whatever may wait for the disk or the remote is awaited. `OpenFile.lock` serialises un-sealing.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from ckptfs.errors import ContentUnavailable, Stale
from ckptfs.fileimages import FileImages
from ckptfs.handles import Backing, ByteSource, ChangeListener, Handle, OpenFile
from ckptfs.held import HeldFiles, is_free
from ckptfs.ids import ImageId, Inode
from ckptfs.local.catalog.names import InodeRow
from ckptfs.local.images import Image
from ckptfs.local.store import Store
from ckptfs.xattrs import drop_privileges

log = logging.getLogger(__name__)

_FETCHED_AT_ONCE = 64 << 20
"""Bytes that are waited for while as many more are on their way: more than a fast line holds."""
_SAVE_BYTES = 16 << 20
"""Smaller files that stay open for writing, or were closed, are logs and the like."""
_SAVE_OPEN_S = 60.0
"""A file that is open for writing counts as being saved for so long whatever its size: it may become large."""
_SAVE_PAUSE_S = 10.0
"""A checkpoint's files come one after another; so long after one was closed it still counts as being saved."""


_JUST_NOW_S = 0.1


class OpenFiles:
    """The table of open files and handles."""

    def __init__(self, store: Store, listener: ChangeListener, source: ByteSource | None) -> None:
        self._store = store
        self._listener = listener
        self._source = source
        self._images = FileImages(store)
        self._saved_at = float("-inf")
        self._files: dict[Inode, OpenFile] = {}
        self._handles: dict[int, Handle] = {}
        self._next_handle = 1
        self._by_image: dict[ImageId, OpenFile] = {}
        self._written: Counter[ImageId] = Counter()
        self._reserved: dict[Inode, trio.Event] = {}
        self.held = HeldFiles(self._freed)
        self.backing: Backing | None = None
        """Set by who mounts, when the kernel can serve images itself."""
        self.on_closed: Callable[[ImageId], None] = lambda image: None
        """Called when the last writer of a changed file closed it: time to seal."""
        self.on_idle: Callable[[Image], None] = lambda image: image.close()
        """Takes over an image that nobody has open, but whose fetched chunks are not recorded yet; closes it."""
        self.on_reopen: Callable[[ImageId], Image | None] = lambda image: None
        """Gives back such an image, if it was not closed yet: what was fetched into it is not fetched again."""
        self.on_freed: Callable[[Inode], None] = lambda ino: None
        """Called when nobody has a file open any more that was held, or borrowed: its last name may be gone."""
        self.on_full: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        """Called when the disk has no room for a write, which is tried once more when it returns."""
        self.on_opened: Callable[[OpenFile], None] = lambda file: None
        """Called when somebody has opened a file to read it."""
        self.on_cold_read: Callable[[OpenFile], None] = lambda file: None
        """Called when somebody reads a file of which bytes are elsewhere, or were when it was opened."""

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
        return file is not None and file.in_use

    def is_flushed(self, image: ImageId) -> bool:
        """Whether *image* is finished, and whole on the disk."""
        return self._store.sync.is_flushed(image) and not self.is_being_written(image)

    def sealed(self, image: ImageId, manifest: int) -> None:
        """*image* has a manifest now: whoever has it open must un-seal it before the next change."""
        file = self._by_image.get(image)
        if file is not None:
            file.manifest = manifest
        self._written.pop(image, None)

    def is_volatile(self, ino: Inode, size: int) -> bool:
        """Whether size and times of *ino*, which has *size* now, can change without this kernel's noticing.

        Stores through a map are not noticed. Nothing can be stored into an empty file before it is given a size.
        """
        file = self._files.get(ino)
        return file is not None and file.unwatched and file.modified and (size > 0 or file.held)

    def is_saving(self) -> bool:
        """Whether a file that is more than a log is being written, or was a moment ago."""
        now = trio.current_time()
        return now - self._saved_at < _SAVE_PAUSE_S or any(
            now - file.opened_for_write_at < _SAVE_OPEN_S or os.fstat(file.image.fd).st_size >= _SAVE_BYTES
            for file in self._files.values()
            if file.modified and (file.writers or file.held)
        )

    def forget_image(self, image: ImageId) -> None:
        self._written.pop(image, None)

    # Opening and closing

    def create(self, ino: Inode, image: Image, flags: int, *, privileged: bool) -> int:
        """A handle on a file that was just created with an empty *image*."""
        file = OpenFile(  # its row has the stamp of its creation
            ino, image, None, new=True, modified=True, created_by=self._store.catalog.commits
        )
        self._files[ino] = file
        self._by_image[image.id] = file
        self._serve(file, writes=True)
        fh = self._add_handle(file, flags, privileged)
        self._listener.writing(ino, True)
        return fh

    async def open(self, ino: Inode, flags: int, *, privileged: bool) -> int:
        """Open an existing file and return its handle; with O_TRUNC it is empty afterwards.

        Raises NameMissing, OSError, ContentUnavailable (its manifest is on a remote that does not answer).
        """
        if flags & os.O_TRUNC and ino not in self._files:
            self._images.start_over(ino)
        file = await self._acquire(ino)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        try:
            if not file.readers and not file.writers and file.backing is None and not file.lock.locked():
                self._serve(file, writes=writes)
            if flags & os.O_TRUNC:  # with O_RDONLY too, as on Linux' own file systems
                await self.truncate(file, 0, privileged=privileged, replaces=True)
            elif writes and file.backing is not None:
                if self.is_flushed(file.image.id):
                    file.flushed_as = _look_of(file)
                await self._begin_change(file)  # the kernel will not tell when
                self._written[file.image.id] += 1
            self.check_poison(file)
        except BaseException:
            self._drop_if_idle(file)
            raise
        fh = self._add_handle(file, flags, privileged)
        if not writes:
            self.on_opened(file)
        return fh

    async def release(self, fh: int) -> OpenFile:
        """The last descriptor of a handle is gone."""
        handle = self._handles.pop(fh)
        file = handle.file
        if handle.writes:
            file.writers -= 1
            self._writer_gone(file)
        else:
            file.readers -= 1
        self._drop_if_idle(file)
        return file

    async def borrow(self, ino: Inode, *, emptied: bool) -> OpenFile:
        """An OpenFile to be truncated without a handle, to nothing when *emptied*; give it back with `give_back`."""
        if emptied and ino not in self._files:
            self._images.start_over(ino)
        file = await self._acquire(ino)
        file.readers += 1
        return file

    def give_back(self, file: OpenFile) -> None:
        file.readers -= 1
        self._writer_gone(file)
        self._drop_if_idle(file)
        self.on_freed(file.ino)

    @contextmanager
    def reserved(self, ino: Inode) -> Iterator[bool]:
        """Whether nobody has a file open; if so nobody gets it open meanwhile, but waits."""
        if ino in self._files or ino in self._reserved:
            yield False
            return
        event = self._reserved[ino] = trio.Event()
        try:
            yield True
        finally:
            del self._reserved[ino]
            event.set()

    def is_whole(self, ino: Inode) -> bool:
        """Whether every byte of a regular file is on this disk."""
        row = self._store.names.inode(ino)
        return row.image is not None and self._store.contents.image_is_whole(row.image)

    def missing_at_most(self, ino: Inode) -> int:
        """How many bytes of a file are not here, counting as such its holes where they are not known."""
        row = self._store.names.inode(ino)
        if row.image is None:
            return row.size
        return row.size - sum(length for _, length in self._store.contents.locations_in(row.image))

    async def missing(self, ino: Inode) -> int:
        """How many bytes of a file are not here. Raises ContentUnavailable."""
        file = await self.borrow(ino, emptied=False)
        try:
            return file.image.missing(0, os.fstat(file.image.fd).st_size)
        finally:
            self.give_back(file)

    async def make_whole(self, ino: Inode, landed: Callable[[int], None]) -> None:
        """Fetch what is missing of a file; *landed* is told how many bytes of it came.

        Raises ContentUnavailable, OSError when they cannot be written.
        """
        file = await self.borrow(ino, emptied=False)
        try:
            if file.image.whole or file.content is None or self._source is None:
                return
            for start in range(0, file.content.size, _FETCHED_AT_ONCE):
                end = min(start + _FETCHED_AT_ONCE, file.content.size)
                ahead = min(end + _FETCHED_AT_ONCE, file.content.size)
                await self._source.room_for(file.image, file.content, start, ahead)
                self._source.begin(file.image, file.content, end, ahead)
                await self._source.ensure(file.image, file.content, start, end)
                landed(end - start)
            await self._source.record(file.image)
        finally:
            self.give_back(file)

    def presume_held(self) -> None:
        """Find the files that a program which survived our predecessor can still write. Call before sealing begins."""
        for image in self._store.contents.unsealed_images():
            ino = self._store.contents.inode_of_image(image)
            try:
                opened = Image(image, self._store.images.open(image))
            except FileNotFoundError:
                continue
            if ino is None or is_free(opened):
                opened.close()
                continue
            log.info("inode %d is still being written by a program that the last daemon served", ino)
            file = OpenFile(ino, opened, None, modified=True, opened_for_write_at=trio.current_time())
            self._files[ino] = self._by_image[image] = file
            self.held.add(file)
            self._listener.writing(ino, False)

    def look(self) -> None:
        """See which files were written without our being told."""
        for file in self._files.values():
            if file.unwatched and file.modified:
                now = _look_of(file)
                if now != file.seen:
                    file.seen, file.lowest_write = now, 0

    # Bytes

    def to_read(self, fh: int, offset: int, size: int) -> int:
        """The descriptor of the image that has these bytes, at the same offset; -1 when some are elsewhere."""
        file = self._handles[fh].file
        image, content = file.image, file.content
        if image.whole:
            if content is not None:
                self._was_read(file, offset, offset + size)
            return image.fd
        assert content is not None and self._source is not None
        end = min(offset + size, content.size)
        if offset >= end or image.present is None or not image.present.covers(offset, end):
            return -1
        self._was_read(file, offset, end)
        self._source.read_ahead(image, content, end, file.reading)
        return image.fd

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        """Up to *size* bytes at *offset*; short only at the end of the file."""
        image = self.to_read(fh, offset, size)
        if image >= 0:
            return os.pread(image, size, offset)
        file = self._handles[fh].file
        assert file.content is not None and self._source is not None
        end = min(offset + size, file.content.size)
        if offset >= end:
            return b""
        self._was_read(file, offset, end)
        self._source.read_ahead(file.image, file.content, end, file.reading)
        return await self._source.read(file.image, file.content, offset, end)

    def to_write(self, fh: int) -> int:
        """The descriptor of the image that may be written at once, at the same offset (then `wrote`); else -1."""
        handle = self._handles[fh]
        file = handle.file
        return file.image.fd if file.modified and file.manifest is None and not handle.syncs else -1

    def wrote(self, handle: Handle, offset: int) -> None:
        """Bytes at *offset* were written through *handle*."""
        self._wrote(handle.file, offset)
        drop_privileges(self._store, handle.file.ino, keeping_set_id=handle.privileged)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        """Write *data* at *offset*; returns how much, less than all only where the disk became full.

        Raises OSError (ENOSPC, EIO), ContentUnavailable.
        """
        handle = self._handles[fh]
        file = handle.file
        if self.to_write(fh) < 0:
            await self._begin_change(file)
        written, asked = 0, False
        view = memoryview(data)
        while written < len(data):
            try:
                written += os.pwrite(file.image.fd, view[written:], offset + written)
            except OSError as error:
                if error.errno == errno.ENOSPC and not asked:
                    asked = True
                    await self.on_full()
                elif written:
                    break  # a short write, as of any disk that became full; the next one says why
                else:
                    raise
        self.wrote(handle, offset)
        if handle.syncs:
            await self.fsync(fh)
        return written

    def seek(self, fh: int, offset: int, *, hole: bool) -> int:
        """Where the next data is from *offset* on, or with *hole* the next hole; the file's end is one.

        Raises OSError (ENXIO) behind the end, and when there is no data any more.
        """
        file = self._handles[fh].file
        size = os.fstat(file.image.fd).st_size
        if not 0 <= offset < size:
            raise OSError(errno.ENXIO, f"inode {file.ino} has {size} bytes, not {offset}")
        if file.modified or file.writers:
            return size if hole else offset  # what was stored through a map may not be here yet
        if file.content is None or file.image.whole:
            return os.lseek(file.image.fd, offset, os.SEEK_HOLE if hole else os.SEEK_DATA)
        for start, end in file.content.holes:
            if hole and offset < end:
                return max(offset, start)
            if not hole and start <= offset < end:
                if end == size:
                    raise OSError(errno.ENXIO, f"inode {file.ino} has no data from {offset} on")
                return end
        return size if hole else offset

    async def truncate(self, file: OpenFile, size: int, *, privileged: bool, replaces: bool = False) -> None:
        """Set the size; bytes that appear are zeros. *replaces*: it is emptied to be written anew."""
        async with file.lock:
            if replaces:
                self.check_poison(file)
                await self._images.keep(file.ino, file.image)
            await self._unseal(file)
            os.truncate(self._store.images.file(file.image.id), size)
        self._changing(file)
        self._wrote(file, size)
        drop_privileges(self._store, file.ino, keeping_set_id=privileged)

    async def fsync(self, fh: int) -> None:
        """Data and every name so far survive a power cut on this disk. Never waits for the remote."""
        file = self._handles[fh].file
        file.fsynced_at = trio.current_time()
        if file.manifest is not None and not file.modified:
            await self._store.sync.sync()
        else:
            before = _look_of(file)
            await self._store.sync.sync(file.image.id)
            file.flushed_as = before

    def set_times(self, row: InodeRow, atime_ns: int, mtime_ns: int) -> None:
        """Of an unsealed file: its image's are its own. The bytes stay as flushed as they were."""
        assert row.image is not None
        file = self._files.get(row.ino)
        is_as_flushed = file is not None and file.flushed_as == _look_of(file)
        os.utime(self._store.images.file(row.image), ns=(atime_ns, mtime_ns))
        if file is not None and is_as_flushed:
            file.flushed_as = _look_of(file)

    def is_sound(self, file: OpenFile) -> bool:
        """Whether no flush of the image failed before."""
        return file.image.id not in self._store.sync.poisoned

    def check_poison(self, file: OpenFile) -> None:
        """Raises OSError (EIO) when a flush of the image failed before."""
        error = self._store.sync.poisoned.get(file.image.id)
        if error:
            raise OSError(errno.EIO, f"an earlier flush of inode {file.ino} failed: {error}")

    # Within

    async def _acquire(self, ino: Inode) -> OpenFile:
        while (reserved := self._reserved.get(ino)) is not None:
            await reserved.wait()
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
        idle = self.on_reopen(row.image) if row.image is not None else None
        file = OpenFile(ino, idle or self._images.open(row, content), row.manifest, content)
        self._files[ino] = file
        self._by_image[file.image.id] = file
        return file

    def _serve(self, file: OpenFile, *, writes: bool) -> None:
        """Before the first open of a file: let the kernel serve its image, or see that we can."""
        image = file.image
        sealed_for_writing = writes and file.manifest is not None
        if self.backing is not None and image.whole and not sealed_for_writing:
            fd = self._images.descriptor(image.id)
            file.backing = self.backing.open(fd)
            if file.backing is not None:
                image.exchange(fd)
                return
            os.close(fd)
        if file.held:
            image.exchange(self._images.descriptor(image.id, writing=True))

    def _end_service(self, file: OpenFile) -> None:
        """After the last close."""
        if file.backing is not None and self.backing is not None:
            self.backing.close(file.backing)
            file.backing = None
        elif file.held:
            file.image.exchange(self._store.images.open(file.image.id))

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
        contents, image = self._store.contents, file.image.id
        if contents.image_in_cut(image) or contents.others_need(image):
            self.on_closed(await self._images.rescue(file.image))  # a cut that was not sealed yet still needs that
        if file.manifest is None:
            return
        with self._store.catalog.transaction():
            self._store.names.update_inode(file.ino, manifest=None)
            self._store.contents.drop_locations(file.image.id)
            self._store.contents.set_image_whole(file.image.id)
            self._store.contents.drop_unneeded_manifests([file.manifest])
        row = self._store.names.inode(file.ino)
        if os.fstat(file.image.fd).st_mtime_ns != row.mtime_ns:  # ctime moves with it, and nobody changed anything yet
            os.utime(file.image.fd, ns=(row.atime_ns, row.mtime_ns))
        file.manifest = file.content = None
        file.image.present = None
        await self._store.sync.sync()

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

    def _writer_gone(self, file: OpenFile) -> None:
        """One writer less: the content is whole when it was the last."""
        if file.writers or not file.modified:
            return
        if file.backing is not None and not is_free(file.image):
            self.held.add(file)
        if not file.held:
            self._finish_writing(file)

    def _freed(self, file: OpenFile) -> None:
        """Nobody can write the image of a held file any more."""
        self._writer_gone(file)
        self._drop_if_idle(file)
        self.on_freed(file.ino)

    def _was_read(self, file: OpenFile, offset: int, end: int) -> None:
        assert file.content is not None
        file.reading.was_read(offset, min(end, file.content.size), cold=not file.image.whole)
        self.on_cold_read(file)

    def _finish_writing(self, file: OpenFile) -> None:
        if os.fstat(file.image.fd).st_size >= _SAVE_BYTES:
            self._saved_at = trio.current_time()
        if file.seen or file.backing is not None:
            if file.flushed_as == _look_of(file):  # who fsynced must not find what was before, whatever we do not know
                self._store.sync.may_have_been_written(file.image.id)
            else:
                self._store.sync.wrote(file.image.id)
        file.seen = None
        file.modified = file.new = False
        file.lowest_write = None
        if not self._just_created(file):
            try:
                self._store.names.state_changed(file.ino, self._store.clock.tick())
            except OSError as error:  # a full disk: it has the stamp of its first write, and is closed all the same
                log.warning("inode %d was closed without a new stamp: %s", file.ino, error)
        self._listener.closed(file.ino)
        self.on_closed(file.image.id)

    def _just_created(self, file: OpenFile) -> bool:
        """Whether the stamp of its creation is as good as one of now: nothing happened in between, and no time passed.

        So a small file costs one commit, not two.
        """
        return (
            file.created_by == self._store.catalog.commits
            and trio.current_time() - file.opened_for_write_at < _JUST_NOW_S
        )

    def _drop_if_idle(self, file: OpenFile) -> None:
        if file.readers or file.writers or file.lock.locked():
            return
        if self._files.get(file.ino) is not file:
            return
        self._end_service(file)
        if file.held:
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


def _look_of(file: OpenFile) -> tuple[int, int]:
    """What changes with every write of the image."""
    status = os.fstat(file.image.fd)
    return status.st_size, status.st_ctime_ns
