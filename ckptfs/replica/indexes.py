"""Learning which chunks other writers have put on the remote, so that a second machine uploads only what changed.

Each head names an index of the chunks that it added; each index names the one before. Before this store uploads, it
follows the chains of the heads that it has merged, from the newest index back to one that it knows.
"""

from __future__ import annotations

import logging
from functools import partial

import trio

from ckptfs.encoding.canonical import let_go, open_object
from ckptfs.encoding.head import Head, decode_head
from ckptfs.encoding.index import Index, decode_index
from ckptfs.encoding.keys import index_key
from ckptfs.errors import FormatError, ObjectMissing
from ckptfs.ids import ObjectId
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.followed import Followed
from ckptfs.local.catalog.packs import Packs
from ckptfs.remote.base import ObjectStore

log = logging.getLogger(__name__)

MOST_INDEXES = 500
"""How far back a chain is followed: it is read one by one, and what is older is seldom in the next checkpoint."""


class IndexLearner:
    """Reads others' indexes into the catalog's pack rows."""

    def __init__(self, catalog: Catalog, packs: Packs, remote: ObjectStore) -> None:
        self._catalog = catalog
        self._followed = Followed(catalog)
        self._packs = packs
        self._remote = remote

    async def learn(self) -> None:
        """Take in what the followed heads' chains have and this store does not know. Raises RemoteError.

        An index that is gone or damaged ends its chain with a warning: that costs an upload, no byte.
        """
        for writer in self._followed.newest():
            body = self._followed.body(self._catalog.writer_row(writer))
            if body is not None:
                await self._follow(decode_head(open_object(body)))

    async def _follow(self, head: Head) -> None:
        setting = f"index:{head.writer.hex()}"
        known = self._catalog.get_setting(setting)
        name, inlined = head.index, head.index_body
        for _ in range(MOST_INDEXES):
            if name is None or name == known:
                break
            try:
                index = await self._read(name, inlined)
            except (ObjectMissing, FormatError) as error:
                log.warning("%s: %s", index_key(name), error)
                break
            for pack, chunks in index.packs.items():
                self._packs.learned({pack: chunks})
                await trio.lowlevel.checkpoint()
            name, inlined = index.previous, None
        if head.index is not None and head.index != known:
            self._catalog.set_setting(setting, head.index)

    async def _read(self, name: ObjectId, inlined: bytes | None) -> Index:
        if inlined is not None:
            return decode_index(inlined)
        data = await trio.to_thread.run_sync(partial(self._remote.get, index_key(name)), abandon_on_cancel=True)
        return await trio.to_thread.run_sync(_decode, data, name)


def _decode(data: bytes, name: ObjectId) -> Index:
    try:
        return decode_index(open_object(data, name))
    except FormatError as error:
        let_go(error)
        raise
