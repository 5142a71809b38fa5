"""Strict reading of single values out of parsed JSON: type, range, length. Raises FormatError naming the field.

bool is never taken for int. What the fields mean is left to the modules that read them.
"""

from __future__ import annotations

import re

from ckptfs.encoding.features import unknown_optional
from ckptfs.errors import FormatError

MOST = (1 << 63) - 1
"""Largest size, offset, stamp or sequence: they live in SQLite's signed 64 bits and in off_t."""

STAMP_MOST = 1 << 62
"""The year 4199. A clock goes on from the greatest stamp it saw, so that a greater one would leave it no way up."""

HEX_32 = re.compile(r"[0-9a-f]{64}").fullmatch
HEX_16 = re.compile(r"[0-9a-f]{32}").fullmatch


def integer(value: object, what: str, least: int = 0, most: int = MOST) -> int:
    """*value* as an int in ``[least, most]``."""
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"{what} is not an integer from {least} to {most}")
    return value


def string(value: object, what: str, most: int = 1 << 20) -> str:
    """*value* as a str of at most *most* characters."""
    if type(value) is not str or len(value) > most:
        raise FormatError(f"{what} is not a string of at most {most} characters")
    return value


def boolean(value: object, what: str) -> bool:
    if type(value) is not bool:
        raise FormatError(f"{what} is neither true nor false")
    return value


def array(value: object, what: str) -> list[object]:
    if type(value) is not list:
        raise FormatError(f"{what} is not an array")
    return value


def mapping(value: object, what: str) -> dict[str, object]:
    if type(value) is not dict:
        raise FormatError(f"{what} is not an object")
    return value


def digest_of(value: object, what: str) -> bytes:
    """*value* as 32 bytes from 64 lower-case hex digits."""
    if type(value) is not str or not HEX_32(value):
        raise FormatError(f"{what} is not a digest of 64 hex digits")
    return bytes.fromhex(value)


def id_of(value: object, what: str) -> bytes:
    """*value* as 16 bytes from 32 lower-case hex digits."""
    if type(value) is not str or not HEX_16(value):
        raise FormatError(f"{what} is not an id of 32 hex digits")
    return bytes.fromhex(value)


def check_keys(
    value: dict[str, object], what: str, needed: frozenset[str], known: frozenset[str], optional: tuple[str, ...]
) -> None:
    """*value* has all *needed* keys and none outside *known*, except that an unknown optional feature may add some."""
    if not value.keys() >= needed:
        raise FormatError(f"{what} lacks {', '.join(sorted(needed - value.keys()))}")
    if not value.keys() <= known and not unknown_optional(optional):
        raise FormatError(f"{what} has unknown fields {', '.join(sorted(value.keys() - known))[:200]!r}")
