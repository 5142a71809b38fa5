"""Which store belongs to a mountpoint: named by the user, by the environment, or found by the mountpoint's path.

Without a name it is a directory below the XDG data directory, called after the mountpoint and a short hash of its whole
path. A store that the user named once is remembered there, so that the next mount needs only the mountpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from ckptfs.errors import StoreError

STORE_VARIABLE = "CKPTFS_STORE"

_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_READABLE_MOST = 40
_POINTER = ".at"


def choose(mountpoint: str, named: str | None) -> Path:
    """The store for *mountpoint* (absolute, resolved): *named*, $CKPTFS_STORE, the one remembered, or the usual one."""
    named = named or os.environ.get(STORE_VARIABLE)
    if named:
        return Path(os.path.realpath(os.path.expanduser(named)))
    usual = _usual(mountpoint)
    try:
        remembered = usual.with_name(usual.name + _POINTER).read_text(errors="surrogateescape").strip("\n")
    except OSError:
        return usual
    return Path(remembered)


def remember(mountpoint: str, store: Path) -> None:
    """Let `choose` find *store* for *mountpoint* from now on."""
    usual = _usual(mountpoint)
    pointer = usual.with_name(usual.name + _POINTER)
    if store == usual:
        pointer.unlink(missing_ok=True)
        return
    try:
        pointer.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        pointer.write_text(f"{store}\n", errors="surrogateescape")
    except OSError:
        pass  # a convenience; a home that cannot be written must not fail a mount


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
    if store.is_dir() and not (store / "catalog.db").exists() and not (store / "settings.json").exists():
        other = sorted(set(os.listdir(store)) - {"lock", "lost+found", "daemon.log", "images"})
        if other:
            raise StoreError(f"{store} is no store and not empty (it holds {other[0]}): choose another with --store")


def _usual(mountpoint: str) -> Path:
    home = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(home):  # also unset or empty, as the XDG specification asks
        home = os.path.join(os.path.expanduser("~"), ".local", "share")
    readable = _ODD.sub("-", os.path.basename(mountpoint))[:_READABLE_MOST].strip("-.") or "mount"
    short = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:10]
    return Path(os.path.realpath(home)) / "ckptfs" / f"{readable}-{short}"
