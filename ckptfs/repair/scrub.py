"""Scrub: read everything again that a store has, here and on its remote, and mend what can be mended.

A scrub is one task on the event loop beside everything else that a mount does. Cancelling it, or killing the process,
leaves what was mended and nothing half done.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from ckptfs.errors import CkptfsError, ContentUnavailable, RemoteError
from ckptfs.filesystem import FileSystem
from ckptfs.ids import ROOT_INODE, ImageId, Inode, ObjectId
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.catalog.stock import Stock, StockFile
from ckptfs.local.store import Store
from ckptfs.prefetching import Fetching, prefetch
from ckptfs.remote.base import ObjectStore
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.repair.copies import Copies
from ckptfs.repair.findings import LOST, Finding, Report
from ckptfs.repair.images import ImageScrub
from ckptfs.repair.pace import Pace, Scrubbing
from ckptfs.repair.remote import RemoteScrub
from ckptfs.replica.replica import Replica

_LIMITS = Limits(attempts=4, deadline_s=60.0)
"""Of each request: somebody waits, and a remote that is away is no damage."""


@dataclass(frozen=True)
class ScrubOptions:
    """What is looked at, and how."""

    remote: bool = False
    """Also what the remote has; else it is only asked for what is to be mended here."""
    sample: float = 1.0
    """The share of chunks, packs and objects that is looked at."""
    rate_bytes_s: float | None = None
    """At most so many bytes a second are read; None: as fast as it goes."""
    repair: bool = True
    """Mend; else only tell."""
    alone: bool = False
    """Nobody has the store mounted: what is to be published anew waits for the next mount."""


class Scrub:
    """One scrub of one store: what looks at images and at the remote, wired together."""

    def __init__(
        self,
        store: Store,
        filesystem: FileSystem,
        replica: Replica | None,
        remote: ObjectStore | None,
        options: ScrubOptions,
        progress: Scrubbing,
    ) -> None:
        retrying = Retrying(remote, _LIMITS) if remote is not None else None
        self._store = store
        self._filesystem = filesystem
        self._replica = replica
        self._options = options
        self._progress = progress
        self._stock = Stock(store.catalog.db)
        self._pace = Pace(progress, options.rate_bytes_s, options.sample)
        self._report = Report()
        copies = Copies(store, Packs(store.catalog), retrying)
        self._images = ImageScrub(store, filesystem, copies, self._pace, self._report, repair=options.repair)
        self._remote: RemoteScrub | None = None
        if replica is not None and retrying is not None:
            self._images.learn_places = replica.hydrator.learn_places
            on_change = replica.on_remote_change
            self._images.mended = lambda file: on_change(file.ino) if file.ino is not None else None
            self._remote = RemoteScrub(
                store, retrying, copies, replica.hydrator, self._pace, self._report,
                repair=options.repair and (options.alone or not replica.read_only),
                republish=_leave if options.alone else replica.attributes_changed,
                bring=lambda ino: prefetch(filesystem, ino, replica.room, Fetching()),
            )  # fmt: skip

    async def run(self, top: Inode) -> Report:
        """Look at everything at or below *top*; the report says what was found and what became of it.

        Raises RemoteError when the remote was to be looked at and does not answer, ContentUnavailable when a directory
        that nobody looked into yet cannot be had, OSError of the local disk.
        """
        if self._options.remote:
            await self._demand_remote()
            await _expand(self._filesystem, self._stock, top, self._report)
        files = self._stock.files(top) + (self._stock.cut_files() if top == ROOT_INODE else [])
        packs = await self._remote.packs_of(files) if self._options.remote and self._remote else []
        sizes = self._stock.packs()
        self._progress.files = len(files)
        all_bytes = sum(_bytes_here(self._store, file) for file in files) + sum(sizes.get(each, 0) for each in packs)
        self._progress.total_bytes = round(self._options.sample * all_bytes)
        for file in files:
            await self._images.look(file)
            self._progress.done_files += 1
        if self._options.remote and self._remote is not None:
            for name in packs:
                if self._pace.chooses():
                    await self._remote.look_at_pack(name, sizes.get(name, 0))
            await self._remote.look_at_objects(top)
            await self._remote.look_at_heads()
        unsealed = len(self._store.contents.unsealed_images())
        if unsealed:
            skipped = "1 file is" if unsealed == 1 else f"{unsealed} files are"
            self._report.skipped.append(f"{skipped} not sealed yet: nothing says what the bytes should be")
        return self._report

    async def mend(self, images: Collection[ImageId], objects: Collection[ObjectId]) -> Report:
        """Look at some images, and some packs, manifests and trees, alone: `fsck` found that they are not as they were.

        Raises as `run`.
        """
        for file in self._stock.files(ROOT_INODE):
            if file.image in images:
                await self._images.look(file)
        if objects:
            remote = await self._demand_remote()
            sizes = self._stock.packs()
            for name in sizes.keys() & set(objects):
                await remote.look_at_pack(name, sizes[name])
            await remote.look_at_objects(ROOT_INODE, objects)
            await remote.look_at_heads()
        return self._report

    async def mend_pack(self, name: ObjectId) -> None:
        """Look at one pack, of which a reader said that it is not as it should be. Raises as `run`."""
        remote = await self._demand_remote()
        await remote.look_at_pack(name, 0)

    async def _demand_remote(self) -> RemoteScrub:
        if self._replica is None or self._remote is None:
            raise RemoteError("this store has no remote to scrub: mount it with --remote")
        await self._replica.demand_right()
        return self._remote


async def _expand(filesystem: FileSystem, stock: Stock, top: Inode, report: Report) -> None:
    """Look into directories that nobody looked into yet: what they hold is on the remote, too."""
    failed: set[Inode] = set()
    while directories := [each for each in stock.unexpanded(top) if each not in failed]:
        for directory in directories:
            try:
                await filesystem.entries(directory)
            except ContentUnavailable as error:
                if isinstance(error.__cause__, RemoteError) and error.__cause__.temporary:
                    raise
                failed.add(directory)
                path = os.fsdecode(filesystem.store.names.path(directory))
                report.findings.append(
                    Finding(path, str(error), "the directory cannot be listed here",
                            "scrub on the machine that saved it", LOST, (path,))
                )  # fmt: skip
            except CkptfsError:
                failed.add(directory)  # removed meanwhile


def _leave(ino: Inode) -> None:
    """Its rows say what is to be done; the next mount does it."""


def _bytes_here(store: Store, file: StockFile) -> int:
    if file.image is None:
        return 0
    return file.size if file.whole else sum(length for _, length in store.contents.locations_in(file.image))
