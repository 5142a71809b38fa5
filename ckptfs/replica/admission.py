"""Whether a remote may be used: its ckptfs.json, read, or written when the place is empty. What it says: `encoding`."""

from __future__ import annotations

import time
from uuid import uuid4

from ckptfs.encoding.keys import FORMAT_KEY
from ckptfs.encoding.remote_format import RemoteFormat, decode_remote_format, encode_remote_format
from ckptfs.errors import FormatError, ObjectExists, ObjectMissing, RemoteUnusable
from ckptfs.remote.base import ObjectStore


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
