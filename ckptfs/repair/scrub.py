"""Scrub: read everything again that a store has, here and on its remote, and mend what can be mended.

`scrub` is one task on the event loop beside everything else that a mount does. Cancelling it, or killing the process,
leaves what was mended and nothing half done.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptfs.errors import CkptfsError, ContentUnavailable, RemoteError
from ckptfs.filesystem import FileSystem
from ckptfs.ids import ROOT_INODE, Inode, ObjectId
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.catalog.stock import Stock, StockFile
from ckptfs.local.store import Store
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


async def scrub(
    store: Store,
    filesystem: FileSystem,
    replica: Replica | None,
    remote: ObjectStore | None,
    top: Inode,
    options: ScrubOptions,
    progress: Scrubbing,
) -> Report:
    """Look at everything at or below *top*; the report says what was found and what became of it.

    Raises RemoteError when the remote was to be looked at and does not answer, ContentUnavailable when a directory that
    nobody looked into yet cannot be had, OSError of the local disk.
    """
    retrying = Retrying(remote, _LIMITS) if remote is not None else None
    packs = Packs(store.catalog)
    pace, report = Pace(progress, options.rate_bytes_s, options.sample), Report()
    copies = Copies(store, packs, retrying)
    stock = Stock(store.catalog)
    if options.remote:
        if replica is None or retrying is None:
            raise RemoteError("this store has no remote to scrub: mount it with --remote")
        await replica.demand_right()
        await _expand(filesystem, stock, top, report)
    files = stock.files(top) + (stock.cut_files() if top == ROOT_INODE else [])
    progress.files = len(files)
    remote_scrub: RemoteScrub | None = None
    needed: list[ObjectId] = []
    if options.remote and replica is not None and retrying is not None:
        may_change = options.alone or not replica.read_only
        remote_scrub = RemoteScrub(
            store, retrying, copies, replica.hydrator.content, pace, report,
            repair=options.repair and may_change,
            republish=_leave if options.alone else replica.attributes_changed,
        )  # fmt: skip
        needed = await remote_scrub.packs_of(files)
    sizes = stock.packs()
    progress.total_bytes = round(
        options.sample * (sum(_bytes_here(store, file) for file in files) + sum(sizes.get(each, 0) for each in needed))
    )
    images = ImageScrub(store, filesystem, copies, pace, report, repair=options.repair)
    if replica is not None:
        images.mended = lambda file: replica.on_remote_change(file.ino) if file.ino is not None else None
    for file in files:
        await images.look(file)
        progress.done_files += 1
    if remote_scrub is not None:
        for name in needed:
            if pace.chooses():
                await remote_scrub.look_at_pack(name, sizes.get(name, 0))
        await remote_scrub.look_at_objects(top)
        await remote_scrub.look_at_heads()
    unsealed = len(store.contents.unsealed_images())
    if unsealed:
        report.skipped.append(f"{unsealed} files are not sealed yet: nothing says what their bytes should be")
    return report


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
