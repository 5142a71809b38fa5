"""What was promised of a tree when the power is cut, as a program that saves in it knows.

A `Promises` makes the calls itself and notes each with the position of the disk's log before and after it
(`tests.support.testdisk`). `check` then says whether a tree that was found after a cut at some position can be:

- the names, modes and attributes are those of one moment, not before the last one that an fsync, or the time that
  unasked flushes take, made durable, and not after the cut;
- a file has one of its versions since the last durable one. What a durable version was replaced by, renamed over it or
  written into the emptied file, is there whole or not at all; a new file, or one that was changed in place, may have
  any of the bytes that were written, and zeros where none are.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

Names = dict[str, "File | None"]
"""Path -> the file; None for a directory."""
Mark = tuple[int, bytes]
"""Permissions, and the extended attribute `user.mark`."""
UNMARKED: Mark = (0o644, b"")
_SYNC_FLAGS = {"O_SYNC": os.O_SYNC, "O_DSYNC": os.O_DSYNC}
FLUSHES = ("fsync", "fdatasync", "msync", "O_SYNC", "O_DSYNC")
"""How a program makes durable what it writes; the last two with each write."""


@dataclass
class Version:
    data: bytes
    began: int
    """Where the log was before the call that made it."""
    first: int
    """Index of the version with which its file was last emptied to be written anew; 0 if never."""
    finished: bool = False
    """Closed, or fsynced, as it is."""


@dataclass(eq=False)
class File:
    versions: list[Version]
    durable: list[tuple[int, int]] = field(default_factory=list)
    """(position, version): who cuts the power from there on finds this or a later one."""

    def latest(self, position: int) -> int:
        return max(number for number, each in enumerate(self.versions) if each.began <= position or number == 0)

    def promised(self, position: int) -> int:
        return max((version for where, version in self.durable if where <= position), default=-1)


@dataclass
class _Moment:
    began: int
    names: Names
    over: dict[str, list[tuple[int, File]]]
    """Path -> the files that were renamed over there, and where the log was before that, the newest last."""
    marks: dict[File, Mark] = field(default_factory=dict)


    def marks_of(self, path: str) -> list[Mark]:
        """Of the file there, and of those that may come back."""
        files = [self.names[path], *(file for _, file in self.over.get(path, ()))]
        return [self.marks.get(file, UNMARKED) for file in files if file is not None]


@dataclass(frozen=True)
class _Cut:
    position: int
    until: int


class Promises:
    """Saves below *root*. *position* tells where the disk's log is."""

    def __init__(self, root: Path, position: Callable[[], int], unasked_s: float) -> None:
        """*unasked_s* is how long a closed file waits at most until it is durable."""
        self._root = root
        self._position = position
        self._unasked_s = unasked_s
        self._moments = [_Moment(0, {}, {})]
        self._durable: list[tuple[int, int]] = []
        self.began = position()

    # Calls

    def write(self, path: str, data: bytes, *, fsync: str = "", step: int = 30_000) -> None:
        """Create, or empty and write anew; *fsync* is "" or one of `FLUSHES`, as everywhere."""
        file = self._names.get(path)
        began = self._position()
        flags = os.O_RDWR if fsync == "msync" else os.O_WRONLY
        fd = os.open(self._root / path, flags | _SYNC_FLAGS.get(fsync, 0) | os.O_CREAT | os.O_TRUNC, 0o644)
        if file is None:
            file = File([Version(b"", began, 0)])
            self._name(began, {path: file})
        else:
            file.versions.append(Version(b"", began, len(file.versions)))
        if fsync in _SYNC_FLAGS:  # each step is durable as it is made, so the file is empty from here on
            file.versions[-1].finished = True
            self._durable_now(file, len(self._moments) - 1)
        self._fill(fd, file, data, step, fsync)
        self._close(fd, file, fsync)

    def append(self, path: str, data: bytes, *, fsync: str = "") -> None:
        flags = os.O_RDWR if fsync == "msync" else os.O_WRONLY
        fd = os.open(self._root / path, flags | os.O_APPEND | _SYNC_FLAGS.get(fsync, 0))
        file = self._file(path)
        self._fill(fd, file, data, 10_000, fsync)
        self._close(fd, file, fsync)

    def append_twice(self, path: str, data: bytes, more: bytes) -> None:
        """With an fsync in between, and none at the end."""
        fd = os.open(self._root / path, os.O_WRONLY | os.O_APPEND)
        file = self._file(path)
        self._fill(fd, file, data, 10_000)
        file.versions[-1].finished = True
        self._flush(fd, file, "fsync")
        self._fill(fd, file, more, 10_000)
        self._close(fd, file, "")

    def overwrite(self, path: str, offset: int, data: bytes, *, fsync: str = "") -> None:
        fd = os.open(self._root / path, os.O_RDWR | _SYNC_FLAGS.get(fsync, 0))
        file = self._file(path)
        before, began = file.versions[-1], self._position()
        os.pwrite(fd, data, offset)
        whole = before.data[:offset].ljust(offset, b"\0") + data + before.data[offset + len(data) :]
        file.versions.append(Version(whole, began, before.first))
        self._close(fd, file, fsync)

    def rename(self, old: str, new: str) -> None:
        """Of a file, or of a directory with all that is in it."""
        began = self._position()
        os.rename(self._root / old, self._root / new)
        names, moment = dict(self._names), self._moments[-1]
        over = {path: files for path, files in moment.over.items() if path != old}
        replaced = names.get(new)
        if replaced is not None:
            over[new] = [*over.get(new, ()), (began, replaced)]
        for path in [each for each in names if each == old or each.startswith(f"{old}/")]:
            names[new + path[len(old) :]] = names.pop(path)
        self._moments.append(replace(moment, began=began, names=names, over=over))

    def make_link(self, path: str, target: str) -> None:
        """A symbolic link: what it says is there with its name."""
        began = self._position()
        os.symlink(target, self._root / path)
        file = File([Version(link_bytes(target), began, 0, finished=True)], [(0, 0)])
        self._name(began, {path: file})

    def add_name(self, old: str, new: str) -> None:
        """A hard link, under a name that is free."""
        began = self._position()
        os.link(self._root / old, self._root / new, follow_symlinks=False)
        self._name(began, {new: self._file(old)})

    def mark(self, path: str, mode: int, attribute: bytes) -> None:
        """Change the permissions of a file, and then an extended attribute."""
        file = self._file(path)
        for change in (0, 1):
            began, moment = self._position(), self._moments[-1]
            mark = moment.marks.get(file, UNMARKED)
            if change == 0:
                os.chmod(self._root / path, mode)
                mark = (mode, mark[1])
            else:
                os.setxattr(self._root / path, "user.mark", attribute)
                mark = (mark[0], attribute)
            self._moments.append(replace(moment, began=began, marks={**moment.marks, file: mark}))

    def make_directory(self, path: str) -> None:
        began = self._position()
        os.mkdir(self._root / path)
        self._name(began, {path: None})

    def remove(self, path: str) -> None:
        """A file, or a directory with all that is in it, step by step."""
        for each in sorted((p for p in self._names if p.startswith(f"{path}/")), reverse=True):
            self.remove(each)
        began = self._position()
        (os.rmdir if self._names[path] is None else os.unlink)(self._root / path)
        names, moment = dict(self._names), self._moments[-1]
        del names[path]
        over = {each: files for each, files in moment.over.items() if each != path}
        self._moments.append(replace(moment, began=began, names=names, over=over))

    def fsync_directory(self, path: str = "") -> None:
        moment = len(self._moments) - 1
        fd = os.open(self._root / path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self._durable.append((self._position(), moment))

    def rest(self, sleep: Callable[[float], None]) -> None:
        """So long that everything is durable unasked."""
        sleep(self._unasked_s)
        here = self._position()
        self._durable.append((here, len(self._moments) - 1))
        for file in {id(each): each for each in self._names.values() if each is not None}.values():
            file.durable.append((here, len(file.versions) - 1))

    def paths(self) -> list[str]:
        return sorted(self._names)

    def now(self) -> dict[str, bytes | None]:
        """The tree as the program knows it."""
        return {path: None if file is None else file.versions[-1].data for path, file in self._names.items()}

    # Checking

    def check(
        self,
        found: Mapping[str, bytes | None],
        position: int,
        until: int | None = None,
        marks: Mapping[str, Mark] | None = None,
    ) -> list[str]:
        """What is wrong with *found*, path -> bytes or None for a directory, after a cut at *position*.

        With *until*, the cut was somewhere from *position* to there. *marks* are those of the files that were found; a
        symbolic link is a file that holds `link_bytes`.
        """
        cut = _Cut(position, position if until is None else until)
        least = max((moment for where, moment in self._durable if where <= position), default=0)
        possible = [each for each in self._moments[least:] if each.began <= cut.until]
        wrong = [f"no moment had these names: {sorted(found)}; the last had {sorted(possible[-1].names)}"]
        for moment in possible:
            if moment.names.keys() != found.keys():
                continue
            if any((moment.names[path] is None) != (data is None) for path, data in found.items()):
                continue
            if marks is not None:
                unlike = [path for path, mark in marks.items() if mark not in moment.marks_of(path)]
                if unlike:
                    wrong = [f"{unlike[0]} has {marks[unlike[0]]}, the last such moment {moment.marks_of(unlike[0])}"]
                    continue
            wrong = [
                f"{path} has {len(data)} bytes that it cannot have; {self._history(moment, path, data)}"
                for path, data in found.items()
                if data is not None and not self._may_be(moment, path, data, cut)
            ]
            if not wrong:
                break
        return wrong

    def _history(self, moment: _Moment, path: str, data: bytes) -> str:
        told = []
        for where, file in [*moment.over.get(path, ()), (0, moment.names[path])]:
            assert file is not None
            told.append(
                f"renamed over at {where}, durable at {file.durable}, versions "
                + ", ".join(
                    f"{number}{'=' if each.data == data else ''}: {len(each.data)} bytes at {each.began}, "
                    f"since {each.first}{' finished' if each.finished else ''}"
                    for number, each in enumerate(file.versions)
                )
            )
        return "\n  ".join(["what was there:", *told])

    def _may_be(self, moment: _Moment, path: str, data: bytes, cut: _Cut) -> bool:
        file = moment.names[path]
        assert file is not None
        under: list[File] = []
        protected = False
        for where, each in moment.over.get(path, ()):
            under.append(each)
            protected = protected or each.promised(where) >= 0
        if _is_version(file, data, cut, protected):
            return True
        # Versions that were replaced may come back as long as none of the later ones is durable.
        while under and file.promised(cut.position) < 0:
            file = under.pop()
            if _is_version(file, data, cut, any(each.promised(cut.position) >= 0 for each in under)):
                return True
        return False

    # Within

    @property
    def _names(self) -> Names:
        return self._moments[-1].names

    def _file(self, path: str) -> File:
        file = self._names[path]
        assert file is not None
        return file

    def _name(self, began: int, new: Names) -> None:
        moment = self._moments[-1]
        over = {path: files for path, files in moment.over.items() if path not in new}
        self._moments.append(replace(moment, began=began, names={**moment.names, **new}, over=over))

    def _fill(self, fd: int, file: File, data: bytes, step: int, flush: str = "") -> None:
        for at in range(0, len(data), step):
            before, began, moment = file.versions[-1], self._position(), len(self._moments) - 1
            os.write(fd, data[at : at + step])
            file.versions.append(Version(before.data + data[at : at + step], began, before.first))
            if flush in _SYNC_FLAGS:
                self._durable_now(file, moment)

    def _close(self, fd: int, file: File, fsync: str) -> None:
        file.versions[-1].finished = True
        self._flush(fd, file, fsync)
        os.close(fd)

    def _flush(self, fd: int, file: File, how: str) -> None:
        moment = len(self._moments) - 1
        if how == "msync":
            if not file.versions[-1].data:
                return  # nothing to map
            with mmap.mmap(fd, 0) as mapped:
                mapped[0] = mapped[0]
                mapped.flush()
            # The bytes alone: that a file which was emptied has them is in the catalog.
            here, first = self._position(), file.versions[-1].first
            if first == 0 or file.promised(here) >= first:
                file.durable.append((here, len(file.versions) - 1))
        elif how in ("fsync", "fdatasync"):
            getattr(os, how)(fd)
            self._durable_now(file, moment)
        elif how:
            # With passthrough the daemon does not know that the bytes are on the disk, and would take back what they
            # replace: whole old or whole new, as without any flush.
            os.fsync(fd)
            self._durable_now(file, moment)

    def _durable_now(self, file: File, moment: int) -> None:
        here = self._position()
        file.durable.append((here, len(file.versions) - 1))
        self._durable.append((here, moment))


def link_bytes(target: str) -> bytes:
    """How a symbolic link is told from a file with bytes."""
    return b"-> " + target.encode()


def _is_version(file: File, data: bytes, cut: _Cut, protected: bool) -> bool:
    """Whether *file* may have *data*. *protected*: it was renamed over something durable."""
    promised, latest = file.promised(cut.position), file.latest(cut.until)
    for number in range(max(promised, 0), latest + 1):
        version = file.versions[number]
        if version.data == data and (version.finished or number == promised):
            return True
        emptied = version.first > 0 and file.promised(file.versions[version.first].began) >= 0
        whole = protected if version.first == 0 else emptied
        # In place: from a version that was whole on, byte by byte; from nothing on, where nothing has to be whole.
        for base in range(version.first, number + 1):
            is_base = base == promised or (base > promised and file.versions[base].finished)
            if is_base and base >= promised and _is_mixture(data, file.versions[base : number + 1], zeros=False):
                return True
        if not whole and promised < version.first and _is_mixture(data, file.versions[version.first : number + 1]):
            return True
        if not whole and promised < 0 and _is_mixture(data, file.versions[: number + 1]):
            return True
    return False


def _is_mixture(data: bytes, versions: list[Version], *, zeros: bool = True) -> bool:
    """Whether each byte is that of one of *versions*, or zero where it was not written yet."""
    lengths = [len(each.data) for each in versions]
    if not (min(lengths) if not zeros else 0) <= len(data) <= max(lengths):
        return False
    found = np.frombuffer(data, np.uint8)
    known = np.zeros(len(data), bool)
    if zeros:
        known = found == 0
    else:
        known[min(lengths) :] = found[min(lengths) :] == 0  # a later block of what was added came, an earlier did not
    for each in versions:
        length = min(len(each.data), len(data))
        known[:length] |= found[:length] == np.frombuffer(each.data[:length], np.uint8)
    return bool(known.all())
