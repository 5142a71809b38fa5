"""Pieces of tensors through the states of a series: which are the same piece, and when a difference is worth storing.

Pure. Uploading decides by this, and estimating says what it would decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Protocol

from ckptfs.ids import digest
from ckptfs.series import series_key

Keys = tuple[bytes, ...]
"""Of a piece, 16 bytes each, most telling first: by series and tensor, and by tensor."""

MIN_BYTES = 16 << 10
"""A shorter piece is none that counts."""
_KEY_BYTES = 16
_GAIN = 0.97
"""A delta that is no smaller than this share of the piece without is not worth its hop."""


class NamedTensor(Protocol):
    """Where a tensor lies in its file, and what it is called."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Pieces:
    """The pieces of the file at *path*, which is relative to the mount, or to what holds the series."""

    def __init__(self, path: bytes, tensors: Iterable[NamedTensor]) -> None:
        found = series_key(path)
        self._series = path if found is None else found.pattern
        self._tensors = sorted((each for each in tensors if each.end > each.start), key=lambda each: each.start)
        self._starts = [tensor.start for tensor in self._tensors]

    def keys(self, start: int, length: int, dtype: str | None) -> Keys:
        """What these bytes of the file are called in every state of its series; () for what is not all of one tensor,
        or too short."""
        at = bisect_right(self._starts, start) - 1
        if at < 0 or dtype is None or length < MIN_BYTES or start + length > self._tensors[at].end:
            return ()
        tensor = self._tensors[at]
        told = (tensor.name, tensor.dtype, tensor.shape, start - tensor.start, length)
        name = repr(told).encode(errors="replace")
        return digest(self._series + b"\0" + name)[:_KEY_BYTES], digest(name)[:_KEY_BYTES]


def pays(whole: float, delta: float, length: int, average_bytes: float) -> bool:
    """Whether a piece of *length* bytes is stored as a delta, which takes the share *delta* instead of *whole*.

    Not when that is more than *average_bytes*, the average of the keyframe and its deltas so far: then a new keyframe
    costs less in the long run.
    """
    return delta <= _GAIN * whole and delta * length < average_bytes
