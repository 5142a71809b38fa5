"""Attributes of inodes as values: what stat shows, what a setattr asks for, and what follows from it."""

from __future__ import annotations

import stat
from dataclasses import dataclass

from ckptfs.ids import Inode
from ckptfs.local.catalog.names import InodeRow

SET_ID_BITS = stat.S_ISUID | stat.S_ISGID


@dataclass(frozen=True)
class Attributes:
    """What stat shows."""

    ino: Inode
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class Caller:
    """Who asks."""

    uid: int
    gid: int


@dataclass(frozen=True)
class AttributeChange:
    """Fields of a setattr; None leaves one as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None

    def columns(self, row: InodeRow, *, privileged: bool) -> dict[str, int]:
        """The columns of *row* that change, times of change aside; empty when nothing does.

        No field at all is a chown to nobody new.
        """
        columns: dict[str, int] = {}
        if self.mode is not None:
            columns["mode"] = stat.S_IFMT(row.mode) | stat.S_IMODE(self.mode)
            if self.size is not None and not privileged:
                columns["mode"] &= ~SET_ID_BITS  # the kernel sends along what it thinks the truncation leaves
        if self.uid is not None or self.gid is not None or self == AttributeChange():
            columns["uid"] = row.uid if self.uid is None else self.uid
            columns["gid"] = row.gid if self.gid is None else self.gid
            if not stat.S_ISDIR(row.mode) and self.mode is None:
                columns["mode"] = _after_chown(row.mode)
        if self.atime_ns is not None:
            columns["atime_ns"] = _clamped(self.atime_ns)
        if self.mtime_ns is not None:
            columns["mtime_ns"] = _clamped(self.mtime_ns)
        return columns


def _after_chown(mode: int) -> int:
    """*mode* without S_ISUID and, where the group may execute, without S_ISGID."""
    return mode & ~stat.S_ISUID & ~(stat.S_ISGID if mode & stat.S_IXGRP else 0)


def _clamped(time_ns: int) -> int:
    """*time_ns* within the catalog's 63 bits, 1677 to 2262; the kernel clamps likewise where a disk's range ends."""
    return max(-(1 << 63), min(time_ns, (1 << 63) - 1))
