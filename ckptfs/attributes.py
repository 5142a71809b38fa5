"""Attributes of inodes as values: what stat shows, what a setattr asks for, and what follows from it."""

from __future__ import annotations

import stat
from dataclasses import dataclass

from ckptfs.ids import Inode
from ckptfs.local.catalog.names import InodeRow

SET_ID_BITS = stat.S_ISUID | stat.S_ISGID
CAPABILITIES = b"security.capability"
"""The attribute that lets a program run with some of root's privileges."""


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
    whole: bool
    """Whether all its bytes are on this disk."""


@dataclass(frozen=True)
class Caller:
    """Who asks."""

    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    """Supplementary groups, where they matter."""

    @property
    def privileged(self) -> bool:
        return self.uid == 0


@dataclass(frozen=True)
class AttributeChange:
    """Fields of a setattr; None leaves one as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None

    def columns(self, row: InodeRow, caller: Caller) -> dict[str, int]:
        """The columns of *row* that change, times of change aside; empty when nothing does.

        No field at all is a chown to nobody new, or a write that the kernel did without us.
        """
        columns: dict[str, int] = {}
        if self.mode is not None:
            columns["mode"] = stat.S_IFMT(row.mode) | stat.S_IMODE(self.mode)
            if self.size is not None and not caller.privileged:
                columns["mode"] &= ~SET_ID_BITS  # the kernel sends along what it thinks the truncation leaves
        if self.uid is not None or self.gid is not None or self == AttributeChange():
            columns["uid"] = row.uid if self.uid is None else self.uid
            columns["gid"] = row.gid if self.gid is None else self.gid
            if not stat.S_ISDIR(row.mode) and self.mode is None:
                columns["mode"] = _without_set_id(row, caller)
        if self.atime_ns is not None:
            columns["atime_ns"] = _clamped(self.atime_ns)
        if self.mtime_ns is not None:
            columns["mtime_ns"] = _clamped(self.mtime_ns)
        return columns


def _without_set_id(row: InodeRow, caller: Caller) -> int:
    """The mode of *row* without S_ISUID and, unless it only means mandatory locks to one of the group, S_ISGID."""
    in_group = caller.privileged or row.gid == caller.gid or row.gid in caller.groups
    keeps_sgid = in_group and not row.mode & stat.S_IXGRP
    return row.mode & ~stat.S_ISUID & ~(0 if keeps_sgid else stat.S_ISGID)


def _clamped(time_ns: int) -> int:
    """*time_ns* within the catalog's 63 bits, 1677 to 2262; the kernel clamps likewise where a disk's range ends."""
    return max(-(1 << 63), min(time_ns, (1 << 63) - 1))
