"""Several catalogs that share one remote: local changes as the file system makes them, publishing and following.

File contents are manifests of one made-up chunk: nothing here has images. A peer publishes everything that it has.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from ckptfs.config import Tuning
from ckptfs.encoding.canonical import object_id, seal_object
from ckptfs.encoding.head import Head, encode_head
from ckptfs.encoding.keys import head_key, tree_key
from ckptfs.encoding.manifest import Chunk, Content, Manifest, Placed, encode_content, encode_manifest
from ckptfs.encoding.tree import Entry, Tree, split_tree
from ckptfs.errors import IsADirectory, NameExists, NotDirectory
from ckptfs.ids import (
    ROOT_FILE_ID,
    ROOT_INODE,
    ChunkId,
    Clock,
    ImageId,
    Inode,
    ObjectId,
    WriterId,
    digest,
    new_writer_id,
)
from ckptfs.local.catalog.catalog import SELF, Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.followed import Followed
from ckptfs.local.catalog.names import CHANGED, Names
from ckptfs.local.catalog.sources import Sources
from ckptfs.remote.base import ObjectStore
from ckptfs.replica.follow import Follower
from ckptfs.replica.merge import Merger

TUNING = Tuning(inline_bytes=400, tree_entries=16, retry_first_s=0.01, retry_most_s=0.02)
READ_TIMEOUT_S = 0.5


class Peer:
    """One store's catalog, without a disk for bytes."""

    def __init__(
        self,
        path: Path | str,
        remote: ObjectStore,
        *,
        now_ms: Callable[[], int],
        tuning: Tuning = TUNING,
        lag_s: float = 2.0,
    ) -> None:
        self.catalog = Catalog(Path(path))
        self.remote = remote
        self.tuning = tuning
        self.clock = Clock(now_ms=now_ms)
        self.names = Names(self.catalog)
        self.contents = Contents(self.catalog)
        self.sources = Sources(self.catalog)
        self.followed = Followed(self.catalog)
        self.events: list[tuple[Inode | None, bytes | None, Inode | None, bool]] = []
        self.freed: list[ImageId] = []
        self.being_written: set[Inode] = set()
        self.writer = new_writer_id()
        with self.catalog.transaction() as db:
            row = db.execute("SELECT uuid FROM writer WHERE id = ?", (SELF,)).fetchone()
            if row is None:
                db.execute("INSERT INTO writer (id, uuid) VALUES (?, ?)", (SELF, self.writer))
                db.execute(
                    "INSERT INTO inode (ino, file_id, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, changed)"
                    " VALUES (?, ?, ?, 0, 0, 2, 0, 0, 0, 0)",
                    (ROOT_INODE, ROOT_FILE_ID, 0o40755),
                )
            else:
                self.writer = WriterId(row[0])
        self.merger = Merger(self.catalog, self.clock, remote, self, tuning, READ_TIMEOUT_S)
        self.follower = Follower(self.catalog, remote, self.merger, writer=lambda: self.writer, lag_s=lag_s)

    # MergeListener

    def changed(self, parent: Inode | None, name: bytes | None, ino: Inode | None, content: bool) -> None:
        self.events.append((parent, name, ino, content))

    def unnamed(self, ino: Inode) -> None:
        if self.names.inode(ino).nlink == 0:
            self.names.remove_inode(ino)

    def pending(self, directory: Inode, name: bytes) -> None: ...

    def unneeded(self, image: ImageId) -> None:
        self.freed.append(image)

    def writing(self, ino: Inode) -> bool:
        return ino in self.being_written

    # Local changes

    async def resolve(self, path: str) -> Inode:
        ino = ROOT_INODE
        for part in path.split("/"):
            if part:
                await self.merger.expand(ino)
                ino = self.names.child(ino, part.encode()).ino
        await self.merger.expand(ino) if stat.S_ISDIR(self.names.inode(ino).mode) else None
        return ino

    async def _at(self, path: str) -> tuple[Inode, bytes]:
        parent, _, name = path.rpartition("/")
        ino = await self.resolve(parent)
        if not stat.S_ISDIR(self.names.inode(ino).mode):
            raise NotDirectory(parent)
        return ino, name.encode()

    async def write(self, path: str, data: str) -> Inode:
        """Create or change a file."""
        parent, name = await self._at(path)
        found = self.names.find(parent, name)
        if found is not None and stat.S_ISDIR(self.names.inode(found).mode):
            raise IsADirectory(path)
        stamp = self.clock.tick()
        with self.catalog.transaction():
            manifest = self.contents.add_manifest(**_content(data))
            if found is None:
                found = self.names.add_inode(
                    mode=0o100644, uid=0, gid=0, now_ns=int(stamp), changed=stamp, size=len(data), manifest=manifest
                )
                self.names.bind(parent, name, found, stamp)
                self.names.touch_directory(parent, int(stamp), stamp)
            else:
                self.names.update_inode(found, manifest=manifest, size=len(data), mtime_ns=int(stamp))
                self.names.state_changed(found, stamp)
        return found

    async def mkdir(self, path: str) -> Inode:
        parent, name = await self._at(path)
        if self.names.find(parent, name) is not None:
            raise NameExists(path)
        stamp = self.clock.tick()
        with self.catalog.transaction():
            ino = self.names.add_inode(
                mode=0o40755, uid=0, gid=0, now_ns=int(stamp), changed=stamp, dirty=CHANGED
            )
            self.names.bind(parent, name, ino, stamp)
            self.names.touch_directory(parent, int(stamp), stamp)
            self._links(parent, 1)
        return ino

    async def remove(self, path: str) -> None:
        """rm -r."""
        parent, name = await self._at(path)
        ino = self.names.child(parent, name).ino
        if stat.S_ISDIR(self.names.inode(ino).mode):
            await self.merger.expand(ino)
            for child, _ in self.names.entries(ino):
                await self.remove(f"{path}/{child.decode()}")
        row = self.names.inode(ino)
        stamp = self.clock.tick()
        with self.catalog.transaction():
            self.names.unbind(parent, name, stamp, tombstone=True)
            if stat.S_ISDIR(row.mode):
                self._links(parent, -1)
                self.names.update_inode(ino, nlink=0)
            else:
                self.names.update_inode(ino, nlink=row.nlink - 1)
                if row.nlink > 1:
                    self.names.state_changed(ino, self.clock.tick())
            self.names.touch_directory(parent, int(stamp), stamp)
        self.unnamed(ino)

    async def rename(self, old: str, new: str) -> None:
        parent, name = await self._at(old)
        new_parent, new_name = await self._at(new)
        ino = self.names.child(parent, name).ino
        directory = stat.S_ISDIR(self.names.inode(ino).mode)
        if ino == new_parent or ino in self.names.ancestors(new_parent):
            raise NameExists(new)
        target = self.names.find(new_parent, new_name)
        if target == ino:
            return
        if target is not None:
            if directory or stat.S_ISDIR(self.names.inode(target).mode):
                raise NameExists(new)
            await self.remove(new)
        stamp = self.clock.tick()
        with self.catalog.transaction():
            self.names.bind(new_parent, new_name, ino, stamp)
            self.names.unbind(parent, name, stamp, tombstone=True)
            self.names.update_inode(ino, ctime_ns=int(stamp))
            if directory:
                self._links(parent, -1)
                self._links(new_parent, 1)
            self.names.touch_directory(parent, int(stamp), stamp)
            self.names.touch_directory(new_parent, int(stamp), stamp)

    async def link(self, old: str, new: str) -> None:
        ino = await self.resolve(old)
        parent, name = await self._at(new)
        if self.names.find(parent, name) is not None:
            raise NameExists(new)
        if stat.S_ISDIR(self.names.inode(ino).mode):
            raise IsADirectory(old)
        stamp = self.clock.tick()
        with self.catalog.transaction():
            self.names.bind(parent, name, ino, stamp)
            self.names.update_inode(ino, nlink=self.names.inode(ino).nlink + 1)
            self.names.state_changed(ino, stamp)
            self.names.touch_directory(parent, int(stamp), stamp)

    def _links(self, directory: Inode, change: int) -> None:
        self.names.update_inode(directory, nlink=self.names.inode(directory).nlink + change)

    # Sharing

    def publish(self) -> Head:
        """Put everything, as one head."""
        objects: dict[ObjectId, bytes] = {}
        stamp = self.clock.tick()
        dirty = {Inode(row[0]) for row in self.catalog.db.execute("SELECT ino FROM inode WHERE dirty > 0")}
        outdated = dirty.union(*(self.names.ancestors(ino) for ino in dirty))
        root = self._tree(ROOT_INODE, objects, outdated)
        for name, body in objects.items():
            self.remote.put(tree_key(name), seal_object(body))
        seq = self.followed.own_sequence() + 1
        head = Head(self.writer, seq, {"": root}, self.followed.newest(), stamp=stamp)
        data = seal_object(encode_head(head))
        self.remote.put(head_key(self.writer, seq), data)
        with self.catalog.transaction() as db:
            db.execute("DELETE FROM head WHERE writer = ?", (SELF,))
            db.execute("INSERT INTO head (writer, seq, body, acked) VALUES (?, ?, ?, 1)", (SELF, seq, data))
            db.execute("UPDATE dirent SET origin_writer = ?, origin_seq = ? WHERE origin_seq IS NULL", (SELF, seq))
        return head

    def _tree(
        self, directory: Inode, objects: dict[ObjectId, bytes], outdated: set[Inode]
    ) -> tuple[ObjectId, bytes | None]:
        state = self.sources.tree(directory)
        assert state is not None
        if state.digest is not None and (directory not in outdated or not state.expanded):
            return state.digest, state.body
        entries = []
        for row in self.sources.rows(directory):
            if row.ino is None:
                entries.append(Entry(row.name, row.stamp))
                continue
            each = self.names.inode(row.ino)
            tree = self._tree(row.ino, objects, outdated) if stat.S_ISDIR(each.mode) else (None, None)
            manifest: tuple[ObjectId | None, bytes | None] = (None, None)
            if each.manifest is not None:
                found = self.contents.manifest(each.manifest)
                manifest = found.digest, found.remote_body
            entries.append(
                Entry(
                    row.name, row.stamp, each.file_id, each.mode, each.uid, each.gid, each.rdev, each.size,
                    each.mtime_ns, each.ctime_ns, each.atime_ns, each.changed, each.target,
                    tuple(self.names.xattrs(row.ino).items()), *manifest, *tree,
                )
            )  # fmt: skip
        *parts, last = split_tree(
            Tree(self.names.inode(directory).file_id, tuple(entries)), self.tuning.tree_entries
        )
        objects.update(parts)
        inline = not parts and len(last[1]) <= self.tuning.inline_bytes
        if not inline:
            objects[last[0]] = last[1]
        self.sources.set_tree(directory, last[0], last[1] if inline else None)
        return last[0], last[1] if inline else None

    async def follow(self) -> None:
        await self.follower.check()
        assert self.follower.last_error is None, self.follower.last_error

    async def view(self, path: str = "") -> dict[str, str]:
        """Everything, expanded: path -> content; a directory's path ends with a slash."""
        found: dict[str, str] = {}
        ino = await self.resolve(path)
        for name, child in self.names.entries(ino):
            row = self.names.inode(child)
            below = f"{path}/{name.decode()}".lstrip("/")
            if stat.S_ISDIR(row.mode):
                found[below + "/"] = ""
                found |= await self.view(below)
            else:
                assert row.manifest is not None
                manifest = self.contents.manifest(row.manifest)
                found[below] = (manifest.digest or b"").hex()
        return found

    def check(self) -> None:
        """The catalog's own rules."""
        db = self.catalog.db
        for ino, nlink, mode in db.execute("SELECT ino, nlink, mode FROM inode").fetchall():
            names = self.names.parents(Inode(ino))
            if stat.S_ISDIR(mode):
                children = [c for _, c in self.names.entries(Inode(ino)) if stat.S_ISDIR(self.names.inode(c).mode)]
                assert nlink == 2 + len(children), (ino, nlink, children)
                assert len(names) == (ino != ROOT_INODE), (ino, names)
                assert self.names.path(Inode(ino))
            else:
                assert nlink == len(names) > 0, (ino, nlink, names)
        for (ino,) in db.execute("SELECT DISTINCT parent FROM dirent").fetchall():
            assert self.names.inode(Inode(ino)), "rows of a directory that is gone"

    async def check_published(self) -> None:
        """Clean directories hold exactly what their tree says."""
        for (ino,) in self.catalog.db.execute(
            "SELECT ino FROM inode WHERE dirty = 0 AND expanded = 1 AND tree IS NOT NULL"
        ).fetchall():
            state = self.sources.tree(Inode(ino))
            assert state is not None and state.digest is not None
            tree = await self.merger._trees.read(state.digest, state.body)
            assert self.merger._holds(Inode(ino), tree), self.names.path(Inode(ino))

    def close(self) -> None:
        self.catalog.close()


def content_id(data: str) -> str:
    """What `Peer.view` shows for a file with *data*."""
    found = _content(data)["digest"]
    assert isinstance(found, bytes)
    return found.hex()


def _content(data: str) -> dict[str, object]:
    raw = data.encode()
    chunks = (Chunk(ChunkId(digest(raw)), len(raw), None),) if raw else ()
    content = Content(len(raw), (), chunks)
    places = tuple(Placed(ObjectId(digest(b"pack" + raw)), 0, len(raw), 0, None) for _ in chunks)
    body = encode_manifest(Manifest(content, places))
    return {"size": len(raw), "body": encode_content(content), "digest": object_id(body), "remote_body": body}
