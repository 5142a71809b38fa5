"""An object store in memory, for tests that need thousands of them; counts what is asked of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ckptfs.errors import ObjectExists, ObjectMissing, RemoteError
from ckptfs.remote.base import Buffer, Listing, ObjectInfo, check_key


class MemoryStore:
    """Keeps the contract of `ckptfs.remote.base.ObjectStore`. `failing` makes every call a temporary error."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failing = False
        self.reason = "the store is down"
        """What it says while it is failing."""
        self.gets: list[tuple[str, int]] = []
        """(key, bytes returned) of every get."""
        self.lists = 0
        self.largest_listing = 1000

    @property
    def url(self) -> str:
        return "memory:"

    @property
    def description(self) -> str:
        return "memory:"

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        self._check(key)
        if if_absent and key in self.objects:
            raise ObjectExists(f"{key} exists", key=key)
        self.objects[key] = bytes(data)
        return True

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._check(key)
        if key not in self.objects:
            raise ObjectMissing(f"{key} is missing", key=key)
        data = self.objects[key][start:end]
        self.gets.append((key, len(data)))
        if end is not None and len(data) < end - start:
            raise RemoteError(f"{key} has no bytes [{start}, {end})", key=key)
        return data

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        data = self.get(key)
        return data[-length:], len(data)

    def size(self, key: str) -> int | None:
        self._check(key)
        return len(self.objects[key]) if key in self.objects else None

    def list(self, prefix: str, *, start_after: str = "", limit: int = 1000) -> Listing:
        self._check("x")
        self.lists += 1
        limit = min(limit, self.largest_listing)
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > start_after)
        infos = tuple(ObjectInfo(key, len(self.objects[key]), time.time()) for key in keys[:limit])
        return Listing(infos, len(keys) > limit)

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        self._check("x")
        rest = (key[len(prefix) :] for key in self.objects if key.startswith(prefix))
        return tuple(sorted({name.split("/")[0] for name in rest if "/" in name}))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def _check(self, key: str) -> None:
        check_key(key)
        if self.failing:
            raise RemoteError(self.reason, key=key, temporary=True)
