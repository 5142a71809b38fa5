"""Everything behind a mount, started and stopped together: the file system, sealing, syncing, replication.

Knows no kernel and no command line. One `Engine` per open store; `run` holds the background tasks; everything else is
called on the same event loop.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import trio

from ckptfs.background.caller import Worker
from ckptfs.config import NEVER_S
from ckptfs.errors import ContentUnavailable, FileSystemError, RemoteError, RemoteUnusable
from ckptfs.filesystem import FileSystem
from ckptfs.ids import ROOT_INODE, ImageId, Inode, ObjectId, stamp_time_s
from ckptfs.local.catalog.totals import Totals
from ckptfs.local.room import Room
from ckptfs.local.store import Store
from ckptfs.prefetching import Fetching, prefetch
from ckptfs.reclaiming import Reclaimer
from ckptfs.remote.offline import OfflineStore
from ckptfs.repair.findings import Report
from ckptfs.repair.healing import heal
from ckptfs.repair.pace import Scrubbing
from ckptfs.repair.scrub import Scrub, ScrubOptions
from ckptfs.replica.bound import BoundStore
from ckptfs.replica.hydrate import Hydrator
from ckptfs.replica.publish import Progress
from ckptfs.replica.recording import Recorder
from ckptfs.replica.replica import Replica
from ckptfs.replica.seal import Sealer
from ckptfs.siblings import Siblings
from ckptfs.steady import steadily, steadily_started

log = logging.getLogger(__name__)

STATES = ("writing", "closed", "sealed", "replicated", "verified")
"""In order; a directory has the least of what is under it."""

_LEARNED_AT_ONCE = 8
"""Directories and chunk lists on their way at once."""

_CHECKPOINT_WAL_BYTES = 16 << 20
"""The catalog's log is moved into the database from this length on; on a small disk earlier ..."""
_CHECKPOINT_S, _CHECKPOINT_FULL_S = 5.0, 1.0
"""... so often looked at, and so often when room on the disk is short."""


def pending_parts(progress: Progress) -> dict[str, int]:
    """What is pending, as status documents have it."""
    return {
        "files": progress.pending_files,
        "changes": progress.pending_changes,
        "bytes": progress.pending_bytes,
    }


