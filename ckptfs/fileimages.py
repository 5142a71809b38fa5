"""Which image a file gets: when it is opened, when it is about to be emptied, and when a cut needs what it has.

Who calls: the event loop's thread. What is open is `openfiles`' business.
"""

from __future__ import annotations

import errno
import logging
import os
import stat

import trio

from ckptfs.encoding.manifest import Content
from ckptfs.ids import ImageId, Inode
from ckptfs.local.catalog.names import InodeRow
from ckptfs.local.images import Image, copy_data
from ckptfs.local.store import Store
from ckptfs.spans import SpanSet

log = logging.getLogger(__name__)


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

        So nothing of the old one is fetched, un-sealed or copied; it lives on while a cut needs it.
        """
        row = self._store.names.inode(ino)
        if not stat.S_ISREG(row.mode):
            return
        image = self._store.new_image()
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

    async def rescue(self, image: Image) -> ImageId:
        """Copy what a cut still needs before *image* is written again; the copy, which may be unsealed."""
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
        return copy.id

    # Within

    def _open(self, image_id: ImageId, content: Content | None) -> Image:
        image = Image(image_id, self._store.images.open(image_id, writing=True))
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
