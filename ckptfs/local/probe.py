"""Whether a directory's file system can carry a store: its kind, its room, and each operation tried for real.

Decides nothing: it reports a refusal and warnings, and the caller (the `mount` command) heeds or overrides them.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptfs.local.allocation import KEEP_SIZE, PUNCH_HOLE, fallocate
from ckptfs.local.mountinfo import mount_of

_NETWORK = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse.ceph", "fuse.ckptfs", "fuse.gcsfuse", "fuse.geesefs",
    "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.seaweedfs",
    "fuse.sshfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs",
    "wekafs",
})  # fmt: skip
"""Where a lock or a shared map is not certain, or a save would go over the wire: not a local disk."""
_MEMORY = frozenset({"ramfs", "rootfs", "tmpfs"})
"""Gone with the machine, and taken from the trainer's memory."""

_BLOCK = 4096
_PROBE_BYTES = 16 * _BLOCK  # large enough that every file system's block or record can be punched out of its middle

_LOW_BYTES = 1 << 30  # less than one small checkpoint


@dataclass(frozen=True)
class Probe:
    """What was found out about a directory."""

    filesystem: str
    """Type as the kernel names it: `ext4`, `xfs`, `fuse.sshfs` ..."""
    free_bytes: int
    """Free for this user."""
    total_bytes: int
    warnings: tuple[str, ...]
    """What works less well here, one sentence each."""
    refusal: str | None
    """Why a store should not lie here, one sentence; None when it may."""


def probe(directory: Path) -> Probe:
    """Find out about *directory*, which exists; a temporary file is made in it and removed again.

    Raises OSError when the directory cannot be examined at all (not writable, for one).
    """
    mount = mount_of(os.path.realpath(directory))
    kind = mount.type if mount is not None else "unknown"
    room = os.statvfs(directory)
    warnings: list[str] = []
    refusals: list[str] = []
    if kind in _NETWORK:
        refusals.append(f"{kind} is a network file system: the store must be on a local disk")
    elif kind in _MEMORY:
        refusals.append(f"{kind} is memory, not a disk: what is not uploaded is lost with the machine")
    elif kind == "overlay":
        warnings.append(
            "overlayfs: memory maps cannot be told from free files here, so saves go through the daemon "
            "and are slower; a store on a real disk or volume is better"
        )
    elif kind in ("fuse", "fuseblk") or kind.startswith("fuse."):
        warnings.append(f"{kind} is a FUSE file system: saves are slower, and its durability becomes ours")
    if room.f_flag & os.ST_RDONLY:
        refusals.append("the file system is mounted read-only")
    else:
        refusals += _refused_operations(directory)
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes < _LOW_BYTES:
        warnings.append(f"only {free_bytes // (1 << 20)} MiB are free")
    return Probe(
        filesystem=kind,
        free_bytes=free_bytes,
        total_bytes=room.f_blocks * room.f_frsize,
        warnings=tuple(warnings),
        refusal="; ".join(refusals) or None,
    )


def _refused_operations(directory: Path) -> list[str]:
    trials: tuple[tuple[str, Callable[[int], bool]], ...] = (
        ("fallocate", _try_fallocate),
        ("hole punching", _try_punch),
        ("SEEK_DATA", _try_seek_data),
        ("shared memory maps", _try_mmap),
    )
    refused = []
    with tempfile.TemporaryFile(dir=directory) as file:
        fd = file.fileno()
        for name, trial in trials:
            os.ftruncate(fd, 0)
            try:
                works = trial(fd)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                    raise  # says nothing about the operation
                works = False
            if not works:
                refused.append(f"{name} does not work here")
    return refused


def _try_fallocate(fd: int) -> bool:
    fallocate(fd, KEEP_SIZE, 0, _PROBE_BYTES)
    return os.fstat(fd).st_size == 0


def _try_punch(fd: int) -> bool:
    os.pwrite(fd, b"\xa5" * _PROBE_BYTES, 0)
    fallocate(fd, PUNCH_HOLE | KEEP_SIZE, _BLOCK, _PROBE_BYTES - 2 * _BLOCK)
    left = os.pread(fd, _PROBE_BYTES, 0)
    hole = bytes(_PROBE_BYTES - 2 * _BLOCK)
    return left == b"\xa5" * _BLOCK + hole + b"\xa5" * _BLOCK


def _try_seek_data(fd: int) -> bool:
    # In a file that is a hole up to its last block, a file system without SEEK_DATA calls everything data.
    far = 16 << 20
    os.pwrite(fd, b"x", far)
    return os.lseek(fd, 0, os.SEEK_DATA) > 0 and os.lseek(fd, 0, os.SEEK_HOLE) == 0


def _try_mmap(fd: int) -> bool:
    os.ftruncate(fd, _BLOCK)
    with mmap.mmap(fd, _BLOCK) as shared:
        shared[:5] = b"ckptf"
        shared.flush()
    return os.pread(fd, 5, 0) == b"ckptf"