class Engine:
    """See the module. *remote* None is a local store alone."""

    def __init__(
        self,
        store: Store,
        remote: BoundStore | None,
        *,
        read_only: bool = False,
    ) -> None:
        self._store = store
        self._remote = remote
        self._totals = Totals(store.catalog)
        self._changed = trio.Event()
        self._background = Worker()
        replica = self.replica = (
            Replica(
                store,
                remote,
                files=lambda: self.filesystem,
                reseal=lambda image: self.sealer.submit(image),
                hurry=lambda: self.sealer.hurry(),
                background=self._background,
                read_only=read_only,
            )
            if remote is not None
            else None
        )
        hydrator, recorder = (replica.hydrator, replica.recorder) if replica else self._local_bytes()
        self._hydrator, self._recorder = hydrator, recorder
        self.filesystem = FileSystem(
            store,
            listener=replica,
            source=hydrator,
            tree=replica,
            space=replica.evictor if replica else None,
            read_only=read_only,
        )
        self.sealer = Sealer(store, self.filesystem.files, self._background)
        self.sealer.on_sealed = self._sealed
        self.filesystem.files.on_closed = self.sealer.submit
        self.filesystem.files.on_idle = recorder.idle
        self.filesystem.files.on_reopen = recorder.reopen
        self._reclaimer: Reclaimer | None = None
        after_s = store.settings.reclaim_after_s
        if after_s != NEVER_S and not read_only:
            self._reclaimer = Reclaimer(
                store,
                self.filesystem.files,
                after_s=after_s,
                published=replica is not None,
                holds=lambda image: recorder.holds(image) or (replica is not None and replica.logs.holds(image)),
            )
        self._siblings = Siblings(store, self.filesystem.files, replica.hydrator) if replica else None
        if replica and self._siblings:
            self.filesystem.files.on_cold_read = self._siblings.read
            self.filesystem.files.on_opened = self._siblings.opened
            self.filesystem.files.on_full = replica.evictor.make_room
            self.sealer.on_failed = replica.seal_failed
            replica.publisher.on_published = self._wake

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Background services until cancelled; then whatever was written is flushed."""
        try:
            self.filesystem.files.presume_held()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(steadily, self._background.run)
                nursery.start_soon(steadily, self.filesystem.files.held.run)
                nursery.start_soon(steadily, self._store.sync.run, self._store.settings.tuning.sync_every_s)
                nursery.start_soon(steadily, self._checkpoints)
                nursery.start_soon(steadily, self.sealer.run)
                if self.replica and self._siblings:
                    await nursery.start(self.replica.run)
                    nursery.start_soon(steadily, self._siblings.run)
                    nursery.start_soon(steadily, self._heal, self.replica)
                else:
                    await nursery.start(steadily_started, self._hydrator.run)
                    nursery.start_soon(steadily, self._recorder.run)
                if self._reclaimer:
                    nursery.start_soon(steadily, self._reclaimer.run)
                task_status.started()
        finally:
            with trio.CancelScope(shield=True):
                await self._recorder.finish()
                await self.filesystem.files.finish()
                await self._store.sync.flush()

    # Waiting

    async def wait(self, path: bytes, target: str, timeout_s: float | None) -> bool:
        """Whether everything under *path* reached *target* in time. Raises NameMissing, InvalidArgument.

        Waiting for more than sealed publishes at once, and raises RemoteUnusable when what answers is not the remote
        that the store is bound to, RemoteError when all is replicated but what the remote lost and is not here either.
        """
        ino = await self._resolve(path)
        wanted = STATES.index(target)
        if self.replica is None and wanted > STATES.index("sealed"):
            raise RemoteError("this mount has no remote to replicate to: mount with --remote")
        replica = self.replica if wanted > STATES.index("sealed") else None
        first = True
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
            while True:
                changed = self._changed
                state = await self.state_of(ino)
                if replica and state == "replicated" and target == "verified":
                    state = await self._verified(replica, ino)
                reached = STATES.index(state) >= wanted
                if replica and (reached or first or replica.seems_wrong):
                    await replica.demand_right()
                if reached:
                    return True
                if replica and state == "sealed" and not self._totals.pending_under(ino, limit=1):
                    await replica.demand_mendable(ino, self._totals.manifests_under(ino))
                self.sealer.hurry()
                # Once, and again only when nothing is on its way: others' checkpoints are cut along, whole or not.
                if replica and state != "writing" and (first or replica.publisher.is_drained):
                    replica.cut_now()
                    first = False
                with trio.move_on_after(1.0):  # a change may come without an event (another writer's head)
                    await changed.wait()
        return False

    async def _verified(self, replica: Replica, ino: Inode) -> str:
        try:
            await replica.verify(self._totals.manifests_under(ino))
        except (ContentUnavailable, RemoteError) as error:
            log.info("verifying waits: %s", error)
        return await self.state_of(ino)

    async def prefetch(self, path: bytes, progress: Fetching) -> None:
        """Bring every file under *path* to this disk. Raises NameMissing, ContentUnavailable, StoreFull, OSError."""
        room = self.replica.room if self.replica else Room(self._store.path)
        await prefetch(self.filesystem, await self._resolve(path), room, progress)

    async def scrub(self, path: bytes, options: ScrubOptions, progress: Scrubbing) -> Report:
        """Read everything at or below *path* again and mend it; see `ckptfs.repair.scrub`. Raises NameMissing too."""
        ino = await self._resolve(path)
        work = Scrub(self._store, self.filesystem, self.replica, self._remote, options, progress)
        return await work.run(ino)

    async def learn(self, directories: Iterable[Inode], manifests: Iterable[int]) -> tuple[list[str], bool]:
        """Have in the catalog what only the remote knows: names in *directories*, chunk lists of *manifests*.

        Returns why what could not be had is not there, and whether it was not worth going on: the remote is down. What
        was removed meanwhile is passed over.
        """
        failures: list[str] = []
        names = [partial(self.filesystem.entries, each) for each in directories]
        lists = [partial(self._learn_manifest, each) for each in manifests]
        left: Iterator[Callable[[], Awaitable[object]]] = iter([*names, *lists])
        stopped = False

        async def work() -> None:
            nonlocal stopped
            for look_up in left:
                try:
                    await look_up()
                except ContentUnavailable as error:
                    failures.append(str(error))
                    cause = error.__cause__
                    stopped |= isinstance(cause, trio.TooSlowError) or getattr(cause, "temporary", False)
                except FileSystemError:
                    continue
                if stopped:
                    return

        async with trio.open_nursery() as nursery:
            for _ in range(_LEARNED_AT_ONCE):
                nursery.start_soon(work)
        return failures, stopped

    def _local_bytes(self) -> tuple[Hydrator, Recorder]:
        """Without a remote: what a file gave up comes from other images of this disk."""
        store = self._store
        nowhere = OfflineStore("this store", "the bytes are not on this disk: mount with --remote to read them")
        room = Room(store.path, lambda: self.filesystem.is_saving())
        tuning, timeout_s = store.settings.tuned, store.settings.read_timeout_s
        hydrator = Hydrator(store.catalog, store.images, nowhere, tuning, room, read_timeout_s=timeout_s)
        return hydrator, Recorder(hydrator, lambda: self.filesystem.sparse_images())

    async def _learn_manifest(self, manifest: int) -> None:
        if self.replica and self._store.contents.has_manifest(manifest):
            await self.replica.hydrator.content(manifest)

    async def mend(self, images: Collection[ImageId], objects: Collection[ObjectId], progress: Scrubbing) -> Report:
        """Seal what is not sealed, and mend these images and remote objects, in a store that nobody has mounted."""
        options = ScrubOptions(alone=True)
        await self._all_sealed()
        work = Scrub(self._store, self.filesystem, self.replica, self._remote, options, progress)
        return await work.mend(images, objects)

    async def publish(self, path: bytes = b"/") -> list[bytes]:
        """Cut at once; returns when the head with it is acknowledged: the paths under *path* that are not in it.

        They are of files that are open for writing.
        """
        ino = await self._resolve(path)
        if self.replica is None:
            raise RemoteError("this mount has no remote to publish to: mount with --remote")
        await self._all_sealed()
        await self.replica.publish_now()
        left = {each.ino for each in self._totals.pending_under(ino) if self.filesystem.is_changing(each.ino)}
        return sorted(self._store.names.path(each) for each in left)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Somebody waits for what is published in this block: it takes the processor, and no pause after failures."""
        if self.replica:
            self.replica.publisher.retry_now()
        with self._background.urgent():
            yield

    async def drain(self, deadline_s: float | None) -> bool:
        """Seal and publish what there is, now; whether nothing is pending when it returns."""
        with self._background.urgent(), trio.move_on_after(float("inf") if deadline_s is None else deadline_s):
            await self._all_sealed()
            if self.replica:
                try:
                    await self.replica.drained()
                except RemoteUnusable as error:
                    log.error("not waiting for uploads: %s", error)
        return self.progress().is_clear

    async def _all_sealed(self) -> None:
        self.filesystem.files.held.look()  # who let go this instant has finished its file
        while not self.sealer.idle:
            self.sealer.hurry()
            changed = self._changed
            with trio.move_on_after(0.2):
                await changed.wait()

    # Telling

    @property
    def reading_error(self) -> str | None:
        """Why bytes from the remote do not come just now; None while they do."""
        return self.replica.hydrator.last_error if self.replica else None

    def writers_open(self) -> int:
        """How many files are open for writing."""
        return sum(1 for file in self.filesystem.files.files() if file.writers or file.held)

    def progress(self) -> Progress:
        """What is pending now."""
        if self.replica is None:
            return Progress(0, 0, 0, 0.0, None, None)
        names, changes = self._totals.names_pending()
        progress, grown = self.replica.progress(), self._grown_logs()
        return dataclasses.replace(
            progress,
            pending_files=names + len(grown),
            pending_bytes=progress.pending_bytes + sum(grown),
            pending_changes=changes,
        )

    def _grown_logs(self) -> list[int]:
        """Bytes by which each open log, of which the remote has what was sealed, has grown since."""
        grown = []
        for each in self.filesystem.open_logs():
            if each.lowest_write is None or self._totals.pending_under(each.ino, limit=1):
                continue  # nothing new, or counted as a pending file already
            sealed = self.replica.logs.provisional(each.ino) if self.replica else None
            try:
                size = self._store.images.status(each.image).st_size
            except FileNotFoundError:
                continue
            grown.append(max(0, size - sealed.size) if sealed else size)
        return grown

    async def state(self, path: bytes) -> str:
        """writing, closed, sealed, replicated or verified: the least of what is under *path*. Raises NameMissing."""
        return await self.state_of(await self._resolve(path))

    async def state_of(self, ino: Inode) -> str:
        """As `state`, by inode."""
        unsealed = self._totals.unsealed_under(ino)
        if unsealed:
            being_written = any(
                file.modified for each in unsealed for file in (self.filesystem.files.get(each),) if file is not None
            )
            return "writing" if being_written else "closed"
        if self.replica is None or self._totals.pending_under(ino, limit=1) or self._totals.removals_under(ino):
            return "sealed"
        manifests = self._totals.manifests_under(ino)
        if await self.replica.is_missed(ino, manifests):
            return "sealed"
        return "verified" if await self.replica.is_verified(manifests) else "replicated"

    async def status(self, path: bytes = b"/") -> dict[str, Any]:
        """The status document; see docs. Everything in it can be written as JSON. Raises NameMissing."""
        ino = await self._resolve(path)
        wrong = await self.replica.wrong() if self.replica else None
        progress = self.progress()
        document: dict[str, Any] = {
            "path": path.decode(errors="surrogateescape"),
            "state": await self.state_of(ino),
            "pending": pending_parts(progress),
            "remote": None,
            "writer": self._store.writer.hex(),
            "safe": self.replica is not None and progress.is_clear and wrong is None,
            "remote_wrong": wrong,
            "damaged": [],
            "last_error": wrong,
            "saves": self._saves(ino),
        }
        logical = self._logical_bytes()
        stored = self._stored_bytes()
        if self.replica is None:
            document |= {
                "at_risk": {"files": None, "bytes": logical, "eta_s": None, "sets": []},
                "newest_safe_set": None,
                "oldest_pending_at_s": None,
                "last_success_at_s": None,
                "bytes": {"logical": logical, "stored": stored, "on_remote": 0},
            }
            return document
        since = self._totals.pending_since()
        sets = self.replica.sets_at_risk([each for each in self._totals.pending_under(ROOT_INODE)])
        damaged = self.replica.damaged
        document |= {
            "remote": self.replica.url,
            "safe": document["safe"] and not any(each["here"] for each in damaged),
            "damaged": damaged,
            "at_risk": {
                "files": progress.pending_files,
                "bytes": progress.pending_bytes,
                "eta_s": progress.eta_s,
                "sets": sets,
            },
            "newest_safe_set": await self.replica.newest_safe_set() if wrong is None else None,
            "oldest_pending_at_s": None if since is None else stamp_time_s(since),
            "last_success_at_s": self.replica.last_success_s,
            "last_error": wrong or self.replica.last_error,
            "bytes": {"logical": logical, "stored": stored, "on_remote": self.replica.remote_bytes},
        }
        return document

    def _saves(self, ino: Inode) -> dict[str, Any]:
        """How long programs waited for us while they saved what is under *ino*."""
        blocked = self.filesystem.saves.of(self._totals.files_under(ino))
        return {"files": blocked.files, "blocked_s": blocked.seconds, "longest_s": blocked.longest_s}

    async def take_credentials(self, env: Mapping[str, str]) -> str | None:
        """Use another shell's AWS_* variables from now on. Returns why the remote does not take them, None if it does.

        Raises RemoteError when they make no sense.
        """
        if self.replica is None:
            return None
        self.replica.take_credentials(env)
        return await self.replica.refusal()

    # Within

    async def _heal(self, replica: Replica) -> None:
        async def mend_pack(name: ObjectId) -> None:
            work = Scrub(self._store, self.filesystem, replica, self._remote, ScrubOptions(), Scrubbing())
            await work.mend_pack(name)

        async with trio.open_nursery() as nursery:
            every_s = self._store.settings.tuned.retry_most_s
            nursery.start_soon(heal, replica.doubts.doubted, mend_pack, every_s)
            nursery.start_soon(heal, replica.doubts.manifests, self._learn_manifest, every_s)
            nursery.start_soon(heal, replica.unlisted, replica.expand, every_s)

    async def _resolve(self, path: bytes) -> Inode:
        ino = ROOT_INODE
        for name in path.split(b"/"):
            if name:
                ino = (await self.filesystem.lookup(ino, name)).ino
        return ino

    def _logical_bytes(self) -> int:
        """Sizes of all regular files that have a name."""
        return self._totals.sealed_bytes() + sum(each.st_size for each in self._statuses(self._totals.unsealed()))

    def _stored_bytes(self) -> int:
        return sum(each.st_blocks * 512 for each in self._statuses(self._store.contents.images()))

    def _statuses(self, images: Iterable[ImageId]) -> Iterator[os.stat_result]:
        for image in images:
            with suppress(FileNotFoundError):  # deleted meanwhile
                yield self._store.images.status(image)

    def _sealed(self, ino: Inode | None, image: ImageId, manifest: int) -> None:
        if self.replica:
            self.replica.sealed(ino, late=image in self._store.unreadable)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _checkpoints(self) -> None:
        """Keep the WAL short, in a thread, since that syncs the database file; and the ballast full."""
        catalog, ballast = self._store.catalog, self._store.ballast
        while True:
            await trio.sleep(_CHECKPOINT_S if ballast.is_full else _CHECKPOINT_FULL_S)
            if catalog.wal_bytes() > min(_CHECKPOINT_WAL_BYTES, ballast.full_bytes // 2):
                try:
                    catalog.grow()
                    await trio.to_thread.run_sync(catalog.checkpoint)
                except OSError as error:
                    log.warning("the catalog's log stays long for now: %s", error)  # a full disk; when there is room
            ballast.take()
