"""Which earlier chunk a chunk may be told as a difference to: the same piece of the same tensor of an earlier member of
its series.

Depth one: a delta is against a *keyframe*, a chunk that was sent whole; so a restore costs one hop at most, and what
is deleted or evicted takes nothing else with it (the remote keeps what a manifest names, bases included). A keyframe
stays while its deltas are cheaper than the average of all that it began, itself included: the least bytes a member if
deltas grow with their distance. Whether a chunk becomes a delta at all, a sample decides while it is packed.

What is the same piece, `ckptfs.pieces` says by the pattern of the file's path: `checkpoint-200/optimizer.pt` goes on
what `checkpoint-100/optimizer.pt` began, and not what another rank's file did. Where that finds nothing, the tensor's
name alone counts: a pretrained model that is fine-tuned elsewhere. A name that means something else there costs a
sample, and no byte.

Who calls: the task that plans uploads, on the event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ckptfs.encoding.manifest import Chunk
from ckptfs.encoding.pack import PackedChunk
from ckptfs.ids import ChunkId, ImageId
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.keyframes import Keyframe, Keyframes
from ckptfs.local.catalog.packs import Packs
from ckptfs.pieces import Keys

Place = tuple[ImageId, int]

_COMING_MOST = 100_000
"""Keys of chunks on their way that are remembered, at some 100 bytes."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a chunk may be told as a difference to."""

    keyframe: Keyframe
    places: tuple[Place, ...]
    """Where on this disk its bytes are."""


@dataclass(frozen=True, slots=True)
class Kin:
    """A chunk's place in its series."""

    keys: Keys
    """By path and tensor, and by tensor."""
    base: Base | None


class Bases:
    """Finds bases, and remembers what was sent as what."""

    def __init__(self, contents: Contents, packs: Packs, keyframes: Keyframes) -> None:
        self._contents = contents
        self._packs = packs
        self._keyframes = keyframes
        self._coming: dict[bytes, Keyframe] = {}
        """By key: chunks that are on their way whole, since nothing was found for them."""

    def begin(self) -> None:
        """Nothing is on its way."""
        self._coming.clear()

    def find(self, chunks: Collection[tuple[Chunk, Keys]]) -> dict[ChunkId, Kin]:
        """The kin of *chunks*, less those without keys. For some hundred at once: they are looked up one by one."""
        keyframes = self._keyframes.find([key for _, found in chunks for key in found])
        needed_whole = self._packs.bases_among(chunk.id for chunk, _ in chunks)  # a keyframe whose pack was lost
        return {
            chunk.id: Kin(found, None if chunk.id in needed_whole else self._base(chunk, found, keyframes))
            for chunk, found in chunks
            if found
        }

    def sending(self, kin: Mapping[ChunkId, Kin], lengths: Mapping[ChunkId, int]) -> None:
        """A pack of these chunks is on its way: later ones may be against them. Never in it, so that packs, each of
        which counts when what it is against is there, do not wait for each other."""
        for chunk, each in kin.items():
            if each.base is None and len(self._coming) < _COMING_MOST:
                keyframe = Keyframe(chunk, lengths[chunk], lengths[chunk], 1)
                self._coming.update((key, keyframe) for key in each.keys if key not in self._coming)

    def sent(self, kin: Mapping[ChunkId, Kin], rows: Iterable[PackedChunk]) -> None:
        """These chunks were acknowledged as *rows* say."""
        rows = [row for row in rows if row.id in kin]
        known = self._keyframes.find([key for row in rows if row.base is not None for key in kin[row.id].keys])
        for row in rows:
            keyframe = Keyframe(row.id, row.raw_length, row.length, 1)
            if row.base is not None:
                of_base = [known[key] for key in kin[row.id].keys if key in known and known[key].chunk == row.base]
                if not of_base:  # another became the keyframe meanwhile
                    continue
                keyframe = replace(of_base[0], stored=of_base[0].stored + row.length, count=of_base[0].count + 1)
            known.update((key, keyframe) for key in kin[row.id].keys)
        self._keyframes.record(known.items())

    def are_there(self, rows: Iterable[PackedChunk]) -> bool:
        """Whether the remote has what deltas among *rows* are against."""
        bases = {row.base for row in rows if row.base is not None}
        return self._packs.known(bases) == bases

    def _base(self, chunk: Chunk, keys: Keys, keyframes: Mapping[bytes, Keyframe]) -> Base | None:
        for key in keys:
            keyframe = keyframes.get(key) or self._coming.get(key)
            if keyframe is None or keyframe.length != chunk.length or keyframe.chunk == chunk.id:
                continue
            places = tuple((each.image, each.offset) for each in self._contents.locations(keyframe.chunk))
            if places:
                return Base(keyframe, places)
        return None
