"""Scrubbing the remote: read back what this store's state needs there, and make anew what is damaged or gone.

Everything but heads is named by its content, and heads are kept in the catalog byte for byte; so what is put again is
what was put before, verified first, and nothing is ever replaced by anything else. See docs/decisions/repair.md.

Who calls: one task on the event loop; requests, hashing and encoding are in threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from ckptfs.encoding.canonical import open_object, seal_object
from ckptfs.encoding.head import decode_head, head_key
from ckptfs.encoding.keys import FORMAT_KEY, manifest_key, pack_key, tree_key
from ckptfs.encoding.manifest import decode_manifest
from ckptfs.encoding.pack import PackedChunk
from ckptfs.encoding.tree import TreeParts, decode_tree
from ckptfs.errors import CkptfsError, FormatError, ObjectExists, ObjectMissing, RemoteError
from ckptfs.ids import ROOT_INODE, ChunkId, Inode, ObjectId, Stamp
from ckptfs.local.catalog.mending import Mending
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.catalog.stock import Stock, StockFile, StockHead
from ckptfs.local.store import Store
from ckptfs.remote.base import ObjectStore
from ckptfs.repair import packs as pack_repair
from ckptfs.repair import trees
from ckptfs.repair.copies import Copies, Raw
from ckptfs.repair.findings import LOST, REPAIRED, Finding, Report
from ckptfs.repair.pace import Pace
from ckptfs.replica.hydrate import Hydrator
from ckptfs.replica.verify import check_pack

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _User:
    """A file that needs chunks of a damaged pack."""

    file: StockFile
    own: frozenset[ChunkId]
    bases: frozenset[ChunkId]
    """What chunks of it are told as differences to."""

    @property
    def is_whole(self) -> bool:
        """Whether all its bytes are here."""
        return self.file.whole and self.file.image is not None

    def lacks(self, lost: Collection[ChunkId]) -> bool:
        """Whether it can be had nowhere any more without *lost*."""
        return not self.own.isdisjoint(lost) or (not self.file.whole and not self.bases.isdisjoint(lost))


class RemoteScrub:
    """Looks at the remote of one store."""

    def __init__(
        self,
        store: Store,
        remote: ObjectStore,
        copies: Copies,
        hydrator: Hydrator,
        pace: Pace,
        report: Report,
        *,
        repair: bool,
        republish: Callable[[Inode], None],
        bring: Callable[[Inode], Awaitable[None]],
    ) -> None:
        """*republish* is told of files that are to be published anew; *bring* fetches all of a file, or raises."""
        self._store = store
        self._remote = remote
        self._copies = copies
        self._content, self._learn_places = hydrator.content, hydrator.learn_places
        self._pace = pace
        self._report = report
        self._repair = repair
        self._republish = republish
        self._bring = bring
        self._packs = Packs(store.catalog)
        self._stock = Stock(store.catalog.db)
        self._mending = Mending(store.catalog)
        self._looked_at: set[ObjectId] = set()

    async def packs_of(self, files: Iterable[StockFile]) -> list[ObjectId]:
        """The packs that hold *files*, as far as those are published."""
        found: dict[ObjectId, None] = {}
        for file in files:
            if not file.published:
                continue
            try:
                content = await self._content(file.manifest)
                chunks = {chunk.id for chunk in content.chunks}
                if self._packs.known(chunks) != chunks:
                    await self._learn_places(file.manifest)
            except CkptfsError as error:
                self._found(f"manifest {file.manifest}", str(error), "the file cannot be read where it is not yet",
                            self._paths([file.ino]), state=LOST, repair="")  # fmt: skip
                continue
            found.update((at.pack, None) for at in self._packs.placed_with_bases(chunks).values())
        return list(found)

    # Packs

    async def look_at_pack(self, name: ObjectId, size: int) -> None:
        """Read one pack, check every chunk in it, and make it anew where it is damaged.

        Those with what its deltas are against come first where that cannot be had: it is their damage.
        """
        if name not in self._looked_at:
            self._looked_at.add(name)
            await self._unless_unreadable(pack_key(name), partial(self._look_at_pack, name, size))

    async def _look_at_pack(self, name: ObjectId, size: int) -> None:
        await self._pace.spend(size)
        known = self._packs.chunks(name)
        data, found = await self._examine(name, known)
        self._report.packs += 1
        self._report.remote_bytes += len(data or b"")
        self._pace.did(size)
        needed = {chunk.id for chunk in known}
        # Deltas that no file here needs may be against what nobody here knows: a checkpoint that was rotated away.
        bases = {chunk.base for chunk in known if chunk.base is not None} & found.baseless
        if found.is_sound and not bases:
            self._packs.verified(name)
            return
        places = self._packs.placed(bases)
        for pack in {at.pack for at in places.values()} - {name}:
            await self.look_at_pack(pack, 0)
        data, found = await self._examine(name, known)  # what came may have been damaged on its way
        found = found.without(bases - places.keys(), needed)
        if found.is_sound:
            return
        missed = {found.chunks[number].id for number in found.bad} if found.chunks else None
        bad = [chunk for chunk in known if missed is None or chunk.id in missed]  # others are looked for elsewhere
        users = await self._users({chunk.id for chunk in bad})
        key = pack_key(name)
        finding = self._found(
            key, found.why, "machines that do not have these bytes cannot read the files",
            self._paths(user.file.ino for user in users),
        )  # fmt: skip
        if not self._repair:
            finding.repair = "a scrub that repairs makes the pack anew from bytes that are here"
            return
        body = await pack_repair.rebuild(name, data, found, partial(self._raw, name))
        if body is not None:
            await self._put(key, body, replace=data is not None)
            await check_pack(name, await self._in_thread(partial(self._remote.get, key)), partial(self._raw, name))
            self._packs.verified(name)
            finding.state, finding.repair = REPAIRED, "the pack was made anew, byte for byte, and put again"
        else:
            await self._cannot_rebuild(name, finding, bad, users)

    async def _examine(
        self, name: ObjectId, known: tuple[PackedChunk, ...]
    ) -> tuple[bytes | None, pack_repair.Examined]:
        try:
            data: bytes | None = await self._in_thread(partial(self._remote.get, pack_key(name)))
        except ObjectMissing:
            data = None
        return data, await pack_repair.examine(name, data, known, partial(self._raw, name))

    async def _raw(self, name: ObjectId, chunk: ChunkId, length: int) -> Raw | None:
        return await self._copies.find(chunk, length, but_pack=name)

    async def _cannot_rebuild(
        self, pack: ObjectId, finding: Finding, bad: list[PackedChunk], users: list[_User]
    ) -> None:
        """Send what is here in other packs, and publish the files that need it anew; name those that stay lost."""
        if not users:  # whoever saves such bytes again sends them
            gone = [each.id for each in bad]
            self._mending.send_again(pack, gone, (), (), self._store.clock.tick(), is_doubted=False)
            finding.state, finding.repair = REPAIRED, "no file needs what is damaged; it is not looked for any more"
            return
        lost = {each.id for each in bad if await self._copies.local(each.id, each.raw_length) is None}
        if await self._brought([user for user in users if not user.is_whole and not user.lacks(lost)]):
            users = await self._users({chunk.id for chunk in bad})
        damaged = [user.file.ino for user in users if user.lacks(lost)]
        others = [user for user in users if not user.lacks(lost)]
        whole = [each.file.ino for each in others if each.file.ino is not None and each.is_whole]
        rest = [each for each in others if each.file.ino not in whole]
        held = frozenset[ChunkId]().union(*(each.own | each.bases for each in rest))
        if lost:
            finding.state, finding.paths = LOST, self._paths(damaged)
            finding.repair = f"{len(lost)} chunks in it are nowhere else"
        elif rest:
            finding.state, finding.paths = LOST, self._paths(each.file.ino for each in rest)
            finding.repair = (
                "the bytes are here, but the whole of these files cannot be: make room, prefetch them and scrub again"
            )
        else:
            finding.state = REPAIRED
            finding.repair = "its bytes are sent again in new packs, and the files published anew"
        # What files still look for there that cannot be published anew keeps its place, and the pack its doubt.
        here = [each.id for each in bad if each.id not in lost and each.id not in held]
        if whole and here:
            is_doubted = bool(lost or rest)
            tick = self._store.clock.tick()
            self._mending.send_again(pack, here, lost - held, whole, tick, is_doubted=is_doubted)
            for ino in whole:
                self._republish(ino)
        else:
            self._packs.doubt(pack)

    async def _brought(self, users: list[_User]) -> bool:
        """Have those files here, as far as they can be, so that they can be published anew; whether any came."""
        came = False
        for ino in (user.file.ino for user in users):
            if ino is None:
                continue
            try:
                await self._bring(ino)
                came = True
            except (CkptfsError, OSError) as error:
                log.info("inode %d cannot be published anew now: %s", ino, error)
        return came

    async def _users(self, chunks: set[ChunkId]) -> list[_User]:
        """Published files that need any of *chunks*."""
        users = []
        for file in self._stock.files(ROOT_INODE):
            if not file.published:
                continue
            try:
                content = await self._content(file.manifest)
            except CkptfsError:
                continue
            own = {chunk.id for chunk in content.chunks}
            bases = {at.base for at in self._packs.placed(own).values() if at.base is not None}
            if chunks & (own | bases):
                users.append(_User(file, frozenset(chunks & own), frozenset(chunks & bases)))
        return users

    # Small objects

    async def look_at_heads(self) -> None:
        """The newest head of every writer must be what the catalog has; another writer's may have been replaced."""
        for each in self._stock.heads():
            head = decode_head(open_object(each.body))
            key = head_key(head.writer, head.seq)
            await self._unless_unreadable(key, partial(self._look_at_head, key, each))

    async def _look_at_head(self, key: str, head: StockHead) -> None:
        there = await self._get(key)
        self._report.objects += 1
        if there == head.body or (there is None and not head.own):
            return
        finding = self._found(
            key, "it is gone" if there is None else "it is damaged",
            "other machines do not see the state that it published", ("/",),
        )  # fmt: skip
        await self._put_again(finding, key, head.body, there is not None)

    async def look_at_objects(self, top: Inode, only: Collection[ObjectId] | None = None) -> None:
        """Manifests and trees at or below *top* that are objects of their own; of those, *only* some."""

        def is_meant(digest: ObjectId) -> bool:
            return self._pace.chooses() if only is None else digest in only

        most = self._store.settings.tuning.tree_entries
        contents = self._store.contents
        for tree in self._stock.trees(top):
            if is_meant(tree.digest):
                make = partial(trees.tree_objects, self._stock, contents, tree, most)
                key, publish = tree_key(tree.digest), self._mending.publish_directory
                look = partial(self._look_at_object, key, tree.digest, tree.ino, "listed", make, publish)
                await self._unless_unreadable(key, look)
        for file in self._stock.files(top):
            if file.digest is not None and is_meant(file.digest):
                make = partial(trees.manifest_object, contents, self._packs, file.manifest, file.digest)
                key, anew = manifest_key(file.digest), self._mending.publish_file if file.whole else None
                look = partial(self._look_at_object, key, file.digest, file.ino, "read", make, anew)
                await self._unless_unreadable(key, look)

    async def _look_at_object(
        self,
        key: str,
        digest: ObjectId,
        ino: Inode | None,
        verb: str,
        make: Callable[[], dict[str, bytes] | None],
        anew: Callable[[Inode, Stamp], None] | None,
    ) -> None:
        """See that the object is sound, or *make* it, or have what it is of published *anew* where it was another."""
        why = await self._why_unsound(key, digest)
        self._report.objects += 1
        if not why or not (why := await self._why_unsound(key, digest)):
            return
        finding = self._found(key, why, f"machines that see it for the first time cannot have it {verb}",
                              self._paths([ino]))  # fmt: skip
        made = make()
        if made is None and (anew is None or ino is None):
            finding.state = LOST
            finding.repair = "what it said cannot be told from the catalog any more; changing it publishes it anew"
        elif not self._repair:
            finding.repair = "a scrub that repairs makes it anew from the catalog"
        elif made is not None:
            await self._put_made(made)
            finding.state, finding.repair = REPAIRED, "it was made anew from the catalog and put again"
        elif anew is not None and ino is not None:  # the atime of a file moved since, say
            anew(ino, self._store.clock.tick())
            self._republish(ino)
            finding.state, finding.repair = REPAIRED, "what the catalog says now is published anew"

    async def _put_made(self, made: Mapping[str, bytes]) -> None:
        for each, body in made.items():
            sealed = seal_object(body)
            there = await self._get(each)
            if there is None or not _opens(there, body):
                await self._put(each, sealed, replace=there is not None)

    async def _why_unsound(self, key: str, digest: ObjectId) -> str:
        """What is wrong with an object or, of a split tree, one of its parts; "" when nothing is."""
        data = await self._get(key)
        if data is None:
            return "it is gone"
        try:
            body = open_object(data, digest)
            if key == manifest_key(digest):
                decode_manifest(body)
                return ""
            tree = decode_tree(body)
        except FormatError as error:
            return f"it is damaged ({error})"
        for part in tree.parts if isinstance(tree, TreeParts) else ():
            why = await self._why_unsound(tree_key(part), part)
            if why:
                return f"its part {tree_key(part)}: {why}"
        return ""

    # Within

    async def _unless_unreadable(self, key: str, look: Callable[[], Awaitable[None]]) -> None:
        """*look* at an object; that it cannot be read is a finding, and no reason to look at no other.

        Raises RemoteError when the remote gives nothing else either.
        """
        try:
            await look()
        except RemoteError as error:
            await self._in_thread(partial(self._remote.get, FORMAT_KEY))
            why = f"it cannot be read ({error})"
            finding = self._found(key, why, "what needs it cannot be read on other machines", ())
            finding.repair = "find out why the remote does not give it, and scrub again"

    async def _put_again(self, finding: Finding, key: str, body: bytes, replace: bool) -> None:
        if not self._repair:
            finding.repair = "a scrub that repairs puts it again"
            return
        await self._put(key, body, replace=replace)
        finding.state, finding.repair = REPAIRED, "its bytes, which the catalog has, were put again"

    async def _put(self, key: str, body: bytes, *, replace: bool) -> None:
        """Raises RemoteError. What is replaced is damaged, and has the same name because it was the same."""
        try:
            await self._in_thread(partial(self._remote.put, key, body, if_absent=not replace))
        except ObjectExists:
            pass  # somebody else was faster
        log.warning("%s was put again", key)

    async def _get(self, key: str) -> bytes | None:
        try:
            return await self._in_thread(partial(self._remote.get, key))
        except ObjectMissing:
            return None

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)

    def _found(
        self, where: str, what: str, meaning: str, paths: tuple[str, ...], *, state: str | None = None, repair: str = ""
    ) -> Finding:
        finding = Finding(where, what, meaning, repair, paths=paths)
        if state is not None:
            finding.state = state
        self._report.findings.append(finding)
        self._pace.progress.found += 1
        log.error("%s: %s", where, what)
        return finding

    def _paths(self, inos: Iterable[Inode | None]) -> tuple[str, ...]:
        found = []
        for ino in inos:
            try:
                if ino is not None:
                    found.append(os.fsdecode(self._store.names.path(ino)))
            except CkptfsError:
                pass  # removed meanwhile
        return tuple(sorted(found))


def _opens(data: bytes, body: bytes) -> bool:
    try:
        return open_object(data) == body
    except FormatError:
        return False


