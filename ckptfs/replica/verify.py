"""Verifying: read back packs whose bytes the remote's own checksum did not confirm, and check every chunk in them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import trio

from ckptfs.encoding.codec import decode
from ckptfs.encoding.keys import pack_key
from ckptfs.encoding.pack import PackedChunk, read_index
from ckptfs.errors import FormatError, ObjectMissing
from ckptfs.ids import ChunkId, ObjectId, digest
from ckptfs.local.catalog.packs import Packs
from ckptfs.remote.base import ObjectStore

_AT_ONCE = 8
"""Chunks whose bases are in memory together."""


FindRaw = Callable[[ChunkId, int], Awaitable[bytes | bytearray | memoryview | None]]
"""The bytes of a chunk, by its length; None when they cannot be had."""


async def verify_packs(
    remote: ObjectStore,
    packs: Packs,
    names: Sequence[ObjectId],
    find: FindRaw,
    missed: Callable[[ObjectId, Exception], None],
) -> None:
    """Read *names* one after another and mark those that hold what they should; *find* gives what deltas are against.

    *missed* is told of those that are damaged or gone. Raises RemoteError when the remote does not deliver.
    """
    for name in names:
        key = pack_key(name)
        try:
            data = await trio.to_thread.run_sync(partial(remote.get, key), abandon_on_cancel=True)
            await check_pack(name, data, find)
        except ObjectMissing as error:
            missed(name, error)
        except FormatError as error:
            missed(name, FormatError(f"{key} is damaged: {error}"))
        else:
            packs.verified(name)


async def check_pack(name: ObjectId, data: bytes, find: FindRaw) -> tuple[PackedChunk, ...]:
    """The index of pack *name*, after every chunk in it was decoded and hashed.

    But for deltas of which *find* does not have the base: it lies in another pack, which may be damaged, or is known to
    nobody here, since no file here needs that delta. Raises FormatError at the first difference.
    """
    chunks = await trio.to_thread.run_sync(read_index, data, len(data), name)
    for start in range(0, len(chunks), _AT_ONCE):
        batch = chunks[start : start + _AT_ONCE]
        bases = await bases_of(batch, find)
        known = [chunk for chunk in batch if chunk.base is None or chunk.base in bases]
        bad = await trio.to_thread.run_sync(damaged, data, known, bases)
        if bad:
            raise FormatError(f"the bytes of chunk {bad[0].id.hex()} are others")
    return chunks


async def bases_of(chunks: Iterable[PackedChunk], find: FindRaw) -> dict[ChunkId, bytes | bytearray | memoryview]:
    """What deltas among *chunks* are against, as far as *find* has it."""
    found = {}
    for chunk in chunks:
        if chunk.base is not None and chunk.base not in found:
            raw = await find(chunk.base, chunk.raw_length)
            if raw is not None:
                found[chunk.base] = raw
    return found


def damaged(
    data: bytes, chunks: Iterable[PackedChunk], bases: Mapping[ChunkId, bytes | bytearray | memoryview]
) -> list[PackedChunk]:
    """Those of *chunks* whose bytes in the pack *data* are not what they should be. Blocking."""
    view = memoryview(data)
    return [chunk for chunk in chunks if not _is_there(view, chunk, bases)]


def _is_there(
    view: memoryview, chunk: PackedChunk, bases: Mapping[ChunkId, bytes | bytearray | memoryview]
) -> bool:
    encoded = view[chunk.offset : chunk.offset + chunk.length]
    try:
        raw = decode(chunk.codec, encoded, chunk.raw_length, base=bases.get(chunk.base) if chunk.base else None)
    except FormatError:
        return False
    return digest(raw) == chunk.id
