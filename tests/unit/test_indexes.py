"""A writer learns from others' indexes which chunks the remote has, back to what it knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ckptfs.encoding.canonical import object_id, seal_object
from ckptfs.encoding.head import Head, encode_head
from ckptfs.encoding.index import Index, encode_index
from ckptfs.encoding.keys import index_key
from ckptfs.encoding.pack import PackedChunk
from ckptfs.ids import ChunkId, ObjectId, Stamp, WriterId, digest
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.followed import Followed
from ckptfs.local.catalog.packs import Packs
from ckptfs.remote.directory import DirectoryStore
from ckptfs.replica.indexes import IndexLearner

OTHER = WriterId(b"o" * 16)


def chunk(number: int) -> ChunkId:
    return ChunkId(digest(bytes([number])))


class Remote:
    """An index chain of another writer on a directory store."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.store = DirectoryStore(str(path))
        self.newest: ObjectId | None = None

    def add(self, number: int) -> None:
        packed = PackedChunk(chunk(number), 8, 100, 100, 0, None)
        body = encode_index(Index({ObjectId(digest(b"pack%d" % number)): (packed,)}, self.newest))
        self.newest = object_id(body)
        self.store.put(index_key(self.newest), seal_object(body))

    def head(self, seq: int) -> bytes:
        head = Head(
            writer=OTHER,
            seq=seq,
            lanes={"": (ObjectId(bytes(32)), None)},
            vector={},
            previous=None,
            index=self.newest,
            index_body=None,
            time_ns=0,
            stamp=Stamp(0),
            incomplete=False,
            counts={},
        )
        return seal_object(encode_head(head))


@pytest.mark.parametrize("damage", [None, "first"])
def test_chain(tmp_path: Path, damage: str | None) -> None:
    """The whole chain is learned once; later only what is new; a missing link costs what is behind it alone."""
    remote, catalog = Remote(tmp_path / "remote"), Catalog(tmp_path / "catalog.db")
    packs, followed = Packs(catalog), Followed(catalog)
    row = catalog.writer_row(WriterId(b"me" * 8)), catalog.writer_row(OTHER)
    remote.add(1)
    if damage:
        assert remote.newest is not None
        remote.store.delete([index_key(remote.newest)])
    remote.add(2)
    followed.remember(row[1], 1, remote.head(1))
    learner = IndexLearner(catalog, packs, remote.store)
    trio.run(learner.learn)
    assert packs.known([chunk(1), chunk(2), chunk(3)]) == ({chunk(2)} if damage else {chunk(1), chunk(2)})
    remote.add(3)
    followed.remember(row[1], 2, remote.head(2))
    trio.run(learner.learn)
    assert chunk(3) in packs.known([chunk(3)])
    catalog.close()
