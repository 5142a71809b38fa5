"""Packs in which a reader did not find what should be there, until they are mended or found to be sound.

While a pack is in doubt nothing goes from this disk that should lie in it, and `status` says so. Looking at it again,
and making it anew, is the work of `ckptfs.repair.healing`. Of manifests, too, it is known which could not be read; as a
machine that lacks one has nothing of the file, that is for who asks only, and lasts as long as the process.

Who calls: the event loop's thread.
"""

from __future__ import annotations

import logging

from ckptfs.encoding.keys import manifest_key, pack_key
from ckptfs.errors import ContentUnavailable, RemoteForbidden, RemoteUnusable
from ckptfs.ids import ObjectId
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.packs import Packs

log = logging.getLogger(__name__)


class Doubts:
    """See the module."""

    def __init__(self, packs: Packs, contents: Contents) -> None:
        self._packs = packs
        self._contents = contents
        self._why: dict[ObjectId, str] = {}
        self._manifests: dict[int, str] = {}
        """Manifest row -> why it could not be had."""

    def missed(self, pack: ObjectId, error: Exception) -> None:
        """*pack* did not give what it should, twice: *error* says why. Logged once."""
        if isinstance(error, RemoteForbidden | RemoteUnusable):  # says nothing of the pack
            return
        if pack not in self._why:
            log.error("bytes that should be on the remote cannot be had: %s", error)
        self._why[pack] = str(error)
        try:
            self._packs.doubt(pack)
        except OSError as failure:  # a full disk: the next reader says it again
            log.warning("that %s is in doubt is not recorded: %s", pack_key(pack), failure)

    def doubted(self) -> list[ObjectId]:
        """The packs in doubt. What was said of others is forgotten, and logged when it is missed again."""
        found = list(self._packs.doubted())
        for name in self._why.keys() - set(found):
            del self._why[name]
        return found

    def missed_manifest(self, row: int, error: ContentUnavailable) -> None:
        """The manifest of that row could not be had: *error* says why."""
        if error.is_damage:
            self._manifests[row] = str(error)

    def found_manifest(self, row: int) -> None:
        """The manifest of that row is right."""
        self._manifests.pop(row, None)

    def manifests(self) -> list[int]:
        """The rows of manifests that could not be had, and that files still need."""
        for row in [each for each in self._manifests if not self._contents.has_manifest(each)]:
            del self._manifests[row]
        return list(self._manifests)

    def told(self) -> list[dict[str, object]]:
        """As JSON: `object`, the key; `why`, what was wrong; `here`, whether bytes of this disk should be in it."""
        before = "a reader missed something in it before this mount"
        packs = self._packs.doubted().items()
        found: list[dict[str, object]] = [
            {"object": pack_key(name), "why": self._why.get(name, before), "here": here} for name, here in packs
        ]
        for row in self.manifests():
            digest = self._contents.manifest(row).digest
            if digest is not None:
                found.append({"object": manifest_key(digest), "why": self._manifests[row], "here": False})
        return found
