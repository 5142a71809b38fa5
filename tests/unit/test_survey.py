"""Looking at a catalog from outside: who may, and what is told of names, chunks and what only the remote knows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptfs.encoding.manifest import Chunk, Content, encode_content
from ckptfs.encoding.pack import PackedChunk
from ckptfs.errors import NameMissing, StoreError
from ckptfs.ids import ROOT_INODE, ChunkId, Clock, Inode, ObjectId, digest, new_image_id
from ckptfs.insight.usage import look, unlearned
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.names import Names
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.catalog.survey import ChunkPlace, Survey
from ckptfs.local.store import Store


def chunk(name: bytes) -> Chunk:
    return Chunk(ChunkId(digest(name)), 100, None)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """/run/a (chunks x, y; here), /run/b (x, z; only its chunk list is here), /run/c (not even that), /far (a
    directory not looked into)."""
    Store.open(tmp_path).close()
    found = Catalog(tmp_path / "catalog.db")
    names, contents, clock = Names(found), Contents(found), Clock()

    def add(parent: Inode, name: bytes, mode: int, **columns: object) -> Inode:
        ino = names.add_inode(mode=mode, uid=0, gid=0, now_ns=5, changed=clock.tick(), **columns)  # type: ignore[arg-type]
        names.bind(parent, name, ino, clock.tick())
        return ino

    run = add(ROOT_INODE, b"run", 0o40755)
    add(ROOT_INODE, b"far", 0o40755, expanded=False)
    image = new_image_id()
    contents.add_image(image, whole=True)
    contents.add_locations(image, [(chunk(b"x").id, 0, 100), (chunk(b"y").id, 100, 100)])
    first = contents.add_manifest(size=200, body=body(b"x", b"y"))
    second = contents.add_manifest(size=200, body=body(b"x", b"z"))
    third = contents.add_manifest(size=300, body=None, digest=ObjectId(digest(b"manifest")))
    add(run, b"a", 0o100644, image=image, manifest=first, size=200)
    add(run, b"b", 0o100644, manifest=second, size=200)
    add(run, b"c", 0o100644, manifest=third, size=300)
    add(run, b"link", 0o120777, target=b"a")
    pack = [PackedChunk(chunk(each).id, at * 40, 40, 100, 1, None) for at, each in enumerate((b"x", b"z"))]
    Packs(found).acknowledged(ObjectId(digest(b"pack")), pack, verified=False)
    return found


def body(*chunks: bytes) -> bytes:
    return encode_content(Content(100 * len(chunks), (), tuple(map(chunk, chunks))))


def test_what_is_told(catalog: Catalog) -> None:
    """Names as paths, places of chunks, and what is still to be asked for; while somebody else has the catalog open."""
    with Survey(catalog.path) as survey:
        files = survey.files()
        assert [(file.path, file.size, file.whole) for file in files] == [
            (b"/run/a", 200, True), (b"/run/b", 200, False), (b"/run/c", 300, False),
        ]  # fmt: skip
        assert survey.file(survey.resolve(b"/run/a")) == files[0]._replace(path=b"")
        assert survey.file(survey.resolve(b"/run/link")) is None and survey.file(Inode(99)) is None
        assert [name for name, _ in survey.names(survey.resolve(b"/run"))] == [b"a", b"b", b"c", b"link"]
        x, y, z, other = (chunk(each).id for each in (b"x", b"y", b"z", b"other"))
        assert survey.places([x, y, z, other, x]) == {
            x: ChunkPlace(True, 40, 1), y: ChunkPlace(True, None, None), z: ChunkPlace(False, 40, 1),
            other: ChunkPlace(False, None, None),
        }  # fmt: skip
        with pytest.raises(NameMissing, match="/run/none"):
            survey.resolve(b"/run/none")
    catalog.close()


def test_one_state_whatever_is_written_meanwhile(catalog: Catalog) -> None:
    """A daemon writes on; who looks sees what was."""
    with Survey(catalog.path) as survey:
        before = survey.files()
        Names(catalog).unbind(survey.resolve(b"/run"), b"a", Clock().tick(), tombstone=True)
        assert survey.files() == before
    with Survey(catalog.path) as survey:
        assert [file.path for file in survey.files()] == [b"/run/b", b"/run/c"]
    catalog.close()


def test_usage_of_what_is_partly_unknown(catalog: Catalog) -> None:
    """A file of unknown chunks is all its own, and on the remote; directories not looked into are told."""
    store = catalog.path.parent
    report = look(store, b"/")
    rows = {row.path: row for row in report.rows}
    assert (report.unknown, report.unseen, report.unsealed) == (1, 1, 0)
    assert list(rows) == [b"far", b"run"]
    assert rows[b"far"].usage.files == 0
    run = rows[b"run"].usage
    assert (run.files, run.logical, run.unique, run.shared) == (3, 700, 600, 0)
    assert (run.local, run.remote, run.encoded) == (200, 500, 380)
    inside = {row.path: row.usage for row in look(store, b"/run").rows}
    assert [(each.unique, each.shared) for each in inside.values()] == [(100, 100), (100, 100), (300, 0)]
    directories, manifests = unlearned(store, b"/")
    assert (len(directories), len(manifests)) == (1, 1)
    assert unlearned(store, b"/run") == ([], manifests)
    catalog.close()


def test_a_damaged_chunk_list_is_told(catalog: Catalog) -> None:
    """With the file's name, and where to turn."""
    with catalog.transaction() as db:
        db.execute("UPDATE manifest SET body = x'00' WHERE size = 200")
    with pytest.raises(StoreError, match=r"chunk list of /run/a is damaged .*fsck"):
        look(catalog.path.parent, b"/")
    catalog.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_others_may_not_look(catalog: Catalog, tmp_path: Path) -> None:
    """Who did not mount the store is told so, and not that it is damaged."""
    catalog.close()
    os.chmod(tmp_path, 0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(StoreError, match="only the user who mounts"):
            Survey(tmp_path / "catalog.db")
    finally:
        os.seteuid(0)
    with pytest.raises(StoreError, match="No such file"):
        Survey(tmp_path / "none")


def test_a_path_of_any_depth(catalog: Catalog) -> None:
    """Deeper than Python would recurse."""
    names, clock, parent = Names(catalog), Clock(), ROOT_INODE
    with catalog.transaction():
        for _ in range(1500):
            ino = names.add_inode(mode=0o40755, uid=0, gid=0, now_ns=5, changed=clock.tick())
            names.bind(parent, b"d", ino, clock.tick())
            parent = ino
        image = new_image_id()
        Contents(catalog).add_image(image, whole=True)
        file = names.add_inode(mode=0o100644, uid=0, gid=0, now_ns=5, changed=clock.tick(), image=image)
        names.bind(parent, b"file", file, clock.tick())
    with Survey(catalog.path) as survey:
        assert survey.files()[0].path == b"/d" * 1500 + b"/file"
    catalog.close()
