"""From a cut to its remote objects: manifests of its files, and trees from the leaves up to the root.

Everything is a function of the cut's rows and of where packs have their chunks, so that a build after a restart gives
the same digests. Small objects are inlined in what refers to them; the others go to a `put` that the caller gives.

Who calls: the publishing task on the loop. Trees of large directories and large manifests are encoded in a thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from stat import S_ISDIR, S_ISREG

import trio

from ckptfs.config import Tuning
from ckptfs.encoding.canonical import object_id
from ckptfs.encoding.keys import tree_key
from ckptfs.encoding.manifest import Content, Manifest, Placed, encode_manifest
from ckptfs.encoding.tree import Entry, Tree, split_tree
from ckptfs.ids import ROOT_INODE, ChunkId, FileId, Inode, ObjectId
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.cuts import CutDirectory, CutEntry, CutFile, Cuts, Subtree
from ckptfs.local.catalog.packs import Packs

Put = Callable[[str, bytes], Awaitable[None]]
"""Stores canonical JSON under a key; returns when it is taken over, not when it is there."""

ReadTree = Callable[[ObjectId, bytes | None], Awaitable[Tree]]

_LARGE = 100
"""Entries or chunks from which on encoding is left to a thread: about 5 ms."""
_LOOK_UP = 1000
"""Chunks whose places are looked up before others may run: about 10 ms."""
_AT_ONCE = 1000
"""Entries handled before others may run: about 20 ms."""


class PackLost(Exception):
    """A chunk that was uploaded has no place any more: its pack is gone from the remote."""


@dataclass
class BuiltTrees:
    """Trees of every directory of a cut."""

    trees: dict[Inode, Subtree] = field(default_factory=dict)
    entries: int = 0
    files: int = 0
    bytes: int = 0

    @property
    def root(self) -> Subtree:
        return self.trees[ROOT_INODE]


def files_in_order(
    cuts: Cuts, cut: int, leaves_out: Callable[[Inode], bool] = lambda directory: False
) -> Iterator[CutFile]:
    """Files of the cut that are not published, each version once, in the order of `Cuts.files`.

    Reads the catalog as it goes; *leaves_out* takes a directory that need not be sent any more out of the cut.
    """
    seen: set[int] = set()
    pending = [(b"", iter(cuts.files(cut, ROOT_INODE, b"")))]
    while pending:
        above, files = pending[-1]
        for name, ino, file in files:
            if file is None:
                if leaves_out(ino):
                    continue
                path = above + name + b"/"
                pending.append((path, iter(cuts.files(cut, ino, path))))
                break
            if file.manifest not in seen:
                seen.add(file.manifest)
                yield file
        else:
            pending.pop()


class CutTrees:
    """Builds what a cut's head reaches."""

    def __init__(self, *, contents: Contents, cuts: Cuts, packs: Packs, read_tree: ReadTree, tuning: Tuning) -> None:
        self._contents = contents
        self._cuts = cuts
        self._packs = packs
        self._read_tree = read_tree
        self._tuning = tuning

    async def manifest(self, file: CutFile, content: Content) -> tuple[ObjectId, bytes]:
        """The digest and canonical JSON of a file's manifest. Raises PackLost when a chunk has no place."""
        places: dict[ChunkId, Placed] = {}
        for start in range(0, max(1, len(content.chunks)), _LOOK_UP):
            await trio.lowlevel.checkpoint()
            some = {chunk.id for chunk in content.chunks[start : start + _LOOK_UP]}
            places |= self._packs.placed_with_bases(some - places.keys())

        def encode() -> tuple[ObjectId, bytes]:
            body = encode_manifest(Manifest.of(content, places))
            return object_id(body), body

        try:
            if len(content.chunks) < _LARGE:
                return encode()
            return await trio.to_thread.run_sync(encode)
        except KeyError as error:
            raise PackLost(f"chunk {error} of manifest {file.manifest} is in no pack") from None

    async def build(self, cut: int, put: Put) -> BuiltTrees:
        """Trees of the cut, children first; all its manifests are published.

        Raises RemoteError and FormatError when an earlier tree is needed and cannot be read.
        """
        built = BuiltTrees()
        directories = self._cuts.directories(cut)
        async with aclosing(self._bottom_up(cut, directories)) as bottom_up:
            async for ino, entries in bottom_up:
                await self._build_directory(directories[ino], entries, built, put)
        return built

    async def _build_directory(
        self, directory: CutDirectory, entries: list[CutEntry], built: BuiltTrees, put: Put
    ) -> None:
        before = await self._before(directory, entries)
        finished: list[Entry] = []
        for number, each in enumerate(entries):
            if number % _AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            entry = self._entry(each, built, before)
            if entry is not None:
                finished.append(entry)
        tree = Tree(directory.file_id, tuple(finished))
        built.entries += len(finished)
        if len(finished) < _LARGE:
            objects = split_tree(tree, self._tuning.tree_entries)
        else:
            objects = await trio.to_thread.run_sync(split_tree, tree, self._tuning.tree_entries)
        name, body = objects.pop()
        for part, part_body in objects:
            await put(tree_key(part), part_body)
        if len(body) <= self._tuning.inline_bytes:
            built.trees[directory.ino] = (name, body)
        else:
            await put(tree_key(name), body)
            built.trees[directory.ino] = (name, None)

    async def _bottom_up(
        self, cut: int, directories: dict[Inode, CutDirectory]
    ) -> AsyncGenerator[tuple[Inode, list[CutEntry]], None]:
        """(directory, entries), each after all directories in it. Only one path's entries are in memory at once."""
        path = [(ROOT_INODE, await self._entries(cut, ROOT_INODE))]
        remaining = [self._below(path[0][1], directories)]
        while path:
            child = next(remaining[-1], None)
            if child is None:
                remaining.pop()
                yield path.pop()
            else:
                entries = await self._entries(cut, child)
                path.append((child, entries))
                remaining.append(self._below(entries, directories))

    async def _entries(self, cut: int, directory: Inode) -> list[CutEntry]:
        entries: list[CutEntry] = []
        while True:
            await trio.lowlevel.checkpoint()
            found = self._cuts.entries(cut, directory, entries[-1].name if entries else b"", _AT_ONCE)
            entries += found
            if len(found) < _AT_ONCE:
                return entries

    def _below(self, entries: list[CutEntry], directories: dict[Inode, CutDirectory]) -> Iterator[Inode]:
        return (each.ino for each in entries if each.ino is not None and each.entry and each.ino in directories)

    def _entry(self, each: CutEntry, built: BuiltTrees, before: dict[FileId, Entry]) -> Entry | None:
        """The finished entry; None for a name that has never been whole."""
        entry = each.entry
        if entry is None:
            return self._unfinished(each, before)
        if entry.file_id is None:
            return entry
        if S_ISDIR(entry.mode):
            tree = built.trees.get(each.ino) if each.ino is not None else None
            if tree is not None:
                return replace(entry, tree=tree[0], tree_body=tree[1])
            return entry
        if S_ISREG(entry.mode):
            assert each.manifest is not None
            row = self._contents.manifest(each.manifest)
            built.files += 1
            built.bytes += row.size
            return replace(entry, size=row.size, manifest=row.digest, manifest_body=row.remote_body)
        return entry

    def _unfinished(self, each: CutEntry, before: dict[FileId, Entry]) -> Entry | None:
        if each.file_id is None:
            return None
        earlier = before.get(each.file_id)
        return replace(earlier, name=each.name, stamp=each.stamp) if earlier is not None else None

    async def _before(self, directory: CutDirectory, entries: list[CutEntry]) -> dict[FileId, Entry]:
        """What was published of *directory*, by file, when something in it is unfinished."""
        if directory.tree is None or all(each.entry for each in entries):
            return {}
        tree = await self._read_tree(directory.tree, directory.tree_body)
        return {entry.file_id: entry for entry in tree.entries if entry.file_id is not None}
