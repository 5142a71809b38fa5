"""Which paths belong to one series: the same pattern with another number, as `checkpoint-100/` and `checkpoint-200/`.

Pure, names only. In this order:

1. Numbers behind a word that counts progress (step, epoch, checkpoint ...), in any part of the path: HF Trainer,
   Lightning, Megatron, DeepSpeed, TensorFlow.
2. A part that is nothing but a number, the topmost: Orbax.
3. The last number behind some other word, in the lowest part that has one: `model-3.pt`.

Numbers that count something else (shards, ranks, layers) never do. Beside a number of the first kind, numbers with a
decimal point belong to the pattern no more than it does: metrics, as in `epoch=3-val_loss=0.25.ckpt`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_DIGITS = rb"(\d{1,12})(?![0-9A-Za-z]|\.\d|-of-)"
"""A number of its own: no size as in 7b, no decimal, no shard. Longer ones are times and hashes."""

_PROGRESS = re.compile(
    rb"(?i)(?<![a-z])(epoch|steps?|iter(?:ation)?s?|checkpoint|ch?kpt|update|batch|samples|tokens)[-_.=]{0,2}" + _DIGITS
)
_DECIMAL = re.compile(rb"(?<![0-9A-Za-z])-?\d+\.\d+(?:e-?\d+)?(?![0-9A-Za-z])")
_NUMBER = re.compile(rb"()(\d{1,12})(?=\.[A-Za-z]\w*$|$)")
_OTHER = re.compile(rb"([A-Za-z]+)[-_.=]{1,2}" + _DIGITS)
_PARALLEL = frozenset(
    b"block chunk device dp expert fold gpu host layer layers node of part partition pp proc process rank run seed"
    b" shard stage state states tp trial v version worker".split()
)
"""Words whose numbers tell parts of one state, or runs, apart; where one is, other numbers do too."""


class SeriesKey(NamedTuple):
    """Which series a path belongs to, and where in it."""

    pattern: bytes
    """The path with `*` for each number; the same for all of one series."""
    numbers: tuple[int, ...]
    """What stood there, without metrics; a series is ordered by them."""


def series_key(path: bytes) -> SeriesKey | None:
    """The series of a file or directory by its *path*; None when no number in it counts anything."""
    found = _numbered(path.split(b"/"))
    return None if found is None else found[0]


def series_member(path: bytes) -> tuple[bytes, SeriesKey] | None:
    """The directory above *path*, or *path* itself, that is one member of a series as a whole, and its key.

    `run/checkpoint-100/global_step100/rank_0.pt` lies in the member `run/checkpoint-100`.
    """
    parts = path.split(b"/")
    found = _numbered(parts)
    if found is None:
        return None
    member = parts[: found[1] + 1]
    numbered = _numbered(member)
    return None if numbered is None else (b"/".join(member), numbered[0])


def _numbered(parts: list[bytes]) -> tuple[SeriesKey, int] | None:
    """The key of the path in *parts*, and which part the member's own number is in."""
    progress = [index for index, part in enumerate(parts) if _PROGRESS.search(part)]
    if progress:
        pattern, numbers = list(parts), []
        for index in progress:
            numbers += [int(match[2]) for match in _PROGRESS.finditer(parts[index])]
            pattern[index] = _DECIMAL.sub(b"*", _PROGRESS.sub(_starred, parts[index]))
        # an epoch's directory holds steps; within those of a step, numbers repeat it
        member = next((index for index in progress if not _counts_epochs_alone(parts[index])), progress[-1])
        return SeriesKey(b"/".join(pattern), tuple(numbers)), member
    for index, part in enumerate(parts):
        match = _NUMBER.match(part)
        if match is not None:
            return _replaced(parts, index, match), index
    for index in reversed(range(len(parts))):
        others = list(_OTHER.finditer(parts[index]))
        if others and not any(each[1].lower() in _PARALLEL for each in others):
            return _replaced(parts, index, others[-1]), index
    return None


def _starred(match: re.Match[bytes]) -> bytes:
    return match[0][: match.start(2) - match.start()] + b"*"


def _counts_epochs_alone(part: bytes) -> bool:
    return all(match[1].lower() == b"epoch" for match in _PROGRESS.finditer(part))


def _replaced(parts: list[bytes], index: int, match: re.Match[bytes]) -> SeriesKey:
    part = parts[index][: match.start(2)] + b"*" + parts[index][match.end(2) :]
    return SeriesKey(b"/".join([*parts[:index], part, *parts[index + 1 :]]), (int(match[2]),))
