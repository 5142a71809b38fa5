"""Fetching trees: from their parent where they are inlined, else from the remote, in threads, with a small cache.

Who calls: the event loop's thread. A cancelled fetch leaves its thread to finish alone; nothing waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import trio

from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.keys import tree_key
from ckptfs.encoding.tree import Tree, decode_tree, join_parts
from ckptfs.ids import ObjectId
from ckptfs.remote.base import ObjectStore

_CACHED_ENTRIES = 20_000
"""About 20 MB of decoded entries: a conflict looks at the same trees head after head."""
_CACHED_TREES = 256


class Trees:
    """Reads directories of the remote."""

    def __init__(self, remote: ObjectStore, limiter: trio.CapacityLimiter) -> None:
        self._remote = remote
        self._limiter = limiter
        self._cache: OrderedDict[ObjectId, Tree] = OrderedDict()
        self._cached_entries = 0
        self.requests = 0

    async def read(self, digest: ObjectId, body: bytes | None) -> Tree:
        """The whole directory *digest*, parts joined. Raises RemoteError and FormatError."""
        tree = self._cache.get(digest)
        if tree is not None:
            self._cache.move_to_end(digest)
            return tree
        decoded = decode_tree(await self._fetch(digest) if body is None else body)
        if isinstance(decoded, Tree):
            tree = decoded
        else:
            parts: dict[ObjectId, Tree] = {}
            async with trio.open_nursery() as nursery:
                for part in decoded.parts:
                    nursery.start_soon(self._read_part, part, parts)
            tree = join_parts(decoded, [parts[part] for part in decoded.parts])
        self._keep(digest, tree)
        return tree

    async def _read_part(self, digest: ObjectId, parts: dict[ObjectId, Tree]) -> None:
        part = decode_tree(await self._fetch(digest))
        if isinstance(part, Tree):
            parts[digest] = part

    async def _fetch(self, digest: ObjectId) -> bytes:
        self.requests += 1
        get = partial(self._remote.get, tree_key(digest))
        data = await trio.to_thread.run_sync(get, abandon_on_cancel=True, limiter=self._limiter)
        return open_object(data, digest)

    def _keep(self, digest: ObjectId, tree: Tree) -> None:
        if len(tree.entries) > _CACHED_ENTRIES // 2 or digest in self._cache:
            return
        self._cache[digest] = tree
        self._cached_entries += len(tree.entries)
        while self._cached_entries > _CACHED_ENTRIES or len(self._cache) > _CACHED_TREES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_entries -= len(oldest.entries)
