"""Making a damaged or lost pack anew, byte for byte where it still can be told what they were.

A pack's name fixes its chunks, their codecs and their encoded lengths (docs/format.md, 1.3), so that a pack of that
name, whoever made it, serves every manifest that refers to it: also those of other writers and of history, which nobody
could rewrite. So a damaged pack is put again under its own key, once every chunk in it was decoded and hashed.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from ckptfs.encoding.codec import encode_as
from ckptfs.encoding.pack import PackBuilder, PackedChunk, pack_name, read_index
from ckptfs.errors import FormatError
from ckptfs.ids import ObjectId
from ckptfs.replica.verify import FindRaw, bases_of, check_pack, damaged


@dataclass(frozen=True)
class Examined:
    """What is left of a pack: its chunks, and which of them are damaged."""

    chunks: tuple[PackedChunk, ...] | None
    """All of them, in order; None when neither the pack nor the catalog tells."""
    bad: frozenset[int]
    """Numbers of chunks that are not what they should be."""
    why: str
    """What is wrong, for people; "" when nothing is."""

    @property
    def is_sound(self) -> bool:
        return not self.why


async def examine(name: ObjectId, data: bytes | None, known: tuple[PackedChunk, ...], find: FindRaw) -> Examined:
    """Decode and hash every chunk of pack *name*, whose bytes are *data*; *known* is what the catalog says of it, and
    *find* gives what deltas are against. One whose base nobody has counts as damaged."""
    if data is None:
        complete = known if pack_name(known) == name else None
        return Examined(complete, frozenset(range(len(complete or ()))), "it is gone")
    why = ""
    try:
        chunks: tuple[PackedChunk, ...] | None = read_index(data, len(data), name)
    except FormatError as error:
        why = f"its index is damaged ({error})"
        chunks = known if pack_name(known) == name else None
    bad = set()
    for number, chunk in enumerate(chunks or ()):
        if await trio.to_thread.run_sync(damaged, data, [chunk], await bases_of([chunk], find)):
            bad.add(number)
    if bad:
        why = f"{len(bad)} of its {len(chunks or ())} chunks are damaged"
    return Examined(chunks, frozenset(bad), why)


async def rebuild(name: ObjectId, data: bytes | None, found: Examined, find: FindRaw) -> bytes | None:
    """The pack's bytes as they should be; None when they cannot be told, or made by this version of zstd.

    *find* gives a chunk's raw bytes from somewhere else.
    """
    if found.chunks is None:
        return None
    builder = PackBuilder()
    view = memoryview(data or b"")
    for number, chunk in enumerate(found.chunks):
        encoded: bytes | memoryview | None = view[chunk.offset : chunk.offset + chunk.length]
        if number in found.bad:
            raw = await find(chunk.id, chunk.raw_length)
            if raw is None:
                return None
            base = (await bases_of([chunk], find)).get(chunk.base) if chunk.base else None
            encoded = await trio.to_thread.run_sync(encode_as, chunk.codec, raw, chunk.length, base)
        if encoded is None:
            return None
        builder.add(chunk.id, chunk.raw_length, chunk.codec, encoded, chunk.base)
    _, body, _ = builder.finish()
    await check_pack(name, bytes(body), find)
    return bytes(body)
