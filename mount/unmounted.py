"""Working on a store that nobody has mounted: the engine without a mount, for as long as one piece of work takes.

Nothing is published: what is pending waits for the next mount.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import trio

from ckptfs.encoding.keys import HEADS, MANIFESTS, PACKS, TREES
from ckptfs.engine import Engine
from ckptfs.errors import RemoteError
from ckptfs.ids import ImageId, ObjectId
from ckptfs.local.catalog.audit import Audit
from ckptfs.local.store import Store, read_settings
from ckptfs.remote.offline import OfflineStore
from ckptfs.remote.open import open_remote
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.repair.findings import Report
from ckptfs.repair.fsck import look, mend
from ckptfs.repair.pace import Scrubbing
from ckptfs.replica.admission import BINDING, bound_to, recognise
from ckptfs.replica.bound import BoundStore

from .order import LOG_FORMAT, LOG_NAME

_LIMITS = Limits(0.5, 4.0, attempts=4, deadline_s=30.0)
_SHOW_EVERY_S = 0.5

T = TypeVar("T")


def look_at(path: Path, *, asks_remote: bool) -> Report:
    """What fsck finds in the store at *path*, mounted or not. Changes nothing. Raises StoreError."""
    settings = read_settings(path / "settings.json")
    with Audit(path / "catalog.db") as audit:
        known = audit.setting(BINDING)
    if not asks_remote or settings.remote is None or known is None:
        return look(path, None)
    try:
        remote = Retrying(open_remote(settings.remote, create=False), _LIMITS)
        recognise(remote, UUID(str(known)))
        return look(path, remote)
    except RemoteError as error:
        report = look(path, None)
        report.skipped.append(f"the remote: {error}")
        return report


def repair(path: Path, found: Report) -> Report:
    """Mend what fsck *found* in the store at *path*; what scrubbing what it concerns found.

    Raises StoreError when somebody uses it, OSError, RemoteError.
    """
    images = {ImageId(int(each.where[6:], 16)) for each in found.findings if each.where.startswith("image ")}
    objects = [each.where for each in found.findings if each.where.startswith((PACKS, MANIFESTS, TREES, HEADS))]
    names = {ObjectId(bytes.fromhex(each.rpartition("/")[2])) for each in objects}

    async def work(engine: Engine) -> Report:
        return await engine.mend(images, names, Scrubbing())

    return work_on(path, work, lambda: None, needs_remote=bool(objects), first=mend)


def work_on(
    path: Path,
    work: Callable[[Engine], Awaitable[T]],
    show: Callable[[], None],
    *,
    needs_remote: bool,
    first: Callable[[Store], None] = lambda store: None,
) -> T:
    """The result of *work* on the store at *path*; *show* is called now and then meanwhile, *first* before all.

    Raises StoreError when the store is in use or damaged, RemoteError when *needs_remote* and it cannot be had.
    """
    store = Store.open(path, create=False)
    try:
        first(store)
        remote = meet(store, needs_remote=needs_remote)
        return trio.run(_work, store, remote, work, show)
    finally:
        store.close()


def meet(store: Store, *, needs_remote: bool) -> BoundStore | None:
    """The remote that *store* is bound to; None when it never had one.

    One that does not answer is taken as offline unless *needs_remote*; then RemoteError is raised.
    """
    url, known = store.settings.remote, bound_to(store.catalog)
    if url is None or known is None:
        return None
    try:
        remote = open_remote(url, create=False)
        recognise(Retrying(remote, _LIMITS), known)
    except RemoteError:
        if needs_remote:
            raise
        return BoundStore(OfflineStore(url), known)
    return BoundStore(remote, known)


def log_into(store: Path) -> None:
    """What a daemon would log goes where its log is, not between the lines of a command."""
    os.umask(0o077)
    logging.basicConfig(filename=store / LOG_NAME, format=LOG_FORMAT, level=logging.INFO)
    logging.captureWarnings(True)


async def _work(
    store: Store, remote: BoundStore | None, work: Callable[[Engine], Awaitable[T]], show: Callable[[], None]
) -> T:
    engine = Engine(store, remote, read_only=True)
    results: list[T] = []
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        nursery.start_soon(_show, show)
        try:
            results.append(await work(engine))
        except Exception as error:
            failure = error  # raised below, outside the nursery, which would wrap it in a group
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[0]


async def _show(show: Callable[[], None]) -> None:
    while True:
        show()
        await trio.sleep(_SHOW_EVERY_S)
