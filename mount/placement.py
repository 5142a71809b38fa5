"""Which store belongs to a mountpoint: named by the user, by the environment, or found by the mountpoint's path.

Without a name it is a directory below the XDG data directory, called after the mountpoint and a short hash of its whole
path. Which store a mountpoint had is remembered there, so that the next mount needs only the mountpoint, and so that a
store that is gone is missed: an empty one in its place, without a remote, would look like a mount that works.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from pathlib import Path

from ckptfs.errors import RemoteUnusable, StoreError
from ckptfs.remote.open import parse

STORE_VARIABLE = "CKPTFS_STORE"

_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_READABLE_MOST = 40
_POINTER = ".at"

_MARKS = ("catalog.db", "settings.json")  # either makes a directory a store
_OURS = {"lock", "lost+found", "daemon.log", "images"}  # what may lie there before it is one


def choose(mountpoint: str, named: str | None, *, anew: bool = False) -> Path:
    """The store for *mountpoint* (absolute, resolved): *named*, $CKPTFS_STORE, the one remembered, or the usual one.

    Raises StoreError when *mountpoint* had that store and it is gone, unless it was *named* or may begin *anew*.
    """
    if named:
        return _resolved(named)
    remembered = _remembered(mountpoint)
    from_environment = os.environ.get(STORE_VARIABLE)
    chosen = _resolved(from_environment) if from_environment else remembered or _usual(mountpoint)
    if chosen == remembered and not is_store(chosen) and not anew:
        raise StoreError(
            f"the store {chosen} of {mountpoint} is gone: was it moved, or is its disk not mounted? Name where it is "
            f"with --store DIR; to begin anew, give --remote URL, or --store {chosen} for one without a remote"
        )
    return chosen


def remember(mountpoint: str, store: Path) -> None:
    """Let `choose` find *store* for *mountpoint* from now on."""
    pointer = _pointer(mountpoint)
    try:
        pointer.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        pointer.write_text(f"{store}\n", errors="surrogateescape")
    except OSError:
        pass  # a convenience; a home that cannot be written must not fail a mount


def is_store(directory: Path) -> bool:
    """Whether *directory* holds a store."""
    return any((directory / mark).exists() for mark in _MARKS)


def discard(store: Path) -> None:
    """Remove a store that was made in vain, for a mount that failed; one in use, or with bytes in it, is left alone."""
    try:
        lock_fd = os.open(store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another command may have found and opened it
        if not any(files for each in ("images", "lost+found") for _, _, files in os.walk(store / each)):
            shutil.rmtree(store)
    except OSError:
        pass
    finally:
        os.close(lock_fd)


def check(mountpoint: str, store: Path) -> None:
    """Raise StoreError when *store* cannot be this mountpoint's: one is within the other, or it holds other things."""
    for outer, inner, words in (
        (mountpoint, str(store), "inside the mountpoint"),
        (str(store), mountpoint, "around the mountpoint"),
    ):
        if inner == outer or inner.startswith(outer.rstrip("/") + "/"):
            raise StoreError(f"the store {store} lies {words} {mountpoint}: choose another with --store")
    if store.exists() and not store.is_dir():
        raise StoreError(f"the store {store} is not a directory")
    if store.is_dir() and not is_store(store):
        other = sorted(set(os.listdir(store)) - _OURS)
        if other:
            raise StoreError(f"{store} is no store and not empty (it holds {other[0]}): choose another with --store")


def check_remote(mountpoint: str, remote: str | None) -> None:
    """Raise RemoteUnusable when *remote* is a directory, and it or the mountpoint is within the other."""
    if remote is None or parse(remote)[0] != "file":
        return
    directory = os.path.realpath(parse(remote)[1])
    for outer, inner, words in ((mountpoint, directory, "inside"), (directory, mountpoint, "around")):
        if inner == outer or inner.startswith(outer.rstrip("/") + "/"):
            raise RemoteUnusable(f"the remote {remote} lies {words} the mountpoint {mountpoint}: choose another")


def _resolved(path: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))


def _remembered(mountpoint: str) -> Path | None:
    try:
        return Path(_pointer(mountpoint).read_text(errors="surrogateescape").strip("\n"))
    except OSError:
        return None


def _pointer(mountpoint: str) -> Path:
    usual = _usual(mountpoint)
    return usual.with_name(usual.name + _POINTER)


def _usual(mountpoint: str) -> Path:
    home = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(home):  # also unset or empty, as the XDG specification asks
        home = os.path.join(os.path.expanduser("~"), ".local", "share")
    readable = _ODD.sub("-", os.path.basename(mountpoint))[:_READABLE_MOST].strip("-.") or "mount"
    short = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:10]
    return Path(os.path.realpath(home)) / "ckptfs" / f"{readable}-{short}"
