"""Making a damaged or lost pack anew, byte for byte where it still can be told what they were.

A pack's name fixes its chunks, their codecs and their encoded lengths (docs/format.md, 1.3), so that a pack of that
name, whoever made it, serves every manifest that refers to it: also those of other writers and of history, which nobody
could rewrite. So a damaged pack is put again under its own key, once every chunk in it was decoded and hashed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import trio

from ckptfs.encoding.codec import encode_as
from ckptfs.encoding.pack import PackBuilder, PackedChunk, pack_name, read_index
from ckptfs.errors import FormatError
from ckptfs.ids import ChunkId, ObjectId
from ckptfs.replica.verify import FindRaw, bases_of, check_pack, damaged


@dataclass(frozen=True)
class Examined:
    """What is left of a pack: its chunks, and which of them are damaged."""

    chunks: tuple[PackedChunk, ...] | None
    """All of them, in order; None when neither the pack nor the catalog tells."""
    bad: frozenset[int]
    """Numbers of chunks that are not what they should be."""
    baseless: frozenset[ChunkId]
    """What deltas among them are against, and cannot be had: nothing is known of those deltas."""
    why: str
    """What is wrong, for people; "" when nothing is."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, as far as can be told."""
        return not self.why

    def without(self, bases: Collection[ChunkId], needed: Collection[ChunkId]) -> Examined:
        """The same when it is known that nobody has *bases*: those *needed* that are deltas against them are as good as
        damaged. Of others nothing need be known."""
        lost = frozenset(
            number for number, chunk in enumerate(self.chunks or ()) if chunk.base in bases and chunk.id in needed
        )
        if not lost:
            return self
        why = self.why or f"what {len(lost)} of its {len(self.chunks or ())} chunks are differences to is nowhere"
        return Examined(self.chunks, self.bad | lost, self.baseless - frozenset(bases), why)


async def examine(name: ObjectId, data: bytes | None, known: tuple[PackedChunk, ...], find: FindRaw) -> Examined:
    """Decode and hash every chunk of pack *name*, whose bytes are *data*; *known* is what the catalog says of it, and
    *find* gives what deltas are against."""
    if data is None:
        complete = known if pack_name(known) == name else None
        return Examined(complete, frozenset(range(len(complete or ()))), frozenset(), "it is gone")
    why = ""
    try:
        chunks: tuple[PackedChunk, ...] | None = read_index(data, len(data), name)
    except FormatError as error:
        why = f"its index is damaged ({error})"
        chunks = known if pack_name(known) == name else None
    bad, baseless = set(), set()
    for number, chunk in enumerate(chunks or ()):
        bases = await bases_of([chunk], find)
        if chunk.base is not None and chunk.base not in bases:
            baseless.add(chunk.base)
        elif await trio.to_thread.run_sync(damaged, data, [chunk], bases):
            bad.add(number)
    if bad:
        why = f"{len(bad)} of its {len(chunks or ())} chunks {'is' if len(bad) == 1 else 'are'} damaged"
    return Examined(chunks, frozenset(bad), frozenset(baseless), why)


async def rebuild(name: ObjectId, data: bytes | None, found: Examined, find: FindRaw) -> bytes | None:
    """The pack's bytes as they should be; None when they cannot be told, or made by this version of zstd.

    *find* gives a chunk's raw bytes from somewhere else.
    """
    if found.chunks is None or found.baseless:  # deltas that cannot be checked are not vouched for
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
