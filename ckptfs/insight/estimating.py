"""What an ordinary directory of checkpoints would take here, found by cutting, hashing and encoding it. Moves nothing.

A sample is of tensors' pieces: the same piece of the same tensor in every state of a series is in it, or in none, so
that what repeats from state to state is found at its true rate without reading the rest. What repeats under another
name (tied weights) is missed at the rate of the sample. Files cut by content are read whole, and encoded by sample.

Deltas are tried as `replica.bases` finds bases for them: against a state in which the piece was stored whole, for as
long as they are cheaper than the average of what that began.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptfs.config import Tuning, usable_cores
from ckptfs.encoding.codec import delta_shares, encode, encode_delta
from ckptfs.errors import FormatError
from ckptfs.formats.base import FileSource, Piece
from ckptfs.formats.cutting import pieces
from ckptfs.formats.recognise import recognise
from ckptfs.ids import digest
from ckptfs.insight.listing import files_below
from ckptfs.local.images import data_spans
from ckptfs.pieces import Pieces, pays
from ckptfs.series import series_member

SAMPLED_BYTES = 4 << 30
"""About so much is encoded unless told otherwise: a minute on two cores."""

_BATCH_BYTES = 32 << 20
"""Raw bytes in memory at once; as much again for what they are compared with."""

Tell = Callable[[int, int], None]
"""Called now and then with how many bytes were passed, of how many."""


@dataclass
class Estimate:
    """One series, or all files that are in none."""

    pattern: bytes | None
    """None: files in no series."""
    files: int = 0
    states: set[bytes] = field(default_factory=set)
    logical_bytes: int = 0
    """Sizes of the files."""
    data_bytes: int = 0
    """Without holes ..."""
    sampled_bytes: int = 0
    """... and so much of it was looked at. The rest is of that:"""
    distinct_bytes: int = 0
    compressed_bytes: int = 0
    delta_bytes: int = 0

    def document(self) -> dict[str, Any]:
        """With the last three scaled to all of the data."""
        scale = self.data_bytes / self.sampled_bytes if self.sampled_bytes else 0.0
        return {
            "pattern": None if self.pattern is None else os.fsdecode(self.pattern),
            "files": self.files,
            "states": len(self.states),
            "logical_bytes": self.logical_bytes,
            "sampled_bytes": self.sampled_bytes,
            "deduplicated_bytes": round(self.distinct_bytes * scale),
            "compressed_bytes": round(self.compressed_bytes * scale),
            "delta_bytes": round(self.delta_bytes * scale),
        }


@dataclass(frozen=True)
class Estimates:
    share: float
    """Of tensors' pieces that were looked at; 1.0: all, and the sizes are exact."""
    series: tuple[Estimate, ...]
    skipped: tuple[str, ...]
    """Files that could not be read, and why."""

    def document(self) -> dict[str, Any]:
        return {
            "sample": self.share,
            "series": [each.document() for each in self.series],
            "skipped": list(self.skipped),
        }


class _File(NamedTuple):
    path: str
    below: bytes
    """From the directory."""
    size: int
    pattern: bytes | None
    """Of its series."""
    state: bytes
    numbers: tuple[int, ...]


class _Wanted(NamedTuple):
    """A piece to be looked at."""

    piece: Piece
    keys: tuple[bytes, ...]
    """What the same piece has in another state: with its file's name in the series, and without; none of no tensor."""


class _Keyframe(NamedTuple):
    """Where a piece was stored whole last, and what that took together with the deltas since."""

    path: str
    offset: int
    encoded_bytes: int
    chunks: int


def estimate(
    top: str, share: float | None = None, tuning: Tuning | None = None, tell: Tell = lambda done, of: None
) -> Estimates:
    """What the files below *top* would take. Raises OSError when that cannot be read.

    *share* of the tensors' pieces is looked at; by default as much as makes about `SAMPLED_BYTES`.
    """
    skipped: list[str] = []
    files = sorted(_listed(top, skipped), key=lambda file: (file.pattern or b"", file.numbers, file.below))
    total = sum(file.size for file in files)
    if share is None:
        share = min(1.0, SAMPLED_BYTES / total) if total else 1.0
    work = _Work(share, tuning or Tuning(), tell, total)
    try:
        for file in files:
            work.add(file)
    finally:
        work.close()
    found = sorted(work.found.values(), key=lambda each: (each.pattern is None, each.pattern))
    return Estimates(share, tuple(found), (*skipped, *work.skipped))


def _listed(top: str, skipped: list[str]) -> Iterator[_File]:
    """The files, each once, and why some are not among them."""
    files = list(files_below(top, lambda error: skipped.append(str(error))))
    members = {below: series_member(below) for _, below in files}
    states: dict[bytes, set[bytes]] = {}
    for member in members.values():
        if member is not None:
            states.setdefault(member[1].pattern, set()).add(member[0])
    seen: set[tuple[int, int]] = set()
    for path, below in files:
        try:
            status = os.stat(path)
        except OSError as error:
            skipped.append(str(error))
            continue
        if (status.st_dev, status.st_ino) in seen:  # a further name of a file
            continue
        seen.add((status.st_dev, status.st_ino))
        member = members[below]
        if member is None or len(states[member[1].pattern]) < 2:
            yield _File(path, below, status.st_size, None, below, ())
        else:
            yield _File(path, below, status.st_size, member[1].pattern, member[0], member[1].numbers)


