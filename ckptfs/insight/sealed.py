"""What a mount's catalog knows of a file in it, so that nobody needs to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptfs.client import Place, locate
from ckptfs.encoding.manifest import Content, decode_content
from ckptfs.errors import MountError, NameMissing, StoreError
from ckptfs.ids import ChunkId
from ckptfs.local.catalog.survey import ChunkPlace, Survey


@dataclass(frozen=True)
class Sealed:
    """A sealed file version, and where its chunks are."""

    content: Content
    places: Mapping[bytes, ChunkPlace]
    whole: bool
    """Whether all of it is on this disk."""

    def digests(self, start: int, end: int) -> tuple[ChunkId, ...] | None:
        """The chunks that are exactly the bytes `[start, end)`; None when no row of them is."""
        numbers = self.content.at(start, end)
        chunks = [self.content.chunks[each] for each in numbers]
        begins = bool(chunks) and self.content.offsets()[numbers[0]] == start
        if not begins or sum(each.length for each in chunks) != end - start:  # a hole, or more than these bytes
            return None
        return tuple(each.id for each in chunks)


def place_of(path: str) -> Place | None:
    """Where in which mount *path* is; None when in none that answers."""
    try:
        return locate(path)
    except MountError:
        return None


def sealed(path: str) -> Sealed | None:
    """What is known of the file at *path*; None when it lies in no mount, is not sealed, or only the remote knows."""
    place = place_of(path)
    if place is None:
        return None
    try:
        with Survey(place.store / "catalog.db") as survey:
            file = survey.file(survey.resolve(place.inside))
            body = survey.body(file.manifest) if file is not None and file.manifest is not None else None
            if file is None or body is None:
                return None
            content = decode_content(body)
            return Sealed(content, survey.places(chunk.id for chunk in content.chunks), file.whole)
    except (NameMissing, StoreError):
        return None
