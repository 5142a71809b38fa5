"""An object store around another one that fails where a test says so, and counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ckptfs.errors import RemoteError
from ckptfs.remote.base import Buffer, Listing, ObjectStore


def unavailable(key: str) -> RemoteError:
    return RemoteError("503 SlowDown", key=key, temporary=True)


class FaultyStore:
    """`fault(operation, key)` is asked before each request, in its thread; an exception it returns is raised."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.fault: Callable[[str, str], Exception | None] = lambda operation, key: None
        self.after: Callable[[str, str], Exception | None] = lambda operation, key: None
        """The same after the request was served: the answer is lost."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """(operation, first part of the key) -> how many that got through."""
        self.put_keys: list[str] = []
        self._lock = threading.Lock()

    def _before(self, operation: str, key: str) -> None:
        error = self.fault(operation, key)
        if error is not None:
            raise error

    def _done(self, operation: str, key: str) -> None:
        with self._lock:
            self.requests[operation, key.partition("/")[0]] += 1
            if operation == "put":
                self.put_keys.append(key)
        error = self.after(operation, key)
        if error is not None:
            raise error

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def description(self) -> str:
        return self._store.description

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        self._before("put", key)
        verified = self._store.put(key, data, if_absent=if_absent)
        self._done("put", key)
        return verified

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._before("get", key)
        data = self._store.get(key, start, end)
        self._done("get", key)
        return data

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        self._before("get", key)
        return self._store.get_tail(key, length)

    def size(self, key: str) -> int | None:
        self._before("size", key)
        size = self._store.size(key)
        self._done("size", key)
        return size

    def list(self, prefix: str, *, start_after: str = "", limit: int = 1000) -> Listing:
        self._before("list", prefix)
        return self._store.list(prefix, start_after=start_after, limit=limit)

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        self._before("list", prefix)
        return self._store.list_folders(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._before("delete", keys[0] if keys else "")
        self._store.delete(keys)