class _Work:
    """What was seen so far, file by file, in the order in which they would have been saved."""

    def __init__(self, share: float, tuning: Tuning, tell: Tell, total: int) -> None:
        self.found: dict[bytes | None, Estimate] = {}
        self.skipped: list[str] = []
        self._share = share
        self._tuning = tuning
        self._tell = tell
        self._total = total
        self._passed = 0
        self._seen: set[bytes] = set()
        self._keyframes: dict[bytes, _Keyframe] = {}
        self._threads = ThreadPoolExecutor(usable_cores(), "estimate")

    def close(self) -> None:
        self._threads.shutdown()

    def add(self, file: _File) -> None:
        found = self.found.setdefault(file.pattern, Estimate(file.pattern))
        found.files += 1
        found.states.add(file.state)
        found.logical_bytes += file.size
        before = self._passed
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._cut(file, fd, found)
            finally:
                os.close(fd)
        except (OSError, FormatError) as error:
            self.skipped.append(str(error) if isinstance(error, OSError) else f"{file.path}: {error}")
        self._passed = before + file.size
        self._tell(self._passed, self._total)

    def _cut(self, file: _File, fd: int, found: Estimate) -> None:
        source = FileSource(fd, file.size)
        tensors = recognise(source)
        spans = data_spans(fd, file.size)
        batch: list[_Wanted] = []
        waiting = 0
        names = Pieces(file.below, tensors)
        for piece in pieces(file.size, tensors, spans, self._tuning, source.read):
            length = piece.end - piece.start
            found.data_bytes += length
            self._passed += length
            keys = names.keys(piece.start, length, piece.dtype)
            if not tensors or self._is_sampled(keys[-1] if keys else b"%d" % piece.start):
                batch.append(_Wanted(piece, keys))
                waiting += length
            if waiting >= _BATCH_BYTES:
                self._look(file, source, batch, found, is_opaque=not tensors)
                batch, waiting = [], 0
                self._tell(self._passed, self._total)
        self._look(file, source, batch, found, is_opaque=not tensors)

    def _is_sampled(self, key: bytes) -> bool:
        return self._share >= 1 or int.from_bytes(digest(key)[:4], "little") < self._share * (1 << 32)

    def _look(
        self, file: _File, source: FileSource, batch: Sequence[_Wanted], found: Estimate, *, is_opaque: bool
    ) -> None:
        """Count *batch*: first who is new, in order, and then what the new ones take."""

        def read(wanted: _Wanted) -> tuple[bytes, bytes]:
            data = source.read(wanted.piece.start, wanted.piece.end - wanted.piece.start)
            return data, digest(data)

        fresh: list[tuple[_Wanted, bytes, _Keyframe | None]] = []
        for wanted, (data, name) in zip(batch, self._threads.map(read, batch), strict=True):
            if is_opaque and not self._is_sampled(name):
                continue
            found.sampled_bytes += len(data)
            if name in self._seen:
                continue
            self._seen.add(name)
            found.distinct_bytes += len(data)
            keyframes = (self._keyframes[key] for key in wanted.keys if key in self._keyframes)
            fresh.append((wanted, data, next(keyframes, None)))
        sizes = self._threads.map(lambda each: _encoded(each[1], each[0].piece.dtype, each[2]), fresh)
        for (wanted, _, before), (alone, delta) in zip(fresh, sizes, strict=True):
            found.compressed_bytes += alone
            found.delta_bytes += alone if delta is None else delta
            if delta is None or before is None:
                keyframe = _Keyframe(file.path, wanted.piece.start, alone, 1)
            else:
                keyframe = before._replace(encoded_bytes=before.encoded_bytes + delta, chunks=before.chunks + 1)
            self._keyframes.update(dict.fromkeys(wanted.keys, keyframe))


def _encoded(data: bytes, dtype: str | None, keyframe: _Keyframe | None) -> tuple[int, int | None]:
    """Bytes of *data* compressed, and as a delta against *keyframe* where it would be stored as one."""
    alone = len(encode(data, dtype)[1])
    if keyframe is None:
        return alone, None
    try:
        with open(keyframe.path, "rb", buffering=0) as file:
            base = os.pread(file.fileno(), len(data), keyframe.offset)
    except OSError:
        return alone, None
    if len(base) != len(data):  # the file was changed meanwhile
        return alone, None
    whole, delta = delta_shares(data, base, dtype)
    if not pays(whole, delta, len(data), keyframe.encoded_bytes / keyframe.chunks):
        return alone, None
    return alone, len(encode_delta(data, base, dtype)[1])
