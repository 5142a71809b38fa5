"""From a URL to an object store. Which URLs there are is decided here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

from ckptfs.errors import RemoteUnusable
from ckptfs.remote.base import ObjectStore, is_key
from ckptfs.remote.directory import DirectoryStore, directory_url

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_FORMS = "A remote is s3://bucket/prefix (any S3-compatible store; AWS_ENDPOINT_URL names one) or file:///directory."


def canonical_url(url: str) -> str:
    """How a store at *url* calls itself; nothing is opened. Raises RemoteUnusable, saying what is wrong with it."""
    scheme, place, prefix = parse(url)
    return directory_url(place) if scheme == "file" else f"s3://{place}/{prefix}".rstrip("/")


def open_remote(
    url: str, *, create: bool = True, environment: Mapping[str, str] | None = None, pool_size: int = 32
) -> ObjectStore:
    """The store at *url*; not wrapped in `Retrying`, and for S3 without a request being sent.

    Without *create* a directory must be there, and nothing is made in it before the first put.
    *environment* stands for os.environ where S3 credentials, endpoint and region are looked up; *pool_size* is how many
    connections are kept open, the number of threads that use the store. Raises RemoteUnusable, saying what is wrong
    with the URL or the place.
    """
    scheme, place, prefix = parse(url)
    if scheme == "file":
        return DirectoryStore(place, create=create)
    # boto3 takes 0.3 s and 30 MB to import, which a directory does not need.
    from ckptfs.remote.s3 import S3Store

    return S3Store(place, prefix, environment=environment, pool_size=pool_size)


def parse(url: str) -> tuple[str, str, str]:
    """The scheme, the directory or bucket, and the prefix in it. Raises RemoteUnusable, saying what is wrong."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url.removeprefix("file:")
        hint = f" Did you mean file://{path}?" if path.startswith("/") else ""
        raise RemoteUnusable(f"{url!r} is no URL.{hint} {_FORMS}")
    if scheme == "file":
        return scheme, _directory(url, rest), ""
    if scheme == "s3":
        return scheme, *_bucket_and_prefix(url, rest)
    raise RemoteUnusable(f"{url!r}: {scheme}:// is not supported. {_FORMS}")


def _directory(url: str, rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not path.strip("/"):
        raise RemoteUnusable(f"{url!r} does not name a directory of this machine; write three slashes. {_FORMS}")
    return slash + unquote(path)


def _bucket_and_prefix(url: str, rest: str) -> tuple[str, str]:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if "@" in bucket or ":" in bucket:
        # Not repeated in the message: it may hold a secret.
        raise RemoteUnusable(
            f"an s3:// URL holds a bucket only; keys come from AWS_ACCESS_KEY_ID and the like. {_FORMS}"
        )
    if not _BUCKET.fullmatch(bucket):
        raise RemoteUnusable(f"{url!r}: {bucket!r} is no bucket name. {_FORMS}")
    if prefix and not is_key(prefix):
        raise RemoteUnusable(f"{url!r}: the prefix has a part that is empty or starts with a dot. {_FORMS}")
    return bucket, prefix
