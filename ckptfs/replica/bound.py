"""The remote that a store is bound to, recognised again and again: a store around a store.

A bucket of the same name answers when AWS_ENDPOINT_URL is forgotten, and an empty directory when a NAS is not mounted.
So ckptfs.json is read again before something is put or listed after any error, or when the last time is some while ago;
always before a head is put or read; and before an object is reported missing.

Blocks, and may be used from many threads at once. One of them asks, the others wait for its answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from uuid import UUID

from ckptfs.encoding.keys import HEADS
from ckptfs.errors import ObjectExists, ObjectMissing, RemoteError, RemoteUnusable
from ckptfs.remote.base import Buffer, Listing, ObjectStore
from ckptfs.replica.admission import recognise

_PUTTING_S = 2.0
"""How long a remote without errors is believed to be the same, when anything but a head is put ..."""
_LISTING_S = 30.0
"""... and when somebody looks for news: every `lag_s`, and what is new is a head ..."""
_READING_S = 0.5
"""... and when many threads read at once."""

T = TypeVar("T")


class BoundStore:
    """`ObjectStore` that refuses, with RemoteUnusable, while *store* is not the remote with id *known*."""

    def __init__(self, store: ObjectStore, known: UUID | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._known = known
        self._now = now
        self._recognised_s = float("-inf")
        self._asking = threading.Lock()
        self.wrong: RemoteUnusable | None = None
        """Why what is there cannot be the remote; None when it was the last time that anything answered."""

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def description(self) -> str:
        return self._store.description

    def recognise(self, age_s: float = 0.0) -> None:
        """Return if it was the bound remote *age_s* ago or is now. Raises RemoteUnusable, other RemoteErrors."""
        with self._asking:
            if self._now() - self._recognised_s < age_s:
                return
            asked_s, self._recognised_s = self._now(), float("-inf")
            try:
                recognise(self._store, self._known)
            except RemoteUnusable as error:
                self.wrong = error
                raise
            self.wrong, self._recognised_s = None, asked_s

    def refresh_credentials(self, environment: Mapping[str, str]) -> None:
        """As `S3Store.refresh_credentials`; a store without credentials ignores it."""
        refresh = getattr(self._store, "refresh_credentials", None)
        if refresh is not None:
            refresh(environment)
            self._recognised_s = float("-inf")  # they may name another endpoint

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        self.recognise(0.0 if key.startswith(HEADS) else _PUTTING_S)
        return self._call(lambda: self._store.put(key, data, if_absent=if_absent))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if key.startswith(HEADS):
            self.recognise(_READING_S)
        return self._call(lambda: self._store.get(key, start, end))

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        return self._call(lambda: self._store.get_tail(key, length))

    def size(self, key: str) -> int | None:
        size = self._call(lambda: self._store.size(key))
        if size is None:
            self.recognise(_READING_S)
        return size

    def list(self, prefix: str, *, start_after: str = "", limit: int = 1000) -> Listing:
        self.recognise(_LISTING_S)
        return self._call(lambda: self._store.list(prefix, start_after=start_after, limit=limit))

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        self.recognise(_LISTING_S)
        return self._call(lambda: self._store.list_folders(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self.recognise()
        self._call(lambda: self._store.delete(keys))

    def _call(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except ObjectMissing:
            self.recognise(_READING_S)
            raise
        except ObjectExists:
            raise
        except RemoteError:
            self._recognised_s = float("-inf")
            raise
