"""Which image a file gets: when it is opened, when it is about to be emptied, and when a cut needs what it has.

Who calls: the event loop's thread. What is open is `openfiles`' business.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ckptfs.encoding.manifest import Content
from ckptfs.errors import ContentUnavailable
from ckptfs.ids import ImageId, Inode
from ckptfs.local.catalog.names import InodeRow
from ckptfs.local.images import Image, copy_data
from ckptfs.local.store import Store
from ckptfs.spans import SpanSet

log = logging.getLogger(__name__)

_KEPT_BYTES = 64 << 20
"""Copying and flushing more before a file is emptied takes longer than a program expects of that: a second."""


class FileImages:
    """Images of the files of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def open(self, row: InodeRow, content: Content | None) -> Image:
        """The image of the file *row*, to be read; *content* when some of its bytes are elsewhere.

        A file that has none gets one. Raises OSError, but not when the disk is too full for that (`Image.unstored`).
        """
        if row.image is not None:
            return self._open(row.image, content)
        assert content is not None
        try:
            image = self._create(row.ino, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            log.warning("the disk is too full to keep anything of inode %d, which is served from memory", row.ino)
            image = self._store.images.unstored(content.size)
        image.present = SpanSet(content.holes) if content.chunks or image.unstored else None
        return image

    def start_over(self, ino: Inode) -> None:
        """Give a file that nobody has open, and that is about to be emptied, a new image.

        So nothing of the old one is fetched, un-sealed or copied; it lives on until the new one is flushed, and while
        a cut needs it.
        """
        row = self._store.names.inode(ino)
        if not stat.S_ISREG(row.mode):
            return
        image = self._store.new_image()
        os.close(image.fd)
        self._store.sync.created(image.id)
        contents, sync = self._store.contents, self._store.sync
        is_durable = row.manifest is not None or (row.image is not None and sync.was_flushed(row.image))
        with self._store.catalog.transaction():
            contents.add_image(image.id, whole=True)
            self._store.replaced.by_content(row, image.id, is_durable=is_durable)
            self._store.names.update_inode(ino, image=image.id, manifest=None, size=0)
            dropped = row.image is not None and not contents.image_is_needed(row.image)
            if dropped and row.image is not None:
                contents.drop_image(row.image)
            if row.manifest is not None:
                contents.drop_unneeded_manifests([row.manifest])
        if dropped and row.image is not None:
            self._store.sync.delete_later(row.image)

    async def keep(self, ino: Inode, image: Image) -> None:
        """Before a file that somebody has open is emptied in place: keep what it is until what comes is flushed.

        Not of what is longer than `_KEPT_BYTES`, and not where the disk has no room for it.
        """
        row, sync = self._store.names.inode(ino), self._store.sync
        if not sync.was_flushed(image.id) or image.id in self._store.replaced.images():
            return
        if not image.whole:
            if row.manifest is not None and self._store.contents.manifest(row.manifest).digest is not None:
                self._store.replaced.by_copy(row, None, image.id)  # what is missing here is elsewhere, with the rest
        elif 0 < os.fstat(image.fd).st_size <= _KEPT_BYTES:
            try:
                async with self._copied(image) as copy:
                    self._store.replaced.by_copy(row, copy, image.id)
            except OSError as error:
                log.warning("inode %d is emptied, and not kept until it is written anew: %s", ino, error)

    async def rescue(self, image: Image) -> ImageId:
        """Copy what a cut, or another image, still needs before *image* is written again; the copy may be unsealed."""
        async with self._copied(image) as copy:
            with self._store.catalog.transaction():
                self._store.contents.copy_locations(image.id, copy)
                self._store.contents.move_cuts_to_image(image.id, copy)
        return copy

    @asynccontextmanager
    async def _copied(self, image: Image) -> AsyncIterator[ImageId]:
        """A durable copy of *image*, with a row. It is nobody's until the body has given it to somebody."""
        copy = self._store.images.create()
        self._store.sync.created(copy.id)
        self._store.unowned.add(copy.id)
        try:
            self._store.contents.add_image(copy.id, whole=True)  # now: a kill must not leave a file without a row
            await trio.to_thread.run_sync(copy_data, image.fd, copy.fd)
            await self._store.sync.sync(copy.id)
            yield copy.id
        except BaseException:
            self._store.contents.drop_image(copy.id)
            self._store.sync.delete_later(copy.id)
            raise
        finally:
            self._store.unowned.remove(copy.id)
            os.close(copy.fd)

    # Within

    def descriptor(self, image_id: ImageId, *, writing: bool = False) -> int:
        """As `Images.open`. Raises ContentUnavailable when somebody took the image's file away, OSError."""
        try:
            return self._store.images.open(image_id, writing=writing)
        except (FileNotFoundError, IsADirectoryError) as error:
            path = self._store.images.file(image_id)
            raise ContentUnavailable(f"{path}, which has the file's bytes, is gone: `ckptfs scrub` the file") from error

    def _open(self, image_id: ImageId, content: Content | None) -> Image:
        try:
            fd = self.descriptor(image_id, writing=True)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EPERM, errno.EACCES):
                raise
            fd = self.descriptor(image_id)  # the disk turned read-only, or the file: it can be read
        image = Image(image_id, fd)
        if content is not None and not self._store.contents.image_is_whole(image_id):
            image.present = SpanSet(content.holes)
            for offset, length in self._store.contents.locations_in(image_id):
                image.present.add(offset, offset + length)
        return image

    def _create(self, ino: Inode, content: Content) -> Image:
        image = self._store.images.create()
        try:
            os.ftruncate(image.fd, content.size)
            with self._store.catalog.transaction():
                self._store.contents.add_image(image.id, whole=not content.chunks)
                self._store.names.update_inode(ino, image=image.id)
        except BaseException:
            image.close()
            self._store.images.delete(image.id)
            raise
        self._store.sync.created(image.id)
        return image
