"""Fetching trees: from their parent where they are inlined, else from the remote, in threads, with a small cache.

Who calls: the event loop's thread. A cancelled fetch leaves its thread to finish alone; nothing waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import trio

from ckptfs.encoding.canonical import let_go
from ckptfs.encoding.keys import tree_key
from ckptfs.encoding.tree import Tree, TreeParts, decode_tree, join_parts
from ckptfs.errors import FormatError, RemoteError
from ckptfs.ids import ObjectId
from ckptfs.remote.base import ObjectStore
from ckptfs.replica.checked import get_object

_CACHED_ENTRIES = 20_000
"""About 20 MB of decoded entries: a conflict looks at the same trees head after head."""
_CACHED_TREES = 256

_AT_ONCE = 64
"""A tree may name any number of parts; a task for each of a hundred thousand took 800 MB."""

T = TypeVar("T")


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
        decoded = await self._fetch(digest) if body is None else _decode(digest, body)
        if isinstance(decoded, Tree):
            tree = decoded
        else:
            parts: dict[ObjectId, Tree | TreeParts] = {}

            async def read_part(part: ObjectId) -> None:
                parts[part] = await self._fetch(part)

            await at_once(read_part, decoded.parts)
            tree = join_parts(decoded, [parts[part] for part in decoded.parts])
        self._keep(digest, tree)
        return tree

    async def _fetch(self, digest: ObjectId) -> Tree | TreeParts:
        self.requests += 1
        return await trio.to_thread.run_sync(
            self._fetch_blocking, digest, abandon_on_cancel=True, limiter=self._limiter
        )

    def _fetch_blocking(self, digest: ObjectId) -> Tree | TreeParts:
        return _decode(digest, get_object(self._remote, tree_key(digest), digest))

    def _keep(self, digest: ObjectId, tree: Tree) -> None:
        if len(tree.entries) > _CACHED_ENTRIES // 2 or digest in self._cache:
            return
        self._cache[digest] = tree
        self._cached_entries += len(tree.entries)
        while self._cached_entries > _CACHED_ENTRIES or len(self._cache) > _CACHED_TREES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_entries -= len(oldest.entries)


def _decode(digest: ObjectId, body: bytes) -> Tree | TreeParts:
    """Raises FormatError, which names the tree."""
    try:
        return decode_tree(body)
    except FormatError as error:
        let_go(error)
        del body  # this call is not over yet
        raise FormatError(f"{tree_key(digest)}: {error}") from error


async def at_once(call: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Call for every item, many at once. An error cancels the others and is raised as it is."""
    failed: list[Exception] = []
    left = iter(items)

    async def work() -> None:
        for item in left:
            try:
                await call(item)
            except (RemoteError, FormatError) as error:
                failed.append(error)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(_AT_ONCE):
            nursery.start_soon(work)
    if failed:
        raise failed[0]
