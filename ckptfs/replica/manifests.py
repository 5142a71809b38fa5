"""File versions' contents: from the catalog, or fetched from the remote and then kept there.

With a fetched manifest come the places of its chunks, which are recorded too: what a followed head reaches need not be
uploaded again by this store (invariant 7). Who calls: the event loop's thread; fetching and decoding are in threads.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain, islice

import trio

from ckptfs.encoding.canonical import let_go
from ckptfs.encoding.keys import manifest_key
from ckptfs.encoding.manifest import Chunk, Content, Manifest, Placed, decode_content, decode_manifest, encode_content
from ckptfs.encoding.pack import PackedChunk
from ckptfs.errors import ContentUnavailable, FormatError, RemoteError
from ckptfs.ids import ChunkId, ObjectId
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.packs import Packs
from ckptfs.remote.retry import Retrying
from ckptfs.replica.checked import get_object

log = logging.getLogger(__name__)

_CACHED_CHUNKS = 200_000
"""Chunks in cached contents: about 40 MB."""
_CACHED_CONTENTS = 256
_LEARNED_AT_ONCE = 2000
"""Rows per transaction; the loop serves others in between."""


@dataclass
class _Cached:
    content: Content
    places: dict[ChunkId, Placed] | None = None


class Manifests:
    """Contents by manifest row."""

    def __init__(self, catalog: Catalog, remote: Retrying, timeout_s: float, limiter: trio.CapacityLimiter) -> None:
        self._catalog = catalog
        self._contents = Contents(catalog)
        self._packs = Packs(catalog)
        self._remote = remote
        self._timeout_s = timeout_s
        self._limiter = limiter
        self._cache: OrderedDict[ObjectId, _Cached] = OrderedDict()
        self._cached_chunks = 0
        self._fetching: dict[ObjectId, trio.Event] = {}

    async def content(self, manifest: int) -> Content:
        """The content of manifest row *manifest*.

        Raises ContentUnavailable when its object is missing or damaged, or does not come in time.
        """
        row = self._contents.manifest(manifest)
        if row.digest is None:
            if row.body is None:
                raise ContentUnavailable(f"manifest {manifest} has neither content nor an object")
            return decode_content(row.body)
        cached = self._cached(row.digest)
        if cached is not None:
            return cached.content
        if row.body is not None:
            content = await trio.to_thread.run_sync(decode_content, row.body)
            self._keep(row.digest, _Cached(content))
            return content
        try:
            return (await self._fetch(row.digest, row.remote_body, manifest)).content
        except (RemoteError, FormatError) as error:
            raise _unavailable(row.digest, error) from error

    async def places(self, content: Content) -> dict[ChunkId, Placed]:
        """Where *content*'s own manifest says that its chunks lie; empty when that cannot be had."""
        found = next((each for each in self._cache.items() if each[1].content is content), None)
        if found is None:
            return {}
        digest, cached = found
        if cached.places is None:
            try:
                manifest = await self._get(digest, None)
            except (RemoteError, FormatError) as error:
                log.warning("%s", _unavailable(digest, error))
                return {}
            cached.places = await trio.to_thread.run_sync(_places, manifest)
        return cached.places

    async def learn(self, manifest: int) -> None:
        """Record where the remote's manifest says that the chunks lie. Raises ContentUnavailable."""
        row = self._contents.manifest(manifest)
        if row.digest is not None:
            try:
                await self._learn(await self._get(row.digest, row.remote_body))
            except (RemoteError, FormatError) as error:
                raise _unavailable(row.digest, error) from error

    async def _fetch(self, digest: ObjectId, body: bytes | None, row: int) -> _Cached:
        while digest in self._fetching:
            await self._fetching[digest].wait()
            kept = self._cached(digest)
            if kept is not None:
                return kept
        event = self._fetching[digest] = trio.Event()
        try:
            manifest = await self._get(digest, body)
            cached, encoded = await trio.to_thread.run_sync(_prepare, manifest)
            try:
                await self._learn(manifest)
                # Last, so that a manifest whose body is there has its places there too.
                if self._contents.manifest_by_digest(digest) is not None:
                    self._contents.set_manifest_body(row, encoded)
            except OSError as error:  # a full disk: memory has it, and the remote when it is needed again
                log.warning("manifest %s is not kept: %s", digest.hex(), error)
            self._keep(digest, cached)
            return cached
        finally:
            del self._fetching[digest]
            event.set()

    async def _get(self, digest: ObjectId, body: bytes | None) -> Manifest:
        def get() -> Manifest:
            try:
                return decode_manifest(get_object(self._remote, manifest_key(digest), digest) if body is None else body)
            except FormatError as error:
                let_go(error)
                raise

        began = time.monotonic()
        try:
            with trio.fail_after(self._timeout_s):
                return await trio.to_thread.run_sync(get, abandon_on_cancel=True, limiter=self._limiter)
        except trio.TooSlowError:
            raise self._remote.failure_since(began) or _late(digest) from None

    async def _learn(self, manifest: Manifest) -> None:
        lengths = {at.base: chunk.length for chunk, at in zip(manifest.content.chunks, manifest.places, strict=True)}
        bases = ((Chunk(base, lengths[base], None), at) for base, at in manifest.bases.items())
        pairs = chain(zip(manifest.content.chunks, manifest.places, strict=True), bases)
        while batch := list(islice(pairs, _LEARNED_AT_ONCE)):
            packs: dict[ObjectId, list[PackedChunk]] = {}
            for chunk, at in batch:
                packed = PackedChunk(chunk.id, at.offset, at.length, chunk.length, at.codec, at.base)
                packs.setdefault(at.pack, []).append(packed)
            self._packs.learned(packs)
            await trio.lowlevel.checkpoint()

    def _cached(self, digest: ObjectId) -> _Cached | None:
        cached = self._cache.get(digest)
        if cached is not None:
            self._cache.move_to_end(digest)
        return cached

    def _keep(self, digest: ObjectId, cached: _Cached) -> None:
        if digest in self._cache:
            return
        self._cache[digest] = cached
        self._cached_chunks += len(cached.content.chunks)
        while len(self._cache) > 1 and (self._cached_chunks > _CACHED_CHUNKS or len(self._cache) > _CACHED_CONTENTS):
            _, oldest = self._cache.popitem(last=False)
            self._cached_chunks -= len(oldest.content.chunks)


def _prepare(manifest: Manifest) -> tuple[_Cached, bytes]:
    """What is kept of *manifest* and its encoded content. For a worker thread: a large one takes a second."""
    manifest.content.offsets()
    return _Cached(manifest.content, _places(manifest)), encode_content(manifest.content)


def _places(manifest: Manifest) -> dict[ChunkId, Placed]:
    chunks = (chunk.id for chunk in manifest.content.chunks)
    return dict(manifest.bases) | dict(zip(chunks, manifest.places, strict=True))


def _late(digest: ObjectId) -> RemoteError:
    return RemoteError("no answer in time", key=manifest_key(digest), temporary=True)


def _unavailable(digest: ObjectId, error: Exception) -> ContentUnavailable:
    return ContentUnavailable(f"manifest {digest.hex()} cannot be had from the remote: {error}")
