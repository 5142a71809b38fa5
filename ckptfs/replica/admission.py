"""Whether a remote may be used: its ckptfs.json, read, or written when the place is empty. What it says: `encoding`.

A store is bound to the first remote that it meets, by the id in that file, and from then on knows it from every other:
what another place lacks is not missing, what it holds is not ours, and nothing is put there.
"""

from __future__ import annotations

import time
from uuid import UUID, uuid4

from ckptfs.encoding.keys import FORMAT_KEY
from ckptfs.encoding.remote_format import RemoteFormat, decode_remote_format, encode_remote_format
from ckptfs.errors import FormatError, ObjectExists, ObjectMissing, RemoteUnusable
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.remote.base import ObjectStore

BINDING = "remote_store"
"""The catalog's setting with the id of the remote."""


def bound_to(catalog: Catalog) -> UUID | None:
    """The id of the remote that this store met first; None before it met one."""
    known = catalog.get_setting(BINDING)
    return None if known is None else UUID(str(known))


def bind(catalog: Catalog, remote: RemoteFormat) -> None:
    """From now on *remote* is this store's, for ever."""
    if bound_to(catalog) is None:
        catalog.set_setting(BINDING, str(remote.store))
        catalog.sync_wal()


def recognise(remote: ObjectStore, known: UUID | None) -> RemoteFormat:
    """What *remote* says of itself, if it is the one with id *known*. Blocks.

    Raises RemoteUnusable when it is another one or none, and whatever the store raises (unreachable, forbidden).
    """
    found = _read(remote)
    if found is None:
        raise RemoteUnusable(
            f"{remote.url} is not the remote that this store was replicated with: it is empty or not the place it was "
            f"(no {FORMAT_KEY}); is it mounted, is AWS_ENDPOINT_URL right?"
        )
    if found.store != known:
        raise RemoteUnusable(f"{remote.url} is another remote than the one that this store was replicated with.")
    return found


def admit(remote: ObjectStore, *, create: bool) -> RemoteFormat:
    """What *remote* says of itself; with *create* an empty one is made ours first. Blocks.

    Raises RemoteUnusable when it holds something else, or a format that this ckptfs does not know, and whatever the
    store raises (unreachable, forbidden).
    """
    found = _read(remote)
    if found is not None:
        return found
    other = remote.list("", limit=1).objects
    if other:
        raise RemoteUnusable(
            f"{remote.url} holds other objects (such as {other[0].key}) and no {FORMAT_KEY}: choose an empty prefix"
        )
    if not create:
        raise RemoteUnusable(f"{remote.url} is empty: nothing was ever replicated there")
    try:
        remote.put(FORMAT_KEY, encode_remote_format(RemoteFormat(uuid4(), time.time_ns())), if_absent=True)
    except ObjectExists:
        pass  # another writer was faster; its word counts
    found = _read(remote)
    if found is None:
        raise RemoteUnusable(f"{remote.url} does not keep what is put: {FORMAT_KEY} is gone at once")
    return found


def _read(remote: ObjectStore) -> RemoteFormat | None:
    try:
        data = remote.get(FORMAT_KEY)
    except ObjectMissing:
        return None
    try:
        return decode_remote_format(data)
    except FormatError as error:
        raise RemoteUnusable(f"{remote.url}/{FORMAT_KEY}: {error}", key=FORMAT_KEY) from error
