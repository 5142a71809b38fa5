"""Bodies of S3 requests and answers, and the checksums by which a store shows what it stored."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from typing import IO, Any

_BLOCK = 1 << 20


class Body:
    """A buffer as a file, so that it goes to the socket in steps.

    The socket's timeout while sending, which is the connect timeout, is for each `sendall` as a whole: in one, 16 MiB
    would have to leave within seconds, and no slow uplink would ever upload a pack.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int | None = -1) -> memoryview:
        start, end = self._at, len(self._data) if size is None or size < 0 else self._at + size
        self._at = min(end, len(self._data))
        return self._data[start:end]

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at


def read_most(stream: IO[bytes], most: int) -> bytes | None:
    """All that *stream* has, None when that is more than *most* bytes."""
    body = bytearray()
    while block := stream.read(_BLOCK):
        body += block
        if len(body) > most:
            return None
    return bytes(body)


def crc32(body: memoryview) -> dict[str, str]:
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()}


def md5(body: memoryview) -> dict[str, str]:
    return {"ContentMD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}


def agrees(answer: Mapping[str, Any], checksum: Mapping[str, str]) -> bool:
    """Whether the answer to a PUT with *checksum* shows that the store computed the same.

    Another ETag says nothing: not every store, nor every kind of encryption, makes it the MD5.
    """
    if "ChecksumCRC32" in checksum:
        return bool(answer.get("ChecksumCRC32") == checksum["ChecksumCRC32"])
    return str(answer.get("ETag", "")).strip('"').lower() == base64.b64decode(checksum["ContentMD5"]).hex()


def add_md5(params: dict[str, Any], **_: object) -> None:
    """Give a request the Content-MD5 that older stores insist on for DeleteObjects and botocore no longer sends."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
