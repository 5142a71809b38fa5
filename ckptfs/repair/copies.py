"""A chunk's bytes from any place that still has them: other images of this disk, then the remote. Every copy is hashed.

Blocking calls run in threads. Nothing is written, and a copy that turns out to be something else is only passed over:
what to do about it is its own finding.
"""

from __future__ import annotations

import logging
import os
from functools import partial

import trio

from ckptfs.encoding.codec import decode
from ckptfs.encoding.keys import pack_key
from ckptfs.encoding.manifest import Placed
from ckptfs.errors import FormatError, RemoteError
from ckptfs.ids import ChunkId, ImageId, ObjectId, digest
from ckptfs.local.catalog.contents import Location
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.store import Store
from ckptfs.remote.base import ObjectStore

log = logging.getLogger(__name__)

Raw = bytes | bytearray | memoryview


class Copies:
    """Finds chunks."""

    def __init__(self, store: Store, packs: Packs, remote: ObjectStore | None) -> None:
        self._store = store
        self._packs = packs
        self._remote = remote

    async def find(
        self, chunk: ChunkId, length: int, *, but_image: ImageId | None = None, but_pack: ObjectId | None = None
    ) -> Raw | None:
        """The bytes of *chunk* from anywhere but the place that is damaged; None when nobody has them now."""
        raw = await self.local(chunk, length, but_image=but_image)
        at = self._packs.placed([chunk]).get(chunk)
        if raw is not None or at is None:
            return raw
        base = None
        if at.base is not None:
            base = await self.local(at.base, length)
            base_at = self._packs.placed([at.base]).get(at.base)
            if base is None and base_at is not None:
                base = await self._remote_copy(at.base, length, base_at, but_pack, None)
        return await self._remote_copy(chunk, length, at, but_pack, base)

    async def _remote_copy(
        self, chunk: ChunkId, length: int, at: Placed, but_pack: ObjectId | None, base: Raw | None
    ) -> Raw | None:
        if self._remote is None or at.pack == but_pack:
            return None
        try:
            return await trio.to_thread.run_sync(
                partial(_fetch, self._remote, chunk, length, at, base), abandon_on_cancel=True
            )
        except (RemoteError, FormatError) as error:
            log.warning("chunk %s cannot be had from %s: %s", chunk.hex(), pack_key(at.pack), error)
            return None

    async def local(self, chunk: ChunkId, length: int, *, but_image: ImageId | None = None) -> Raw | None:
        """The same from this disk alone."""
        for place in self._store.contents.locations(chunk):
            if place.image != but_image and place.length == length:
                raw = await trio.to_thread.run_sync(self._read, chunk, place)
                if raw is not None:
                    return raw
        return None

    def _read(self, chunk: ChunkId, place: Location) -> Raw | None:
        try:
            fd = self._store.images.open(place.image)
        except OSError:
            return None
        try:
            raw = os.pread(fd, place.length, place.offset)
        except OSError:
            return None
        finally:
            os.close(fd)
        return raw if digest(raw) == chunk else None


def _fetch(remote: ObjectStore, chunk: ChunkId, length: int, at: Placed, base: Raw | None) -> Raw:
    """Raises RemoteError, FormatError."""
    raw = decode(at.codec, remote.get(pack_key(at.pack), at.offset, at.offset + at.length), length, base=base)
    if digest(raw) != chunk:
        raise FormatError("the bytes there are others")
    return raw
