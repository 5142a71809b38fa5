"""What is mounted where, as the kernel tells it in /proc/self/mountinfo (proc_pid_mountinfo(5)).

Only reads that table: it never touches a mount, so a dead or hanging one cannot hold up the reader.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CKPTFS_TYPE = "fuse.ckptfs"
"""How the kernel names the type of our mounts (`subtype=ckptfs`)."""

_TABLE = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of the table."""

    mountpoint: str
    """Absolute path, as the mount was made."""
    root: str
    """What of the mounted file system is seen there: `/`, or a directory of it (a bind mount)."""
    type: str
    """File system type, such as `ext4` or `fuse.ckptfs`."""
    source: str
    device: str
    """`major:minor`, as in /proc/*/maps and `st_dev`."""
    options: frozenset[str]
    """Per-mount and per-super-block options."""

    def holds(self, path: str) -> bool:
        """Whether *path* (absolute, no `..`) is the mountpoint or below it."""
        return path == self.mountpoint or path.startswith(self.mountpoint.rstrip("/") + "/")


def mounts() -> list[Mount]:
    """Every mount this process sees, in the order in which they were made: a later one hides an earlier one."""
    return parse(_TABLE.read_bytes())


def parse(table: bytes) -> list[Mount]:
    """The mounts that *table*, the text of a mountinfo file, lists. Lines of another form are left out."""
    found = []
    for line in table.splitlines():
        left, separator, right = line.partition(b" - ")
        fields, tail = left.split(b" "), right.split(b" ")
        if not separator or len(fields) < 6 or len(tail) < 3:
            continue
        found.append(
            Mount(
                mountpoint=_text(fields[4]),
                root=_text(fields[3]),
                type=_text(tail[0]),
                source=_text(tail[1]),
                device=_text(fields[2]),
                options=frozenset(_text(fields[5]).split(",") + _text(tail[2]).split(",")),
            )
        )
    return found


def mount_of(path: str, table: Iterable[Mount] | None = None) -> Mount | None:
    """The mount that shows *path* (absolute and resolved): the deepest, and of equals the last made."""
    best: Mount | None = None
    for mount in mounts() if table is None else table:
        if mount.holds(path) and (best is None or len(mount.mountpoint) >= len(best.mountpoint)):
            best = mount
    return best


def _text(field: bytes) -> str:
    # Space, tab, newline and backslash come as three octal digits.
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match.group(1), 8)]), field))
