"""Getting an object whose digest is known. Blocks."""

from __future__ import annotations

from ckptfs.encoding.canonical import let_go, open_object
from ckptfs.errors import FormatError
from ckptfs.ids import ObjectId
from ckptfs.remote.base import ObjectStore


def get_object(remote: ObjectStore, key: str, digest: ObjectId) -> bytes:
    """What the object *key* holds, opened and compared with *digest*.

    Bytes that differ are asked for once more: without TLS they may have changed on their way. Raises FormatError, which
    names the key, and RemoteError.
    """
    try:
        return open_object(remote.get(key), digest)
    except FormatError:
        pass
    try:
        return open_object(remote.get(key), digest)
    except FormatError as error:
        let_go(error)
        raise FormatError(f"{key}: {error}") from error
