"""What a directory holds, written down so that two places can be compared; and what a remote holds."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptfs.remote.base import ObjectStore
from ckptfs.remote.open import open_remote
from tests.support.mounts import Site

_VIRTUAL = "user.ckptfs."


@dataclass(frozen=True)
class Seen:
    """One name, as far as it must be the same after a remount and on another machine."""

    mode: int
    nlink: int
    mtime_ns: int
    size: int
    xattrs: tuple[tuple[str, bytes], ...]
    content: str
    """Digest of a file's bytes, target of a symbolic link, empty for anything else."""


def snapshot(directory: Path, *, times: bool = True) -> dict[str, Seen]:
    """Everything below *directory* by relative path, and itself as "."; without *times* all mtimes are 0."""
    paths = [directory, *sorted(directory.rglob("*"))]
    return {os.fspath(path.relative_to(directory)): _see(path, times) for path in paths}


def _see(path: Path, times: bool) -> Seen:
    status = path.lstat()
    content = ""
    if stat.S_ISREG(status.st_mode):
        content = sha256(path)
    elif stat.S_ISLNK(status.st_mode):
        content = os.readlink(path)
    names = [name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith(_VIRTUAL)]
    return Seen(
        mode=status.st_mode,
        nlink=status.st_nlink,
        mtime_ns=status.st_mtime_ns if times else 0,
        size=0 if stat.S_ISDIR(status.st_mode) else status.st_size,
        xattrs=tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names)),
        content=content,
    )


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file: object) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):  # type: ignore[attr-defined]
        digest.update(block)
    return digest.hexdigest()


def disk_bytes(directory: Path) -> int:
    """What `du` says: blocks on the disk, whatever the sizes."""
    total = 0
    for path in [directory, *directory.rglob("*")]:
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # deleted meanwhile
    return total


def remote_objects(url: str, environment: Mapping[str, str]) -> dict[str, int]:
    """Size of every object by key."""
    return _objects(open_remote(url, environment=environment))


def _objects(remote: ObjectStore) -> dict[str, int]:
    found: dict[str, int] = {}
    last = ""
    while True:
        listing = remote.list("", start_after=last)
        found.update((each.key, each.size) for each in listing.objects)
        if not listing.truncated:
            return found
        last = listing.objects[-1].key


def image_file(site: Site) -> list[Path]:
    """The files of a store that hold content."""
    return [path for path in (site.store / "images").rglob("*") if path.is_file()]
