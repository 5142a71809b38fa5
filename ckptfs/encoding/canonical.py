"""Canonical JSON and the frames that hold it on the remote.

The same value is the same bytes on every machine: keys sorted by code point, no white space, pure ASCII with JSON's
escapes, integers only. An object's name is the BLAKE3-256 digest of these bytes *before* compression, so that it does
not depend on a version of zstd. What the values mean is left to the other modules of this package.
"""

from __future__ import annotations

import base64
import binascii
import json
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import zstandard

from ckptfs.errors import FormatError
from ckptfs.ids import DIGEST_BYTES, ObjectId, digest

OBJECT_LIMIT = 256 << 20
"""Most bytes of JSON that are unpacked: a manifest of 2.5 million chunks; more than that is damage or malice."""

_AT_ONCE = 4096
"""Elements of a long list that are encoded by one call: a few milliseconds."""
_LEVEL = 3
_MOST_RATIO = 1 << 15
"""The densest zstd frame has 4 bytes per block of 128 KiB: a larger claim is a lie, and nothing is allocated for it."""


_LARGE = 1 << 20
_CONTAINERS_MOST, _VALUES_MOST = 4 << 20, 32 << 20
"""In one object. A manifest of 2.5 million chunks has 20 million values in a dozen arrays; 256 MiB of "{}," would be
90 million objects, and take 6 GB."""


def _count(data: bytes | bytearray | memoryview, characters: bytes) -> int:
    return sum(bytes(data).count(character) for character in characters)


def _no_floats(text: str) -> NoReturn:
    raise FormatError(f"JSON number {text[:40]} is not an integer")


_encoder = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, check_circular=False
)
_decoder = json.JSONDecoder(parse_float=_no_floats, parse_constant=_no_floats)


def dumps(value: object) -> bytes:
    """*value* (dicts with str keys, lists, tuples, str, int, bool, None) as canonical JSON."""
    return _encoder.encode(value).encode("ascii") if _is_small(value) else b"".join(_parts(value))


def _is_small(value: object) -> bool:
    """Whether one call of the encoder does; of most values, the manifests of small files, that takes a fifth."""
    if not isinstance(value, dict):
        return False
    sizes = [len(part) for part in value.values() if isinstance(part, list | tuple | dict)]
    return sum(sizes) <= _AT_ONCE and not any(isinstance(part, dict) for part in value.values())


def _parts(value: object) -> Iterator[bytes]:
    """*value* in pieces: within one call of the encoder no other thread of the process runs, and a manifest of 130,000
    chunks took it half a second."""
    if isinstance(value, dict) and value and all(type(key) is str for key in value):
        before = b"{"
        for key in sorted(value):
            yield before + _encoder.encode(key).encode("ascii") + b":"
            yield from _parts(value[key])
            before = b","
        yield b"}"
    elif isinstance(value, list | tuple) and len(value) > _AT_ONCE:
        before = b"["
        for start in range(0, len(value), _AT_ONCE):
            yield before + _encoder.encode(value[start : start + _AT_ONCE])[1:-1].encode("ascii")
            before = b","
        yield b"]"
    else:
        yield _encoder.encode(value).encode("ascii")


def parse(data: bytes | bytearray | memoryview) -> Any:
    """The value of JSON *data* in any layout. Raises FormatError. Duplicate keys are for the caller to exclude."""
    if len(data) > _LARGE and (_count(data, b"[{") > _CONTAINERS_MOST or _count(data, b",") > _VALUES_MOST):
        raise FormatError(f"JSON of {len(data)} bytes with more than {_CONTAINERS_MOST} arrays and objects, or values")
    try:
        return _decoder.decode(bytes(data).decode("ascii"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise FormatError(f"not JSON: {error}") from error


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The value of canonical JSON *data*.

    Raises FormatError when it is not JSON or not canonical (duplicate keys, other order, white space, floats).
    """
    value = parse(data)
    try:
        again = dumps(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from error
    if again != data:
        raise FormatError("JSON is not in canonical form")
    return value


def text(data: bytes) -> str | dict[str, str]:
    """*data* as JSON: a plain string where it is valid UTF-8, else ``{"b64": "..."}``."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(data).decode("ascii")}


def untext(value: object) -> bytes:
    """The inverse of `text`. Raises FormatError, also for the form that `text` would not have chosen."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError("a string holds half of a surrogate pair") from error
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str):
        try:
            data = base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise FormatError(f"bad base64: {error}") from error
        if text(data) == value:
            return data
    raise FormatError("not a string and not base64 of bytes that are none")


def object_id(body: bytes | bytearray | memoryview) -> ObjectId:
    """The name of the object whose canonical JSON is *body*."""
    return ObjectId(digest(body))


def embed(name: ObjectId, body: bytes | None) -> object:
    """How a parent refers to an object: its digest in hex, or, where it is inlined, its JSON value itself.

    Raises FormatError when *body* is not canonical or not what *name* says.
    """
    if len(name) != DIGEST_BYTES:
        raise FormatError("an object's name is not 32 bytes")
    if body is None:
        return name.hex()
    if object_id(body) != name:
        raise FormatError(f"inlined object does not have the digest {name.hex()}")
    value = loads(body)
    if not isinstance(value, dict):
        raise FormatError("an inlined object is not a JSON object")
    return value


def unembed(value: object) -> tuple[ObjectId, bytes | None]:
    """The inverse of `embed`: digest, and canonical JSON where it was inlined."""
    if isinstance(value, dict):
        body = dumps(value)
        return object_id(body), body
    if isinstance(value, str) and len(value) == 2 * DIGEST_BYTES:
        try:
            name = bytes.fromhex(value)
        except ValueError:
            name = b""
        if name.hex() == value:
            return ObjectId(name), None
    raise FormatError("neither a digest nor an inlined object")


def seal_object(body: bytes | bytearray | memoryview) -> bytes:
    """The object's bytes on the remote: one zstd frame with its content size and checksum."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True).compress(body)


def open_object(
    data: bytes | bytearray | memoryview, expected: ObjectId | None = None, limit: int = OBJECT_LIMIT
) -> bytes:
    """The canonical JSON in an object's bytes *data*; its digest is *expected* unless that is None.

    Raises FormatError on damage, a digest that differs, or more than *limit* bytes; allocates no more than that.
    """
    try:
        frame = zstandard.get_frame_parameters(data)
        size = frame.content_size
        if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) or not frame.has_checksum:
            raise FormatError("object frame lacks its content size or checksum")
        if not 0 < size <= limit or size > len(data) * _MOST_RATIO:
            raise FormatError(f"object of {size} bytes, at most {min(limit, len(data) * _MOST_RATIO)} are possible")
        body = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"object does not unpack: {error}") from error
    if len(body) != size:
        raise FormatError("object is shorter than its frame says")
    if expected is not None and digest(body) != expected:
        raise FormatError(f"object {expected.hex()} holds other bytes")
    return body


def let_go(error: FormatError) -> None:
    """Free what the calls hold that *error* ended, up to `OBJECT_LIMIT` bytes of an object that is refused.

    An error that came through several tasks is part of a cycle, and the collector comes by seldom: who read ten such
    objects had 2 GiB of them in memory.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
