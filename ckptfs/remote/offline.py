"""A remote that is not asked: for a mount that shows what its store has and leaves the remote alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from ckptfs.errors import RemoteUnusable
from ckptfs.remote.base import Buffer, Listing


class OfflineStore:
    """`ObjectStore` at *url* of which every request raises RemoteUnusable."""

    def __init__(self, url: str, why: str | None = None) -> None:
        """*why* says what to do; there is a usual answer."""
        self._url = url
        self._why = why or f"mounted offline: {url} is not asked; mount without --offline to use it"

    @property
    def url(self) -> str:
        return self._url

    @property
    def description(self) -> str:
        return f"{self._url} (offline)"

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        self._refuse(key)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._refuse(key)

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        self._refuse(key)

    def size(self, key: str) -> int | None:
        self._refuse(key)

    def list(self, prefix: str, *, start_after: str = "", limit: int = 1000) -> Listing:
        self._refuse(prefix)

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        self._refuse(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._refuse("")

    def _refuse(self, key: str) -> NoReturn:
        raise RemoteUnusable(self._why, key=key)
