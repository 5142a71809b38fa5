"""Fetching before anybody reads: every file below a path, made whole on this disk, several at a time.

Who calls: the event loop's thread. Cancelling leaves what was fetched; the next call goes on from there.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio

from ckptfs.errors import CkptfsError, ContentUnavailable, StoreFull
from ckptfs.filesystem import FileSystem
from ckptfs.ids import Inode
from ckptfs.local.room import Room

_FILES_AT_ONCE = 4
"""So that many small files do not cost a round trip each; requests are bounded for all files together."""

_WHAT_TO_DO = (
    "Make room on that disk, or prefetch less. Reading works without: what does not fit comes from the remote each time"
)


@dataclass
class Fetching:
    """How far a prefetch is; bytes are those of the files, before encoding."""

    files: int = 0
    total_bytes: int = 0
    fetched_files: int = 0
    fetched_bytes: int = 0
    started_s: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the rate so far; None while there is none."""
        elapsed = time.monotonic() - self.started_s
        if not self.fetched_bytes or elapsed < 1.0:
            return None
        return (self.total_bytes - self.fetched_bytes) / (self.fetched_bytes / elapsed)


async def prefetch(filesystem: FileSystem, top: Inode, room: Room, progress: Fetching) -> None:
    """Return when every regular file at or below *top* is whole here; *progress* is kept up to date meanwhile.

    What is damaged on the remote keeps nothing else from coming. Raises NameMissing, ContentUnavailable with the path
    of a file that the remote does not deliver, StoreFull, at once when all of it does not fit in *room* now, and later
    when others took that meanwhile.
    """
    progress.started_s = time.monotonic()
    files = [ino for ino in await _files_below(filesystem, top) if not filesystem.files.is_whole(ino)]
    progress.files = len(files)
    progress.total_bytes = sum([(await filesystem.getattr(ino)).size for ino in files])
    await _check_room(filesystem, files, room)
    left = iter(files)
    failures: dict[Inode, CkptfsError | OSError] = {}

    def landed(count: int) -> None:
        progress.fetched_bytes += count

    async def work() -> None:
        for ino in left:
            try:
                await filesystem.files.make_whole(ino, landed)
                progress.fetched_files += 1
            except (CkptfsError, OSError) as error:
                failures[ino] = error
            if not all(map(_is_damage, failures.values())):
                return

    async with trio.open_nursery() as nursery:
        for _ in range(_FILES_AT_ONCE):
            nursery.start_soon(work)
    failures = {ino: error for ino, error in failures.items() if filesystem.store.names.parents(ino)}  # else: removed
    if failures:
        raise _explained(failures, filesystem, progress)


async def _check_room(filesystem: FileSystem, files: Sequence[Inode], room: Room) -> None:
    """Raises StoreFull when what is missing of *files* does not fit."""
    most_bytes = sum(filesystem.files.missing_at_most(ino) for ino in files)
    if most_bytes <= room.free_bytes():  # the usual case, without looking into every file for holes
        return
    needed_bytes = sum([await filesystem.files.missing(ino) for ino in files])
    free_bytes = room.free_bytes()
    if needed_bytes > free_bytes:
        raise StoreFull(
            f"this needs {_size(needed_bytes)}, and {_size(free_bytes)} of the store's disk may be used for it "
            f"({_size(room.reserve_bytes())} are left to saves). {_WHAT_TO_DO}"
        )


def _is_damage(error: Exception) -> bool:
    """Whether it says nothing of other files."""
    return isinstance(error, ContentUnavailable) and error.is_damage


def _explained(failures: Mapping[Inode, Exception], filesystem: FileSystem, progress: Fetching) -> Exception:
    """The failure to tell: what concerns all files before what concerns one."""
    ino, error = min(failures.items(), key=lambda each: _is_damage(each[1]))
    explained: Exception = error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        came, total = _size(progress.fetched_bytes), _size(progress.total_bytes)
        explained = StoreFull(f"the store's disk is full now: {came} of {total} came, and stay. {_WHAT_TO_DO}")
    elif isinstance(error, ContentUnavailable):
        path = os.fsdecode(filesystem.store.names.path(ino))
        others = f" (and {len(failures) - 1} more files)" if len(failures) > 1 else ""
        hint = "; `ckptfs scrub --remote` mends what can be" if _is_damage(error) else ""
        explained = ContentUnavailable(f"{path}{others}: {error}{hint}")
    explained.__cause__ = None if explained is error else error
    return explained


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB" if size_bytes < 10 << 30 else f"{size_bytes / (1 << 30):.0f} GiB"


async def _files_below(filesystem: FileSystem, top: Inode) -> list[Inode]:
    """In the order of their paths, each once however many names it has."""
    found: dict[Inode, None] = {}
    work = [top]
    while work:
        ino = work.pop()
        mode = (await filesystem.getattr(ino)).mode
        if stat.S_ISDIR(mode):
            work += [child for _, child in reversed(await filesystem.entries(ino))]
        elif stat.S_ISREG(mode):
            found[ino] = None
    return list(found)
