"""Following other writers: which heads are new, and which of them to merge in what order.

Somebody looking is what starts a check (`fresh`): one LIST, a GET for each new head, and what merging them needs. A
mount that nobody reads makes no request. `run` is the only task; callers wait for its rounds, never for each other.
Errors end a round and are kept in `last_error`; nobody who looks gets them.

A head is merged only when everything in its vector is there, so that nobody's marker precedes another's shard. A head
that another one covers is merged too when an older head of its writer was: what that writer removed long ago may show
in its own tree alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from ckptfs.encoding.head import Head, open_head
from ckptfs.encoding.keys import HEADS, head_key, parse_head_key
from ckptfs.errors import FormatError, ObjectMissing, RemoteError
from ckptfs.ids import WriterId, stamp_time_s
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.followed import Followed
from ckptfs.remote.base import ObjectStore
from ckptfs.replica.merge import Merger
from ckptfs.replica.trees import at_once

log = logging.getLogger(__name__)

AHEAD_S = 900.0
"""A stamp this far ahead of our clock is reported: that writer would win every conflict."""
_LOOK_WAITS_S = 0.5
"""How long somebody who looks waits for news at most."""
_THREADS = 8
_LISTED = 1000

T = TypeVar("T")


@dataclass(frozen=True)
class _Found:
    head: Head
    body: bytes


class Follower:
    """Keeps a mount fresh while somebody looks at it.

    *remote* is not retried here: the next look is the next try. *writer* gives this store's present identity.
    """

    def __init__(
        self,
        catalog: Catalog,
        remote: ObjectStore,
        merger: Merger,
        *,
        writer: Callable[[], WriterId],
        lag_s: float,
    ) -> None:
        self._catalog = catalog
        self._followed = Followed(catalog)
        self._remote = remote
        self._merger = merger
        self._writer = writer
        self._lag_s = lag_s
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._wanted = trio.Event()
        self._done = trio.Event()
        self._checked_at = float("-inf")
        self._reported: set[WriterId] = set()
        self._refused: set[str] = set()
        self.failing = False
        """Whether the last check failed."""
        self.last_error: str | None = None
        self.last_success_s: float | None = None
        """Seconds since 1970."""
        self.checks = 0

    @property
    def knows_nothing(self) -> bool:
        """Whether no head was ever followed or written here."""
        return not self._followed.newest() and not self._followed.own_sequence()

    async def fresh(self, *, waiting: bool) -> None:
        """Somebody looks: check, unless the last check is younger than the lag.

        With *waiting*, returns when the check is done or 0.5 s have passed; at once while the remote is failing.
        """
        if trio.current_time() - self._checked_at < self._lag_s and not self._wanted.is_set():
            return
        done = self._done
        self._wanted.set()
        if waiting and not self.failing:
            with trio.move_on_after(_LOOK_WAITS_S):
                await done.wait()

    async def catch_up(self, timeout_s: float = 10.0) -> bool:
        """Check now; whether everything that was there is merged when this returns."""
        self._wanted.set()
        done = self._done
        with trio.move_on_after(timeout_s):
            await done.wait()
        return done.is_set() and not self.failing

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve checks until cancelled."""
        task_status.started()
        while True:
            await self._wanted.wait()
            self._wanted, done = trio.Event(), self._done
            self._done = trio.Event()
            self._checked_at = trio.current_time()
            try:
                await self.check()
            finally:
                done.set()

    async def check(self) -> None:
        """One round: list, fetch, merge. Never raises for the remote's sake; see `last_error`."""
        self.checks += 1
        errors: list[Exception] = []
        try:
            await self._check(errors)
        except (RemoteError, FormatError) as error:
            errors.append(error)
        if errors:
            if str(errors[0]) != self.last_error:  # an outage that changes its reason is told again
                log.warning("cannot follow other writers: %s", errors[0])
            self.failing = any(isinstance(error, RemoteError) for error in errors)
            self.last_error = str(errors[0])
        else:
            self.failing, self.last_error, self.last_success_s = False, None, time.time()

    # Within

    async def _check(self, errors: list[Exception]) -> None:
        listed = await self._list()
        found = await self._fetch_new(listed, errors)
        if self._incomplete(found, listed):
            # Listed in an unlucky moment: a head was put between the listing of what it covers and its own.
            listed = await self._list()
            found |= await self._fetch_new(
                {w: s for w, s in listed.items() if w not in found or found[w].head.seq < s}, errors
            )
        for each in self._in_order(found, listed):
            try:
                if self._is_needed(each.head, found):
                    await self._merger.apply(each.head, each.body)
                else:
                    self._followed.remember(self._catalog.writer_row(each.head.writer), each.head.seq, each.body)
            except (RemoteError, FormatError) as error:
                errors.append(error)
                break  # what comes later may build on it
        if self._merger.behind:
            await self._merger.resume()

    async def _list(self) -> dict[WriterId, int]:
        """The newest sequence of every writer on the remote."""
        listing = await self._in_thread(partial(self._remote.list, HEADS, limit=_LISTED))
        keys = [found.key for found in listing.objects]
        if listing.truncated:
            keys = []
            folders = await self._in_thread(partial(self._remote.list_folders, HEADS))

            async def newest(folder: str) -> None:
                first = await self._in_thread(partial(self._remote.list, f"{HEADS}{folder}/", limit=1))
                keys.extend(found.key for found in first.objects)

            await at_once(newest, folders)
        sequences: dict[WriterId, int] = {}
        for key in keys:
            try:
                writer, seq = parse_head_key(key)
            except FormatError:
                log.debug("%s is not the key of a head", key)
                continue
            sequences[writer] = max(seq, sequences.get(writer, 0))
        return sequences

    async def _fetch_new(self, listed: dict[WriterId, int], errors: list[Exception]) -> dict[WriterId, _Found]:
        """The newest heads that are newer than what was followed."""
        followed = self._followed.newest()
        own = self._writer()
        found: dict[WriterId, _Found] = {}

        async def fetch(writer: WriterId) -> None:
            key = head_key(writer, listed[writer])
            try:
                data = await self._in_thread(partial(self._remote.get, key))
                head = open_head(data, key)
            except ObjectMissing:
                return  # replaced by a newer one since it was listed
            except FormatError as error:
                if key not in self._refused:
                    self._refused.add(key)
                    log.error("%s is left out: %s", key, error)
                errors.append(FormatError(f"{key}: {error}"))
                return
            except RemoteError as error:
                errors.append(error)
                return
            found[writer] = _Found(head, data)

        new = [w for w, seq in listed.items() if w != own and seq > followed.get(w, 0)]
        await at_once(fetch, new)
        for writer, each in found.items():
            ahead_s = stamp_time_s(each.head.stamp) - time.time()
            if ahead_s > AHEAD_S and writer not in self._reported:
                self._reported.add(writer)
                log.warning("the clock of writer %s is %.0f minutes ahead of ours", writer.hex(), ahead_s / 60)
        return found

    def _incomplete(self, found: dict[WriterId, _Found], listed: dict[WriterId, int]) -> bool:
        followed = self._followed.newest()
        own = self._writer()
        return any(
            writer != own and seq > max(listed.get(writer, 0), followed.get(writer, 0))
            for each in found.values()
            for writer, seq in each.head.vector.items()
        )

    def _in_order(self, found: dict[WriterId, _Found], listed: dict[WriterId, int]) -> list[_Found]:
        """Heads of which everything that they cover is there or comes before them.

        A writer that is listed nowhere is gone: a head that covered it took its place.
        """
        followed = self._followed.newest()
        left = dict(found)
        while True:
            have = {
                writer: max(followed.get(writer, 0), left[writer].head.seq if writer in left else 0)
                for writer in listed
            }
            lacking = [
                writer
                for writer, each in left.items()
                if any(
                    other in have and other != self._writer() and seq > have[other]
                    for other, seq in each.head.vector.items()
                )
            ]
            if not lacking:
                break
            for writer in lacking:
                del left[writer]
        heads = list(left.values())
        return sorted(heads, key=lambda each: sum(_covers(each.head, other.head) for other in heads))

    def _is_needed(self, head: Head, found: dict[WriterId, _Found]) -> bool:
        """Whether *head* is to be merged.

        One that another covers is not, unless its writer was followed before, or it was made without knowing what this
        store published: then what to save of ours can be told from itself alone.
        """
        own = self._followed.own_sequence()
        if head.writer in self._followed.newest() or head.vector.get(self._writer(), 0) < own:
            return True
        return not any(_covers(other.head, head) for other in found.values())

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)


def _covers(head: Head, other: Head) -> bool:
    return head is not other and head.vector.get(other.writer, 0) >= other.seq
