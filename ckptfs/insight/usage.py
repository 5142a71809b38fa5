"""What files, directories and series of a store take, from its catalog alone. The sums are `accounting`'s."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ckptfs.encoding.manifest import decode_content
from ckptfs.errors import FormatError, StoreError
from ckptfs.ids import ImageId
from ckptfs.insight.accounting import NOWHERE, Bytes, Chunks, Growth, Keys, Usage, keys_of
from ckptfs.local.catalog.survey import Survey, SurveyedFile
from ckptfs.local.images import Images
from ckptfs.series import series_member

FILE, DIRECTORY = "file", "directory"

_BATCH_ROWS = 1 << 16
"""Rows that are objects at once: millions of them would take a hundred times what is kept of them."""

T = TypeVar("T")

Tell = Callable[[int, int], None]
"""Called now and then with how many file versions were read, of how many."""


@dataclass(frozen=True)
class Row:
    """What one file or directory takes."""

    path: bytes
    """From the path that was asked about; that itself has its name."""
    kind: str
    usage: Usage

    def document(self) -> dict[str, Any]:
        return {"path": os.fsdecode(self.path), "kind": self.kind, **self.usage.document()}


@dataclass(frozen=True)
class Member:
    """One state in a series."""

    path: bytes
    numbers: tuple[int, ...]
    mtime_ns: int
    """Of its last file."""
    logical: int
    growth: Growth

    def document(self) -> dict[str, Any]:
        return {
            "path": os.fsdecode(self.path),
            "numbers": list(self.numbers),
            "mtime_s": self.mtime_ns / 1e9,
            "logical_bytes": self.logical,
            "added_bytes": self.growth.added,
            "added_encoded_bytes": self.growth.added_encoded,
        }


@dataclass(frozen=True)
class Series:
    """Two states or more under one pattern, ordered by their numbers."""

    pattern: bytes
    usage: Usage
    members: tuple[Member, ...]

    def document(self) -> dict[str, Any]:
        members = [member.document() for member in self.members]
        return {"pattern": os.fsdecode(self.pattern), **self.usage.document(), "members": members}


@dataclass(frozen=True)
class UsageReport:
    """What is at or below one path of a store."""

    rows: tuple[Row, ...]
    total: Usage
    exclusive: int
    """Bytes that nothing outside the path needs, and so nobody would when it is removed."""
    series: tuple[Series, ...]
    unsealed: int
    """Files that are not cut into chunks yet: all of each counts as unique."""
    unknown: int
    """Files of which only the remote knows the chunks: likewise."""
    unseen: int
    """Directories that nobody on this machine has looked into: nothing of them is counted."""

    def document(self) -> dict[str, Any]:
        return {
            "entries": [row.document() for row in self.rows],
            "total": self.total.document(),
            "exclusive_bytes": self.exclusive,
            "series": [each.document() for each in self.series],
            "unsealed_files": self.unsealed,
            "unknown_files": self.unknown,
            "unseen_directories": self.unseen,
        }


def look(store: Path, inside: bytes, *, each_file: bool = False, tell: Tell = lambda done, of: None) -> UsageReport:
    """What is at *inside*, a path from the mount's root, in the store at *store*, mounted or not.

    A row for each name in that directory, or with *each_file* for each file below it. Every file of the store is
    looked at, since any may share chunks with these. Raises NameMissing, StoreError.
    """
    top = b"/" + b"/".join(filter(None, inside.split(b"/")))
    with Survey(store / "catalog.db") as survey:
        ino = survey.resolve(top)
        names = [(name, mode) for name, mode in survey.names(ino) if stat.S_ISDIR(mode) or stat.S_ISREG(mode)]
        unseen, _ = survey.unlearned(ino)
        ledger = _Ledger(survey, Images(store / "images"), tell)
        chunks = ledger.chunks()
    below = [_below(file.path, top) for file in ledger.files]
    is_file = any(file.path == top for file in ledger.files)
    if each_file or is_file:
        listed = [(path, FILE) for path in below if path is not None]
        group_of = {path: number for number, (path, _) in enumerate(listed)}
        labels = [NOWHERE if path is None else group_of[path] for path in below]
    else:
        listed = [(name, DIRECTORY if stat.S_ISDIR(mode) else FILE) for name, mode in names]
        group_of = {name: number for number, (name, _) in enumerate(listed)}
        labels = [NOWHERE if path is None else group_of[path.partition(b"/")[0]] for path in below]
    usages, total, exclusive = chunks.usage(ledger.versions, ledger.sizes, labels, len(listed))
    rows = tuple(Row(path, kind, usage) for (path, kind), usage in zip(listed, usages, strict=True))
    ours = {file.ino for file, path in zip(ledger.files, below, strict=True) if path is not None}
    return UsageReport(
        rows,
        total,
        exclusive,
        tuple(_series(ledger, chunks, below)),
        len(ours & ledger.unsealed),
        len(ours & ledger.unknown),
        len(unseen),
    )


def _below(path: bytes, top: bytes) -> bytes | None:
    """*path* from *top*; its own name for that itself, None for what is elsewhere."""
    if top == b"/":
        return path[1:]
    if path == top:
        return top.rpartition(b"/")[2]
    return path[len(top) + 1 :] if path.startswith(top + b"/") else None


class _Ledger:
    """Every file of a store, its size, and which version it has."""

    def __init__(self, survey: Survey, images: Images, tell: Tell) -> None:
        self._survey = survey
        self._tell = tell
        self._versions: list[tuple[Keys, Bytes]] = []
        self._here: list[Keys] = []
        self._remote: list[tuple[Keys, Bytes]] = []
        self.unsealed: set[int] = set()
        self.unknown: set[int] = set()
        self.files: list[SurveyedFile] = []
        self.versions: list[int] = []
        self.sizes: list[int] = []
        number: dict[tuple[str, int | None], int] = {}
        seen: set[int] = set()
        found = survey.files()
        wanted = len({file.manifest for file in found})
        for file in found:
            if file.manifest is None:
                try:
                    file = _as_image(file, images)
                except FileNotFoundError:  # closed and removed since
                    continue
                self.unsealed.add(file.ino)
            version = ("manifest", file.manifest) if file.manifest is not None else ("image", file.image)
            if version not in number:
                number[version] = len(self._versions)
                self._versions.append(self._read(file))
                tell(len(self._versions), wanted)
            if file.whole:
                self._here.append(self._versions[number[version]][0])
            self.files.append(file)
            self.versions.append(number[version])
            self.sizes.append(0 if file.ino in seen else file.size)
            seen.add(file.ino)

    def chunks(self) -> Chunks:
        here, packed = list(self._here), list(self._remote)
        for rows in _batches(self._survey.here()):
            here.append(keys_of(row[0] for row in rows))
        for packed_rows in _batches(self._survey.packed()):
            lengths = np.fromiter((row[1] for row in packed_rows), np.int64, len(packed_rows))
            packed.append((keys_of(row[0] for row in packed_rows), lengths))
        empty = keys_of([])
        return Chunks(
            self._versions,
            np.concatenate([empty, *here]),
            (
                np.concatenate([empty, *(keys for keys, _ in packed)]),
                np.concatenate([np.empty(0, np.int64), *(lengths for _, lengths in packed)]),
            ),
        )

    def _read(self, file: SurveyedFile) -> tuple[Keys, Bytes]:
        """Keys and lengths of the chunks of *file*; as one of its own where nobody knows them."""
        body = self._survey.body(file.manifest) if file.manifest is not None else None
        if body is None:
            opaque = np.array([len(self._versions)], np.uint64), np.array([file.size], np.int64)
            if file.manifest is not None:
                self.unknown.add(file.ino)
                self._remote.append(opaque)
            return opaque
        try:
            content = decode_content(body)
        except FormatError as error:
            raise StoreError(f"the chunk list of {os.fsdecode(file.path)} is damaged ({error}): see fsck") from error
        return (
            keys_of(chunk.id for chunk in content.chunks),
            np.fromiter((chunk.length for chunk in content.chunks), np.int64, len(content.chunks)),
        )


def _batches(rows: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(rows, _BATCH_ROWS)):
        yield batch


def _as_image(file: SurveyedFile, images: Images) -> SurveyedFile:
    """An unsealed file with the size and time of its image. Raises FileNotFoundError."""
    if file.image is None:
        raise FileNotFoundError(file.path)
    status = images.status(ImageId(file.image))
    return file._replace(size=status.st_size, mtime_ns=status.st_mtime_ns, whole=True)


def _series(ledger: _Ledger, chunks: Chunks, below: Sequence[bytes | None]) -> Iterator[Series]:
    found: dict[bytes, dict[tuple[tuple[int, ...], bytes], list[int]]] = {}
    for number, path in enumerate(below):
        member = series_member(path) if path is not None else None
        if member is not None:
            path, key = member
            found.setdefault(key.pattern, {}).setdefault((key.numbers, path), []).append(number)
    several = sorted((pattern, members) for pattern, members in found.items() if len(members) > 1)
    labels = [NOWHERE] * len(below)
    for group, (_, members) in enumerate(several):
        for files in members.values():
            for number in files:
                labels[number] = group
    usages, _, _ = chunks.usage(ledger.versions, ledger.sizes, labels, len(several))
    for (pattern, members), usage in zip(several, usages, strict=True):
        ordered = sorted(members.items())
        growth = chunks.growth([[ledger.versions[each] for each in files] for _, files in ordered])
        yield Series(
            pattern,
            usage,
            tuple(
                Member(
                    path,
                    numbers,
                    max(ledger.files[each].mtime_ns for each in files),
                    sum(ledger.sizes[each] for each in files),
                    grown,
                )
                for ((numbers, path), files), grown in zip(ordered, growth, strict=True)
            ),
        )


def unlearned(store: Path, inside: bytes) -> tuple[list[int], list[int]]:
    """(directories, manifests) at or below *inside* that only the remote knows. Raises NameMissing, StoreError."""
    with Survey(store / "catalog.db") as survey:
        directories, manifests = survey.unlearned(survey.resolve(inside))
        return list(directories), manifests
