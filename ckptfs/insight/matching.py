"""Which tensor of one checkpoint is which of another. Pure: names, types and shapes in, pairs out.

As little as possible is made of names. First the same name in the file of the same path; then the same name anywhere,
where it is only one (shards are numbered anew, formats differ); then, of what is left, the same name behind one prefix
(`module.`, `_orig_mod.`, `model.` ...), with the same shape, if that explains at least half of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_PREFIX_MOST = 100
"""Characters; names may be of any length, and hostile."""


@dataclass(frozen=True)
class Named:
    """What a tensor is known by."""

    file: bytes
    """Path of its file below the checkpoint; empty when that is the file itself."""
    name: str | None
    """None: all of a file in which no tensors are known."""
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Matched:
    """Indexes into the two sides."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    """In the order of the second side."""
    gone: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    prefix: str = ""
    """What was taken away from names of one side, where anything was."""


def match(before: Sequence[Named], after: Sequence[Named]) -> Matched:
    """Pair what is the same tensor in both; each is in one pair at most."""
    found = Matched(gone=list(range(len(before))), new=list(range(len(after))))
    occurrences = [_occurrences(side) for side in (before, after)]
    _pair(found, occurrences[0], occurrences[1])
    _pair(found, [each.name for each in before], [each.name for each in after])
    found.prefix = _best_prefix([before[each] for each in found.gone], [after[each] for each in found.new])
    if found.prefix:
        _pair(found, [_bare(each, found.prefix) for each in before], [_bare(each, found.prefix) for each in after])
    found.pairs.sort(key=lambda pair: pair[1])
    return found


def _pair(found: Matched, before: Sequence[Hashable | None], after: Sequence[Hashable | None]) -> None:
    """Pair those that are left whose key only one of each side has."""
    ours, theirs = _unique(before, found.gone), _unique(after, found.new)
    pairs = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
    found.pairs += pairs
    for left, taken in ((found.gone, {pair[0] for pair in pairs}), (found.new, {pair[1] for pair in pairs})):
        left[:] = [each for each in left if each not in taken]


def _unique(keys: Sequence[Hashable | None], left: Sequence[int]) -> dict[Hashable, int]:
    counts = Counter(keys[each] for each in left)
    return {keys[each]: each for each in left if keys[each] is not None and counts[keys[each]] == 1}


def _occurrences(side: Sequence[Named]) -> list[Hashable]:
    """File, name, and which of those with this name it is: names may repeat."""
    seen: Counter[tuple[bytes, str | None]] = Counter()
    keys: list[Hashable] = []
    for each in side:
        keys.append((each.file, each.name, seen[each.file, each.name]))
        seen[each.file, each.name] += 1
    return keys


def _bare(each: Named, prefix: str) -> Hashable | None:
    if each.name is None:
        return None
    return each.name.removeprefix(prefix), each.shape


def _best_prefix(before: Sequence[Named], after: Sequence[Named]) -> str:
    """The prefix that names of one side have more than the other's; "" when none explains half of the smaller side."""
    votes: Counter[str] = Counter()
    for longer, shorter in ((before, after), (after, before)):
        bare = {_bare(each, "") for each in shorter} - {None}
        for each in longer:
            name = each.name or ""
            for at, character in enumerate(name[:_PREFIX_MOST]):
                if character == "." and (name[at + 1 :], each.shape) in bare:
                    votes[name[: at + 1]] += 1
    if not votes:
        return ""
    prefix, count = min(votes.items(), key=lambda vote: (-vote[1], len(vote[0])))
    named = [sum(each.name is not None for each in side) for side in (before, after)]
    return prefix if 2 * count >= min(named) else ""
