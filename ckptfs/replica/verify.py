"""Verifying: read back packs whose bytes the remote's own checksum did not confirm, and check every chunk in them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import trio

from ckptfs.encoding.codec import decode
from ckptfs.encoding.keys import pack_key
from ckptfs.encoding.pack import PackedChunk, read_index
from ckptfs.errors import FormatError
from ckptfs.ids import ObjectId, digest
from ckptfs.local.catalog.packs import Packs
from ckptfs.remote.base import ObjectStore

log = logging.getLogger(__name__)


async def verify_packs(remote: ObjectStore, packs: Packs, names: Sequence[ObjectId]) -> None:
    """Read *names* one after another and mark those that hold what they should.

    Raises RemoteError when the remote does not deliver; a pack that is damaged is logged and stays unverified.
    """
    for name in names:
        data = await trio.to_thread.run_sync(partial(remote.get, pack_key(name)), abandon_on_cancel=True)
        try:
            await trio.to_thread.run_sync(check_pack, name, data)
        except FormatError as error:
            log.error("%s is damaged on the remote: %s", pack_key(name), error)
        else:
            packs.verified(name)


def check_pack(name: ObjectId, data: bytes) -> tuple[PackedChunk, ...]:
    """The index of pack *name*, after every chunk in it was decoded and hashed. Blocking.

    Raises FormatError at the first difference.
    """
    chunks = read_index(data, len(data), name)
    view = memoryview(data)
    for chunk in chunks:
        if chunk.base is not None:
            raise FormatError(f"chunk {chunk.id.hex()} is a delta, which this version does not read")
        raw = decode(chunk.codec, view[chunk.offset : chunk.offset + chunk.length], chunk.raw_length)
        if digest(raw) != chunk.id:
            raise FormatError(f"the bytes of chunk {chunk.id.hex()} are others")
    return chunks
