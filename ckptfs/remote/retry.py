"""The one place that retries: a store around a store that repeats calls which failed for a while.

Waits grow exponentially with full jitter: uniform between nothing and the step's length, so that many writers behind
one outage do not come back together (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). How
long to go on is the caller's choice: `within` gives the same store with other limits, for one call or for many.

A wait ends at once when the cancel event is set; a request on its way does not, it has the store's own timeouts.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptfs.errors import ObjectExists, RemoteError
from ckptfs.remote.base import Buffer, Listing, ObjectStore

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """How long to go on, and how to wait."""

    first_s: float = 0.5
    """Longest first wait; each further one may be twice as long ..."""
    most_s: float = 60.0
    """... up to this."""
    attempts: int | None = None
    """Requests per call, the first included; None for no limit."""
    deadline_s: float | None = None
    """Time per call, after which no further request is begun; None for no limit."""
    cancel: threading.Event | None = None
    """Once set, nothing is waited for: the call raises what failed last."""


class Retrying:
    """`ObjectStore` that repeats what fails with a temporary RemoteError, and raises the last one at the limit."""

    def __init__(
        self,
        store: ObjectStore,
        limits: Limits | None = None,
        *,
        on_retry: Callable[[RemoteError, float], None] | None = None,
        sleep: Callable[[float], None] | None = None,
        now: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """*on_retry* is told each error and the wait (seconds) that follows; the rest is for tests."""
        self._store = store
        self._limits = limits or Limits()
        self._on_retry = on_retry
        self._sleep = sleep
        self._now = now
        self._jitter = jitter
        self._failed: tuple[float, RemoteError] | None = None

    @property
    def store(self) -> ObjectStore:
        """The store behind this one."""
        return self._store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def description(self) -> str:
        return self._store.description

    def failure_since(self, moment: float) -> RemoteError | None:
        """What the last request said that failed after *moment* (monotonic seconds) and was repeated, if one did.

        For who gives up before the calls do. Stores that `within` made keep their own.
        """
        return self._failed[1] if self._failed is not None and self._failed[0] >= moment else None

    def within(
        self,
        deadline_s: float | None = None,
        *,
        attempts: int | None = None,
        cancel: threading.Event | None = None,
    ) -> Retrying:
        """The same store with another deadline and number of attempts; *cancel* is kept when None."""
        limits = replace(self._limits, deadline_s=deadline_s, attempts=attempts, cancel=cancel or self._limits.cancel)
        return Retrying(
            self._store, limits, on_retry=self._on_retry, sleep=self._sleep, now=self._now, jitter=self._jitter
        )

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        """As `ObjectStore.put`. A repeated conditional put that finds its own bytes in place has succeeded: it was
        stored the first time and only the answer was lost. The same holds when another writer put equal bytes."""
        failed_before = False

        def once() -> bool:
            nonlocal failed_before
            try:
                return self._store.put(key, data, if_absent=if_absent)
            except ObjectExists:
                if failed_before and self._store.get(key) == data:
                    return True  # read back and compared: as good as a checksum
                raise
            except RemoteError:
                failed_before = True
                raise

        return self._retry(once)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._retry(lambda: self._store.get(key, start, end))

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        return self._retry(lambda: self._store.get_tail(key, length))

    def size(self, key: str) -> int | None:
        return self._retry(lambda: self._store.size(key))

    def list(self, prefix: str, *, start_after: str = "", limit: int = 1000) -> Listing:
        return self._retry(lambda: self._store.list(prefix, start_after=start_after, limit=limit))

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        return self._retry(lambda: self._store.list_folders(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._retry(lambda: self._store.delete(keys))

    def _retry(self, call: Callable[[], T]) -> T:
        limits = self._limits
        deadline = None if limits.deadline_s is None else self._now() + limits.deadline_s
        step_s = limits.first_s
        attempt = 1
        while True:
            try:
                return call()
            except RemoteError as error:
                if not error.temporary or attempt == limits.attempts or self._cancelled():
                    raise
                wait_s = self._jitter() * step_s
                if deadline is not None:
                    # The last request comes at the deadline rather than not at all.
                    left_s = deadline - self._now()
                    if left_s <= 0:
                        raise
                    wait_s = min(wait_s, left_s)
                log.debug("again in %.2f s: %s", wait_s, error)
                self._failed = (self._now(), error)
                if self._on_retry is not None:
                    self._on_retry(error, wait_s)
                self._wait(wait_s)
                if self._cancelled():
                    raise
            step_s = min(step_s * 2, limits.most_s)
            attempt += 1

    def _cancelled(self) -> bool:
        return self._limits.cancel is not None and self._limits.cancel.is_set()

    def _wait(self, wait_s: float) -> None:
        if self._sleep is not None:
            self._sleep(wait_s)
        elif self._limits.cancel is not None:
            self._limits.cancel.wait(wait_s)
        else:
            time.sleep(wait_s)
