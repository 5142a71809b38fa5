"""One store's replication, wired together: settling, publishing, following, hydrating, logs.

Decides nothing itself: it passes what the file system did to those who must know, and what other writers did to the
file system. `run` holds the background tasks; everything else is called on the same event loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from stat import S_ISDIR
from typing import Protocol

import trio

from ckptfs.background.caller import Background
from ckptfs.errors import ContentUnavailable, NameMissing, RemoteError, RemoteUnusable
from ckptfs.ids import ChunkId, ImageId, Inode
from ckptfs.local.catalog.cuts import Cuts, Unneeded
from ckptfs.local.catalog.heads import Heads
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.catalog.totals import Pending, Totals
from ckptfs.local.images import Image
from ckptfs.local.room import Room
from ckptfs.local.store import Store
from ckptfs.replica import sets
from ckptfs.replica.bound import BoundStore
from ckptfs.replica.evict import Evictor
from ckptfs.replica.follow import Follower
from ckptfs.replica.hydrate import Hydrator
from ckptfs.replica.logs import LogSealer, OpenLog
from ckptfs.replica.merge import Merger
from ckptfs.replica.publish import Progress, Publisher
from ckptfs.replica.recording import Recorder
from ckptfs.replica.settle import Settler
from ckptfs.replica.tombstones import TombstoneCollector
from ckptfs.replica.verify import verify_packs
from ckptfs.steady import steadily, steadily_started

log = logging.getLogger(__name__)

_CATCH_UP_S = 10.0
"""How long a mount waits for what other writers did before it serves; the rest comes while it serves."""
_HALFWAY_S = 10.0
"""How long somebody who looks waits for the rest of a head that is being merged; its trees are here by then."""
_RECOGNISE_S = 1.0
"""How long somebody who asks what is safe waits for the remote to say which one it is."""
_NEWS_S = 0.5
"""... and then for what others published meanwhile."""
_LOOK_EVERY_S = 0.5
_SETS_LOOKED_AT = 1000


class Files(Protocol):
    """What replication asks of the file system."""

    def open_logs(self) -> list[OpenLog]: ...
    def forget_writes(self, ino: Inode) -> None: ...
    def is_changing(self, ino: Inode) -> bool: ...
    def is_open(self, ino: Inode) -> bool: ...
    def is_saving(self) -> bool: ...
    def content_replaced(self, ino: Inode) -> None: ...
    def purge_if_gone(self, ino: Inode) -> None: ...
    def release_image(self, image: ImageId) -> None: ...
    def sparse_images(self) -> list[Image]: ...


class Replica:
    """See the module. A `ChangeListener` and `TreeSource` of the file system."""

    def __init__(
        self,
        store: Store,
        remote: BoundStore,
        *,
        files: Callable[[], Files],
        reseal: Callable[[ImageId], None],
        hurry: Callable[[], None] = lambda: None,
        background: Background | None = None,
        read_only: bool = False,
    ) -> None:
        self._store = store
        self._remote = remote
        self._recognising = trio.CapacityLimiter(1)
        self._unlisted: dict[Inode, str] = {}
        self._unanswered: str | None = None
        """Why the remote did not say which one it is when somebody asked last; None when it did."""
        self.files = files
        self._hurry = hurry
        self.read_only = read_only
        self.cuts, heads, self.packs = Cuts(store.catalog), Heads(store.catalog), Packs(store.catalog)
        self._totals = Totals(store.catalog)
        self.logs = LogSealer(store, lambda: files().open_logs())
        self.settler = Settler(
            store,
            self.cuts,
            heads,
            provisional=self.logs.provisional,
            released=self._released,
            wake=self._cut_taken,
            merging=lambda: self.merger.is_halfway,
        )
        self.publisher = Publisher(
            store,
            remote,
            cuts=self.cuts,
            heads=heads,
            packs=self.packs,
            cut_now=self.settler.cut_now,
            reseal=reseal,
            released=self._released,
            background=background,
        )
        self.publisher.on_abandoned = self.settler.load
        tuning = store.settings.tuned
        read_timeout_s = store.settings.read_timeout_s
        self.merger = Merger(store.catalog, store.clock, remote, _MergeNews(self), tuning, read_timeout_s)
        self.follower = Follower(
            store.catalog, remote, self.merger, writer=lambda: store.writer, lag_s=store.settings.lag_s
        )
        self.tombstones = TombstoneCollector(store, self.follower)
        self.room = Room(store.path, lambda: files().is_saving())
        self.hydrator = Hydrator(store.catalog, store.images, remote, tuning, self.room, read_timeout_s=read_timeout_s)
        self.doubts = self.hydrator.fetcher.doubts
        self.recorder = Recorder(self.hydrator, lambda: files().sparse_images())
        self.evictor = Evictor(
            store,
            remote,
            self.room,
            content=self.hydrator.content,
            is_open=lambda ino: files().is_open(ino),
            holds=self.logs.holds,
            let_go=self.recorder.let_go,
            missed=self.doubts.missed,
            newest_set=self._newest_safe_files,
            after_s=store.settings.evict_after_s,
        )
        self.on_remote_change: Callable[[Inode], None] = lambda ino: None
        """Called with a file whose bytes, or a directory of which a name, another writer changed."""
        self.logs.on_sealed = lambda ino, unchanged: self.settler.sealed(ino, provisional=True, unchanged=unchanged)
        self.logs.forget_writes = lambda ino: files().forget_writes(ino)
        self.logs.release = self.release_image

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Started once what other writers did is merged, or the remote did not say in time."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(steadily_started, self.follower.run)
                await nursery.start(steadily_started, self.hydrator.run)
                await self.follower.catch_up(_CATCH_UP_S)
                nursery.start_soon(steadily, self.recorder.run)
                if not self.read_only:
                    for task in (
                        self.settler.run, self.publisher.run, self.logs.run, self.tombstones.run, self.evictor.run
                    ):  # fmt: skip
                        nursery.start_soon(steadily, task)
                task_status.started()
        finally:
            with trio.CancelScope(shield=True):
                await self.recorder.finish()

    # What the file system did (ChangeListener)

    def entry_changed(self, parent: Inode, name: bytes, *, renamed: bool = False) -> None:
        self.settler.entry_changed(parent, name, renamed=renamed)

    def writing(self, ino: Inode, new: bool) -> None:
        self.settler.writing(ino, new)

    def grew(self, ino: Inode) -> None:
        self.settler.grew(ino)

    def closed(self, ino: Inode) -> None:
        self.logs.closed(ino)
        self.settler.closed(ino)

    def attributes_changed(self, ino: Inode) -> None:
        self.settler.attributes_changed(ino)

    def sealed(self, ino: Inode | None, *, late: bool) -> None:
        """A closed file, or one that only a cut has, was sealed; *late*: a cut may have been published without it."""
        self.settler.sealed(ino, late=late)

    def seal_failed(self, image: ImageId) -> None:
        """*image* cannot be read: what waits for it is published without it."""
        self.cuts.leave_out(image)
        self.publisher.wake()

    # What the file system asks (TreeSource)

    async def expand(self, directory: Inode) -> None:
        try:
            await self.merger.expand(directory)
        except ContentUnavailable as error:
            if error.is_damage:
                self._unlisted[directory] = str(error)
            raise

    async def fresh(self, *, waiting: bool) -> None:
        await self.follower.fresh(waiting=waiting)
        with trio.move_on_after(_HALFWAY_S):
            await self.merger.whole()

    def unknown(self) -> str | None:
        """Why nothing is known of what the remote holds; None when something is, or nobody failed to find out."""
        error = self.follower.last_error
        return error if error is not None and self.follower.knows_nothing else None

    # Waiting and telling

    def cut_now(self) -> None:
        """Take a cut of everything that is whole now, and publish it without delay."""
        if not self.read_only and not self.merger.is_halfway:
            self.settler.cut_now()
            self.publisher.retry_now()

    async def publish_now(self) -> None:
        """As `Publisher.publish_now`. Raises RemoteUnusable when what answers is not this store's remote."""
        await self.merger.whole()
        await self._unless_wrong(self.publisher.publish_now)

    async def drained(self) -> None:
        """Cut at once; returns when every cut is published. Raises as `publish_now`."""
        if not self.read_only:
            await self.merger.whole()
            self.settler.cut_now()
            await self._unless_wrong(self.publisher.drained)

    @property
    def seems_wrong(self) -> bool:
        """Whether what answered last was not this store's remote."""
        return self._remote.wrong is not None

    async def wrong(self) -> str | None:
        """Why what answers now, or answered last, is not this store's remote; None when it is.

        Finding that it answers ends what was told of an outage that is over.
        """
        unanswered: str | None = f"{self.url}: no answer within {_RECOGNISE_S:.0f} s"
        with trio.move_on_after(_RECOGNISE_S):
            try:
                await trio.to_thread.run_sync(self._remote.recognise, limiter=self._recognising, abandon_on_cancel=True)
                unanswered = None
            except RemoteError as error:
                unanswered = str(error)
        self._unanswered = unanswered
        if unanswered is None:
            self.hydrator.forget_error()
            if self.follower.failing:
                await self.follower.catch_up(_NEWS_S)
        return None if self._remote.wrong is None else str(self._remote.wrong)

    async def refusal(self) -> str | None:
        """Why the remote gives and takes nothing now; None when it does."""
        return await self.wrong() or self._unanswered

    async def demand_right(self) -> None:
        """Raises RemoteUnusable when what answers is not this store's remote: nobody need wait for it."""
        wrong = await self.wrong()
        if wrong is not None:
            raise RemoteUnusable(wrong)

    async def _unless_wrong(self, work: Callable[[], Awaitable[None]]) -> None:
        await self.demand_right()
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while not self.seems_wrong:
                    await trio.sleep(_LOOK_EVERY_S)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await work()
            nursery.cancel_scope.cancel()
        await self.demand_right()

    async def verify(self, manifests: Iterable[int]) -> None:
        """Re-read those packs of *manifests* that the remote's own checksum did not verify. Raises RemoteError."""
        names = self.packs.unverified_of(await self._chunks(manifests))
        await verify_packs(self._remote, self.packs, names, self.hydrator.fetcher.raw, self.doubts.missed)

    async def is_verified(self, manifests: Iterable[int]) -> bool:
        """Whether every pack that holds a chunk of *manifests* was verified. Never waits for the remote.

        A manifest that was not fetched yet, or that cannot be read, was not.
        """
        if not self.packs.any_unverified():  # so it is where the store compares checksums, and is asked often
            return True
        chunks = await self._chunks_here(manifests)
        return chunks is not None and not self.packs.unverified_of(chunks)

    def unlisted(self) -> dict[Inode, str]:
        """Directories that nobody could look into, since the remote has not what it should, and why."""
        for directory in list(self._unlisted):
            try:
                is_unknown = not self._store.names.inode(directory).expanded
            except NameMissing:
                is_unknown = False
            if not is_unknown:
                del self._unlisted[directory]
        return dict(self._unlisted)

    async def is_missed(self, ino: Inode, manifests: Collection[int]) -> bool:
        """Whether somebody did not find on the remote what is at or below *ino*: the tree of a directory, one of its
        *manifests*, or a chunk of them. Never waits for it."""
        return self._is_unread(ino, manifests) or bool(await self._missed_chunks(manifests))

    async def demand_mendable(self, ino: Inode, manifests: Collection[int]) -> None:
        """Raises RemoteError when what was missed on the remote of what is at or below *ino* is not on this disk."""
        missed = await self._missed_chunks(manifests)
        lost = missed - self._store.contents.located(missed, besides=None)
        if lost or self._is_unread(ino, manifests):
            raise RemoteError(
                f"{self.url}: some of its bytes are not on the remote any more, and not on this disk: `ckptfs status` "
                "names the objects, and `ckptfs scrub --remote` on a machine that has the bytes mends them"
            )

    def progress(self) -> Progress:
        return self.publisher.progress()

    @property
    def url(self) -> str:
        return self._remote.url

    @property
    def last_success_s(self) -> float | None:
        """When the remote last acknowledged a head, or last answered a reader; seconds since 1970."""
        times = (self.publisher.last_success_s, self.follower.last_success_s)
        return max((each for each in times if each is not None), default=None)

    @property
    def last_error(self) -> str | None:
        """What failed last and was not done since: publishing, following, reading, or asking which remote it is."""
        return self.publisher.last_error or self.follower.last_error or self.hydrator.last_error or self._unanswered

    @property
    def remote_bytes(self) -> int:
        """Encoded bytes on the remote that this store knows of."""
        return self.packs.stored_bytes()

    def sets_at_risk(self, pending: Iterable[Pending]) -> list[dict[str, object]]:
        """The directories with names that are not replicated, oldest first; of recognised sets only, if there are any.

        Each with its path, its kind (None when it is no set), and what an incomplete one is waiting for, if that is
        known.
        """
        found: dict[Inode, sets.Verdict] = {}
        for each in pending:
            directory = each.ino if S_ISDIR(each.mode) else each.parent
            if directory not in found:
                found[directory] = self._verdict(directory)
        ordered = sorted(found)
        return [
            {
                "path": self._text(ino),
                "kind": verdict.kind,
                "complete": verdict.complete,
                "missing": None if verdict.missing is None else os.fsdecode(verdict.missing),
            }
            for ino in [ino for ino in ordered if found[ino].kind is not None] or ordered
            for verdict in [found[ino]]
        ]

    @property
    def damaged(self) -> list[dict[str, object]]:
        """What on the remote readers missed; see `Doubts.told`."""
        trees = self.unlisted().items()
        return self.doubts.told() + [
            {"object": f"the tree of {self._text(ino)}", "why": why, "here": False} for ino, why in trees
        ]

    async def newest_safe_set(self) -> dict[str, object] | None:
        """The newest directory with files that is not an incomplete set, and of which everything is replicated and
        nothing damaged, as far as is known. Never waits for the remote."""
        is_damaged = bool(self.packs.doubted() or self.doubts.manifests())
        unlisted = self.unlisted().keys()
        for ino, mtime_ns in self._safe_sets():
            if ino in unlisted:
                continue
            if is_damaged:
                chunks = await self._chunks_here(self._totals.manifests_under(ino))
                if chunks is None or self.packs.doubtful(chunks):
                    continue
            return {"path": self._text(ino), "at": mtime_ns / 1e9}
        return None

    def take_credentials(self, env: Mapping[str, str]) -> None:
        """Use these AWS_* variables from now on. Raises RemoteError when they make no sense."""
        self._remote.refresh_credentials(env)
        self.publisher.retry_now()

    # Within

    def _safe_sets(self) -> Iterator[tuple[Inode, int]]:
        """Complete directories of which everything is replicated, newest first, with their mtimes in ns."""
        for ino, mtime_ns in self._totals.newest_directories(_SETS_LOOKED_AT):
            if self._verdict(ino).complete and not self._totals.pending_under(ino, limit=1):
                yield ino, mtime_ns

    def _newest_safe_files(self) -> set[Inode]:
        newest = next(self._safe_sets(), None)
        return set() if newest is None else self._totals.files_under(newest[0])

    def _verdict(self, directory: Inode) -> sets.Verdict:
        """What a directory is, by the names in it."""
        names = self._store.names
        found = names.parents(directory)
        if not found:
            return sets.UNRECOGNISED
        children = {name for name, _ in names.entries(directory)}
        return sets.judge(found[0][1], children, lambda name: None, lambda name: None)

    def _text(self, ino: Inode) -> str:
        return self._store.names.path(ino).decode(errors="surrogateescape")

    async def _chunks(self, manifests: Iterable[int]) -> list[ChunkId]:
        chunks: dict[ChunkId, None] = {}
        for manifest in manifests:
            content = await self.hydrator.content(manifest)
            chunks.update((chunk.id, None) for chunk in content.chunks)
        return list(chunks)

    async def _chunks_here(self, manifests: Iterable[int]) -> list[ChunkId] | None:
        """The same; None when a manifest was not fetched yet, or cannot be read."""
        wanted = list(manifests)
        if not all(map(self._is_here, wanted)):
            return None
        try:
            return await self._chunks(wanted)
        except ContentUnavailable:
            return None

    def _is_unread(self, ino: Inode, manifests: Collection[int]) -> bool:
        """Whether the tree of a directory at or below *ino*, or one of *manifests*, could not be had."""
        if any(ino in (each, *self._store.names.ancestors(each)) for each in self.unlisted()):
            return True
        return not set(manifests).isdisjoint(self.doubts.manifests())

    async def _missed_chunks(self, manifests: Iterable[int]) -> set[ChunkId]:
        """Those that a reader did not find; of a manifest that was not fetched yet nobody read any."""
        found: set[ChunkId] = set()
        if self.packs.doubted():
            for manifest in filter(self._is_here, manifests):
                with suppress(ContentUnavailable):
                    found |= self.packs.doubtful(await self._chunks([manifest]))
        return found

    def _is_here(self, manifest: int) -> bool:
        if not self._store.contents.has_manifest(manifest):  # removed meanwhile
            return False
        row = self._store.contents.manifest(manifest)
        return row.body is not None or row.remote_body is not None

    def _cut_taken(self) -> None:
        self._hurry()  # where small files come without end, it would be replaced before it is sealed, again and again
        self.publisher.wake()

    def _released(self, unneeded: Unneeded) -> None:
        for image in unneeded.images:
            self.release_image(image)
        self._store.contents.drop_unneeded_manifests(unneeded.manifests)

    def release_image(self, image: ImageId) -> None:
        """Drop *image* if nothing needs it."""
        if not self.logs.holds(image):
            self.files().release_image(image)


class _MergeNews:
    """What merging did, passed on; a `MergeListener`."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def changed(self, parent: Inode | None, name: bytes | None, ino: Inode | None, content: bool) -> None:
        if parent is not None:
            self._replica.on_remote_change(parent)
        if ino is not None and content:
            self._replica.files().content_replaced(ino)
            self._replica.on_remote_change(ino)

    def pending(self, directory: Inode, name: bytes) -> None:
        if not self._replica.read_only:
            self._replica.entry_changed(directory, name)

    def unnamed(self, ino: Inode) -> None:
        self._replica.files().purge_if_gone(ino)

    def unneeded(self, image: ImageId) -> None:
        self._replica.release_image(image)

    def writing(self, ino: Inode) -> bool:
        return self._replica.files().is_changing(ino)
