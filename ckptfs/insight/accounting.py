"""Who needs which chunks: unique and shared bytes of groups of files, and what each member of a series added. Pure.

Millions of chunks in arrays: a chunk is known by the first 8 bytes of its digest. Two of 10 million would have to be
mixed up with a probability of 3e-6, and then a report would be wrong by one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Bytes = NDArray[np.int64]

NOWHERE = -1
"""The label of a file that belongs to no group, but may need the same chunks."""


@dataclass(frozen=True)
class Usage:
    """Bytes that a group of files takes. The first three add up over disjoint groups; see `Chunks.usage`."""

    files: int
    logical: int
    """Sizes of the files, holes included; a file with several names counts with the first."""
    unique: int
    """Chunks that nothing outside the group needs."""
    shared: int
    """Chunks that something outside needs, too. With `unique`, all that the group needs, each chunk once."""
    local: int
    """Of these, what this disk has ..."""
    remote: int
    """... and what the remote has ..."""
    encoded: int
    """... which takes so much there."""

    def document(self) -> dict[str, int]:
        return {f"{field.name}_bytes" if field.name != "files" else "files": getattr(self, field.name)
                for field in fields(self)}  # fmt: skip


@dataclass(frozen=True)
class Growth:
    """What a member added to those before it in its series."""

    added: int
    """Bytes of chunks that no earlier member needs."""
    added_encoded: int
    """What those of them that are on the remote take there."""


def keys_of(digests: Iterable[bytes]) -> Keys:
    """The keys of 32-byte *digests*."""
    return np.frombuffer(b"".join(each[:8] for each in digests), np.uint64)


class Chunks:
    """Every chunk that some file version needs, and where it is."""

    def __init__(self, versions: Sequence[tuple[Keys, Bytes]], here: Keys, packed: tuple[Keys, Bytes]) -> None:
        """*versions*: keys and lengths of each one's chunks. *here* are on this disk; *packed* on the remote, in so
        many encoded bytes each. Keys may repeat anywhere."""
        keys = np.concatenate([each for each, _ in versions]) if versions else np.empty(0, np.uint64)
        lengths = np.concatenate([each for _, each in versions]) if versions else np.empty(0, np.int64)
        unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        self._index: Numbers = inverse.astype(np.int64, copy=False)
        self._starts = np.cumsum(np.array([0, *(len(each) for each, _ in versions)], np.int64))
        self._lengths: Bytes = lengths[first]
        self._is_here = np.isin(unique, here)
        packed_keys, at = np.unique(packed[0], return_index=True)
        place: Numbers = np.asarray(np.searchsorted(packed_keys, unique), np.int64)
        self._is_remote = np.isin(unique, packed_keys)
        self._encoded = np.zeros(len(unique), np.int64)
        self._encoded[self._is_remote] = packed[1][at[place[self._is_remote]]]

    def usage(
        self, versions: Sequence[int], sizes: Sequence[int], labels: Sequence[int], groups: int
    ) -> tuple[list[Usage], Usage, int]:
        """The usage of each of *groups* groups, of all of them together, and the bytes that only they need.

        Of each name of a file: its version, its size (0 for a further name of the same file) and its group, or
        `NOWHERE`. The sum's `unique` is the sum of the groups'; its `shared` is what more than one group, or a file in
        no group, needs, each chunk once.
        """
        if not groups:
            return [], Usage(0, 0, 0, 0, 0, 0, 0), 0
        label = np.where(np.asarray(labels, np.int64) == NOWHERE, groups, np.asarray(labels, np.int64))
        pairs = self._pairs(versions, label, groups + 1)
        chunk, group = pairs // (groups + 1), pairs % (groups + 1)
        needed_by = np.bincount(chunk, minlength=len(self._lengths))
        alone = needed_by[chunk] == 1

        lengths = self._lengths[chunk]
        columns = [
            _sums(label, np.ones(len(label), np.int64), groups),
            _sums(label, np.asarray(sizes, np.int64), groups),
            _sums(group, lengths * alone, groups),
            _sums(group, lengths * ~alone, groups),
            _sums(group, lengths * self._is_here[chunk], groups),
            _sums(group, lengths * self._is_remote[chunk], groups),
            _sums(group, self._encoded[chunk], groups),
        ]
        rows = [Usage(*(column[number] for column in columns)) for number in range(groups)]
        ours = np.zeros(len(self._lengths), bool)
        ours[chunk[group < groups]] = True
        elsewhere = np.zeros(len(self._lengths), bool)
        elsewhere[chunk[group == groups]] = True
        unique = sum(row.unique for row in rows)
        whole = Usage(
            files=sum(row.files for row in rows),
            logical=sum(row.logical for row in rows),
            unique=unique,
            shared=int(self._lengths[ours].sum()) - unique,
            local=int(self._lengths[ours & self._is_here].sum()),
            remote=int(self._lengths[ours & self._is_remote].sum()),
            encoded=int(self._encoded[ours].sum()),
        )
        return rows, whole, int(self._lengths[ours & ~elsewhere].sum())

    def growth(self, members: Sequence[Sequence[int]]) -> list[Growth]:
        """What each of *members*, given by the versions of its files, in order, added."""
        versions = list(chain.from_iterable(members))
        label = np.repeat(np.arange(len(members)), [len(each) for each in members])
        chunk, owner = self._chunks(versions, label)
        distinct, first = np.unique(chunk, return_index=True)  # the first of equal ones, and members are in order
        owners = owner[first]
        added = _sums(owners, self._lengths[distinct], len(members))
        encoded = _sums(owners, self._encoded[distinct], len(members))
        return [Growth(*each) for each in zip(added, encoded, strict=True)]

    def _chunks(self, versions: Sequence[int], label: Numbers) -> tuple[Numbers, Numbers]:
        """The number of each chunk of *versions*, and the label of the version that it is of."""
        runs = [self._index[self._starts[each] : self._starts[each + 1]] for each in versions]
        chunk = np.concatenate(runs) if runs else np.empty(0, np.int64)
        return chunk, np.repeat(label, [len(run) for run in runs])

    def _pairs(self, versions: Sequence[int], label: Numbers, labels: int) -> Numbers:
        """Each distinct (chunk, label), as chunk * labels + label."""
        chunk, owner = self._chunks(versions, label)
        pairs: Numbers = np.sort(chunk * labels + owner)  # np.unique hashes, at a fifth of the speed
        distinct: Numbers = pairs[np.diff(pairs, prepend=-1) != 0]
        return distinct


def _sums(label: Numbers, values: Bytes, labels: int) -> list[int]:
    """The sum of *values* for each label; exact up to 8 PiB."""
    return [int(each) for each in np.bincount(label, weights=values, minlength=labels)]
