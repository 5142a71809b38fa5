"""What every object store can do: the `ObjectStore` Protocol and its values. The stores themselves are elsewhere.

Keys are relative to the store's URL: parts joined by "/", none empty, none starting with "." (names that a store or a
NAS keeps for itself: temporary files, .nfs*, .snapshot). Listings come in the order of the keys' UTF-8 bytes, as S3
specifies; some stores (SeaweedFS) sort part by part instead, which differs only where one name continues another with a
character before "/" ("a-b" and "a/b"), so do not choose such names.

All functions block and may be called from many threads at once. They raise `RemoteError` or one of its subclasses,
whose `temporary` says whether the same call may succeed later; a wrong argument is a ValueError. Nothing here retries:
`ckptfs.remote.retry` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ObjectInfo:
    """One line of a listing."""

    key: str
    size: int
    """Bytes."""
    modified_s: float
    """When it was stored, by the store's clock, in seconds since 1970."""


@dataclass(frozen=True)
class Listing:
    """A run of objects in key order."""

    objects: tuple[ObjectInfo, ...]
    truncated: bool
    """More objects follow the last one; ask again with `start_after`. Never True for an empty run."""


class ObjectStore(Protocol):
    """A place that keeps immutable objects under keys."""

    @property
    def url(self) -> str:
        """The canonical URL, without a trailing slash; never holds a secret."""
        ...

    @property
    def description(self) -> str:
        """The URL and where it leads (endpoint, region), for people."""
        ...

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        """Store *data* under *key*, whole or not at all; when this returns, it survives the store's own crashes.

        True when the store's own checksum of what it stored, or a re-read, equals ours: the object is verified. False
        when it is stored but the store says nothing that could be compared. A checksum that differs is a temporary
        error. *data* must not change meanwhile; it is not copied.

        With *if_absent* an existing object is left as it is and `ObjectExists` is raised. A store that has no
        conditional put is asked whether the key is taken first, which leaves a moment in which another writer's object
        would be replaced.
        """
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes [*start*, *end*) of an object, to its end when *end* is None; never fewer.

        Raises `ObjectMissing`; a lasting `RemoteError` when the object has no such range; a temporary one when the
        body broke off.
        """
        ...

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        """The last *length* bytes (> 0; all of a shorter object) and the object's size, in one request."""
        ...

    def size(self, key: str) -> int | None:
        """The object's size in bytes, None when there is no such object."""
        ...

    def list(self, prefix: str, *, start_after: str = "", limit: int = 1000) -> Listing:
        """Up to *limit* objects whose keys start with *prefix* and come after *start_after*, in key order.

        *prefix* is any run of characters, not only whole parts of a key. Objects put before the call are listed.
        """
        ...

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        """The names N, in order, for which an object "*prefix*N/..." exists. *prefix* is "" or ends with "/".

        Bare names: `list_folders("heads/")` gives ("00ab", "7f31"), neither "heads/00ab/" nor "00ab/". Some stores go
        on naming a folder for a while after its last object was deleted.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; keys that are already gone are fine. On an error some of *keys* may be gone."""
        ...


def is_key(key: str) -> bool:
    """Whether every store keeps *key* as it is. Other names are somebody else's: listings leave them out."""
    return all(part and not part.startswith(".") and "\0" not in part for part in key.split("/"))


def check_key(key: str) -> None:
    """Raise ValueError unless *key* `is_key`."""
    if not is_key(key):
        raise ValueError(f"not an object key: {key!r}")


def check_range(start: int, end: int | None) -> None:
    """Raise ValueError unless [*start*, *end*) is a range of `ObjectStore.get`."""
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"not a range of bytes: [{start}, {end})")


def check_folder(prefix: str) -> None:
    """Raise ValueError unless *prefix* may be given to `ObjectStore.list_folders`."""
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"a folder prefix ends with a slash: {prefix!r}")
