"""A plain directory and one of a mount, in which the same operations happen: what they return, refuse and leave.

Not compared, because no promise is made: access times, the size of a directory, positions in it, how many blocks a file
takes (only whether it takes any), when exactly a store through a map changes mtime and ctime before it is synced, and
times of a fifo (what goes through one is not told).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

from tests.posix.steps import NAME_STEPS, Absent, Step, Tree

_TICK_NS = 20_000_000
_SET_TIMES_BELOW_NS = 10**12
"""What utimens sets here; the present is far above."""
_Times = tuple[int, int]
_BY_NAME = frozenset(NAME_STEPS) - {"close"} | {"relink"}


class Twins:
    """A plain directory and one of a mount, in which the same happens."""

    def __init__(self, plain: Path, mounted: Path) -> None:
        self.roots = (plain / "top", mounted / "top")  # what is above it is known, too
        self.performed = 0
        self._history: list[str] = []
        self._begun_ns = time.time_ns()
        self._trees = [Tree(str(root)) for root in self.roots]
        self._seen: dict[tuple[int, int], list[_Times]] = {}
        """What both sides last showed of a file, by its two inode numbers (a plain directory uses them again)."""
        self._vague: set[tuple[int, int]] = set()
        """Files whose times and blocks a store through a map may change at any moment."""
        self._allocated: set[tuple[int, int]] = set()
        """Files of which ranges may have been allocated without being written."""
        for root in self.roots:
            (root / "d" / "e").mkdir(parents=True)
            for name in ("a", "b", "d/a"):
                (root / name).write_bytes(name.encode() * 3000)
            for directory in (root, root.parent):
                directory.chmod(0o755)

    def perform(self, step: Step) -> None:
        """Do it on both; AssertionError when anything differs."""
        self._history.append(repr(step))
        self._begun_ns = time.time_ns()
        mounted = _do(self._trees[1], step)
        if mounted is Absent or (step.name == "fallocate" and mounted == "ENOTSUP"):  # the one thing it may refuse
            del self._history[-1]
            return
        results = [_do(self._trees[0], step), mounted]
        if step.name == "fallocate":
            self._allocated.add(self._file_of(step))
        if step.name in ("seek_data", "seek_hole") and self._may_seek_otherwise(step, results):
            results[0] = mounted
        self.performed += 1
        self._equal(results, "did")
        if step.name == "map" and results[0] == "shared":
            first, second = (os.fstat(tree.maps[-1][2]).st_ino for tree in self._trees)
            self._vague.add((first, second))
        self._look_at(step)

    def compare_everything(self) -> None:
        """Every name, attribute and byte below both roots, and every descriptor's stat."""
        plain, mounted = (self._below(side, "") for side in (0, 1))
        self._equal([list(plain), list(mounted)], "holds")
        for name in plain:
            self._equal([plain[name], mounted[name]], f"shows of {name}")
        for pair in zip(*(tree.fds + tree.directories for tree in self._trees), strict=True):
            self._equal([os.fstat(fd) for fd in pair], "shows of a descriptor")

    def close_all(self) -> None:
        """Nothing is open or mapped any more."""
        self._history.append("close_all")
        for tree in self._trees:
            tree.end()

    def remove(self) -> None:
        for root in self.roots:
            shutil.rmtree(root.parent)

    # Within

    def _file_of(self, step: Step) -> tuple[int, int]:
        first, second = (os.fstat(tree.fd(step.first)).st_ino for tree in self._trees)
        return first, second

    def _may_seek_otherwise(self, step: Step, results: list[Any]) -> bool:
        """Whether what the mount found is as true as what the plain directory found.

        A file system may say that it keeps no holes, and a mount does for files that it serves to writers. And a range
        that was allocated and never written is data while pages of it are in memory, a hole when they are not: that
        changes with writing out, with fadvise (which fuse does not hand on), and from one run on ext4 to the next.
        """
        found, fd = results[1], self._trees[1].fd(step.first)
        if found == (step.offset if step.name == "seek_data" else os.fstat(fd).st_size):
            return True
        nothing = "ENXIO" if step.name == "seek_data" else 0  # only holes follow
        if self._file_of(step) not in self._allocated or any(
            isinstance(each, str) and each != nothing for each in results
        ):
            return False
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            data = file.read()
        if step.name == "seek_hole":
            return not any(data[found : found + 1])
        return not any(data[step.offset : len(data) if found == nothing else found])

    def _equal(self, found: list[Any], what: str) -> None:
        """Two results, lists of results, or stats; of those what must be equal, times aside, and how times changed."""
        if all(isinstance(each, os.stat_result) for each in found):
            vague = (found[0].st_ino, found[1].st_ino) in self._vague
            self._equal([_shown(status, room=not vague) for status in found], what)
            self._same_changes(found, what)
        elif all(isinstance(each, list) for each in found) and len(found[0]) == len(found[1]):
            for pair in zip(*found, strict=True):
                self._equal(list(pair), what)
        elif found[0] != found[1]:
            steps = "\n  ".join(self._history[-60:])
            raise AssertionError(f"the mount {what} {found[1]}, a plain directory {found[0]}, after\n  {steps}")

    def _same_changes(self, pair: list[os.stat_result], what: str) -> None:
        """mtime and ctime changed on both or on neither since the last look.

        On some disks a second change within a tick of the kernel's clock shows, on others it does not: then what did
        not change says a time that is not a tick old.
        """
        key = pair[0].st_ino, pair[1].st_ino
        if key in self._vague or stat.S_ISFIFO(pair[0].st_mode):
            return
        now = [(status.st_mtime_ns, status.st_ctime_ns) for status in pair]
        before = self._seen.get(key, now)
        self._seen[key] = now
        self._equal([side[0] if side[0] < _SET_TIMES_BELOW_NS else "now" for side in now], f"{what}: mtime")
        recent_ns = self._begun_ns - _TICK_NS
        for index, kind in enumerate(("mtime", "ctime")):
            changed = [side[index] != old[index] for side, old in zip(now, before, strict=True)]
            if changed[0] != changed[1] and now[changed.index(False)][index] < recent_ns:
                self._equal(changed, f"{what}: {kind} changed")

    def _look_at(self, step: Step) -> None:
        """What the step may have changed: the names or the descriptors it could have taken."""
        if step.name in _BY_NAME:
            for name in sorted({step.path, step.other, os.path.dirname(step.path) or "."}):
                self._equal([_lstat(tree.at(name)) for tree in self._trees], f"shows of {name}")
        elif self._trees[0].fds:
            for number in {step.first, step.second}:
                self._equal([os.fstat(tree.fd(number)) for tree in self._trees], "shows of a descriptor")

    def _below(self, side: int, name: str) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for child in sorted(os.listdir(self._trees[side].at(name))):
            below = f"{name}/{child}"
            path = self._trees[side].at(below)
            status = os.lstat(path)
            found[below] = [status]
            if stat.S_ISLNK(status.st_mode):
                found[below].append(os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                found[below].append(_xattrs(path))
                found |= self._below(side, below)
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    found[below] += [_xattrs(path), file.read()]
        return found


def _do(tree: Tree, step: Step) -> Any:
    """What it returned, the name of the errno, or Absent."""
    try:
        return getattr(tree, step.name)(step)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except Absent:
        return Absent


def _shown(status: os.stat_result, *, room: bool) -> tuple[Any, ...]:
    """What must be equal, times aside; with *room* also whether it takes any on the disk."""
    kind = stat.S_IFMT(status.st_mode)
    size = None if kind == stat.S_IFDIR else status.st_size
    takes_room = status.st_blocks > 0 if room and kind == stat.S_IFREG else None
    return oct(status.st_mode), status.st_nlink, status.st_uid, status.st_gid, status.st_rdev, size, takes_room


def _lstat(path: str) -> os.stat_result | str:
    try:
        return os.lstat(path)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def _xattrs(path: str) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith(("user.", "trusted."))}
