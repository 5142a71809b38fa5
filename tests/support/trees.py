"""A directory tree read whole, as a value that can be compared."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

_BLOCK = 1 << 20
_VIRTUAL = "user.ckptfs."


@dataclass(frozen=True)
class Node:
    """What a name means."""

    mode: int
    size: int = 0
    digest: str = ""
    """Of a regular file's bytes."""
    mtime_ns: int | None = None
    """None compares equal to nothing in particular: see `differences`."""
    target: str | None = None
    xattrs: tuple[tuple[str, bytes], ...] = ()


Tree = dict[str, Node]


def read_tree(root: Path) -> Tree:
    """Everything below *root* by relative path; ckptfs's own attributes are left out."""
    tree: Tree = {}
    for directory, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(directory, name)
            tree[os.path.relpath(path, root)] = read_node(path)
    return tree


def read_node(path: str) -> Node:
    status = os.lstat(path)
    attributes = tuple(
        (name, os.getxattr(path, name, follow_symlinks=False))
        for name in sorted(os.listxattr(path, follow_symlinks=False))
        if not name.startswith(_VIRTUAL)
    )
    node = Node(status.st_mode, mtime_ns=status.st_mtime_ns, xattrs=attributes)
    if stat.S_ISREG(status.st_mode):
        return replace(node, size=status.st_size, digest=digest_file(path))
    if stat.S_ISLNK(status.st_mode):
        return replace(node, target=os.readlink(path))
    return node


def digest_file(path: str) -> str:
    found = hashlib.blake2b()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def digest_bytes(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def differences(one: Tree, other: Tree) -> list[str]:
    """What differs, in words; a time of None on either side is not compared."""
    found = [f"{path} only in the first" for path in sorted(one.keys() - other.keys())]
    found += [f"{path} only in the second" for path in sorted(other.keys() - one.keys())]
    for path in sorted(one.keys() & other.keys()):
        a, b = one[path], other[path]
        if a.mtime_ns is None or b.mtime_ns is None:
            a, b = replace(a, mtime_ns=None), replace(b, mtime_ns=None)
        if a != b:
            found.append(f"{path}: {a} is not {b}")
    return found
