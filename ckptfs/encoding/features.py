"""Feature names: how the format evolves without breaking who reads it.

An object lists in `requires` what a reader must understand to use it, and in `optional` what it may ignore. A name is
``word`` or ``word@version``: the first ckptfs that knows it, so that an older one can say what to install.
"""

from __future__ import annotations

import re
from itertools import pairwise

from ckptfs.errors import FormatError

DELTA = "delta"
"""Chunks that are told as differences to others: a manifest says where those lie."""

KNOWN = frozenset({DELTA})
"""Features that this version understands."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(@[0-9]+(\.[0-9]+)*)?").fullmatch
_MOST = 64


def check_names(value: object, what: str) -> tuple[str, ...]:
    """*value*, parsed JSON or a tuple, as feature names, ordered and unique. Raises FormatError."""
    if not isinstance(value, list | tuple) or len(value) > _MOST:
        raise FormatError(f"{what} is not an array of at most {_MOST} feature names")
    if not all(type(name) is str and _NAME(name) for name in value):
        raise FormatError(f"{what} holds something other than feature names")
    names = tuple(str(name) for name in value)
    if any(left >= right for left, right in pairwise(names)):
        raise FormatError(f"{what} is not ordered or names a feature twice")
    return names


def demand(value: object, what: str) -> tuple[str, ...]:
    """The feature names in *value*, all of them known here.

    Raises FormatError saying which features, and which version of ckptfs, are needed.
    """
    names = check_names(value, f"{what}: requires")
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        versions = [name.split("@")[1] for name in unknown if "@" in name]
        newest = max(versions, key=lambda version: [int(part) for part in version.split(".")], default=None)
        install = f"ckptfs {newest} or newer" if newest else "a newer ckptfs"
        raise FormatError(f"{what} needs {', '.join(unknown)}: install {install}")
    return names


def unknown_optional(names: tuple[str, ...]) -> bool:
    """Whether *names* has a feature that this version does not know; its fields are ignored."""
    return any(name not in KNOWN for name in names)
