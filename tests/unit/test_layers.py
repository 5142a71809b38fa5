"""Which module may know which: every import of the product, also inside functions, is read and checked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS: tuple[tuple[str, ...], ...] = (
    ("ckptfs.ids", "ckptfs.errors"),
    ("ckptfs.spans", "ckptfs.config", "ckptfs.scratch", "ckptfs.series", "ckptfs.steady"),
    ("ckptfs.encoding", "ckptfs.formats", "ckptfs.pieces"),
    ("ckptfs.local", "ckptfs.remote"),
    ("ckptfs.background",),
    ("ckptfs.attributes", "ckptfs.reading"),
    ("ckptfs.handles",),
    ("ckptfs.fileimages", "ckptfs.held", "ckptfs.naming", "ckptfs.saves"),
    ("ckptfs.xattrs",),
    ("ckptfs.openfiles",),
    ("ckptfs.replica", "ckptfs.client"),
    ("ckptfs.filesystem",),
    ("ckptfs.prefetching",),
    ("ckptfs.reclaiming", "ckptfs.siblings", "ckptfs.repair", "ckptfs.insight"),
    ("ckptfs.engine",),
    ("ckptfs", "ckptfs.testing"),
    ("ckptfs_mount.native",),
    ("ckptfs_mount.errnos", "ckptfs_mount.order", "ckptfs_mount.placement", "ckptfs_mount.mountpoint"),
    ("ckptfs_mount.passthrough",),
    ("ckptfs_mount.operations", "ckptfs_mount.control"),
    ("ckptfs_mount.requests",),
    ("ckptfs_mount.daemon", "ckptfs_mount.unmounted"),
    ("ckptfs_mount.cli",),
    ("ckptfs_mount", "ckptfs_mount.__main__"),
)
"""Bottom first. A layer knows those below it; the parts of one layer do not know each other."""

CONFINED = {
    "pyfuse3": ("ckptfs_mount.",),
    "boto3": ("ckptfs.remote.s3",),
    "botocore": ("ckptfs.remote.s3",),
    "sqlite3": ("ckptfs.local.catalog.",),
    "click": ("ckptfs_mount.cli",),
    "rich": ("ckptfs_mount.cli",),
    "matplotlib": ("ckptfs_mount.cli.plotting",),
    "pickle": (),
}
"""What only these modules may import; a trailing dot means everything below."""


def sources() -> dict[str, ast.Module]:
    found = {}
    for folder, package in ((ROOT / "ckptfs", "ckptfs"), (ROOT / "mount", "ckptfs_mount")):
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(part for part in parts if part != "__init__")
            found[name] = ast.parse(path.read_text(), path)
    return found


SOURCES = sources()
PACKAGES = {name.rpartition(".")[0] for name in SOURCES} | {"ckptfs", "ckptfs_mount"}


def imports(name: str) -> set[str]:
    """The modules that *name* imports, our own by their full name."""
    found = set()
    for node in ast.walk(SOURCES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".") if name in PACKAGES else name.split(".")[:-1]
                base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
            modules = {f"{base}.{alias.name}" for alias in node.names} & SOURCES.keys()
            found |= modules or {base}
    return found


def ours(name: str) -> set[str]:
    return {each for each in imports(name) if each.split(".")[0] in ("ckptfs", "ckptfs_mount")}


def place(name: str) -> tuple[int, str]:
    """The layer of *name*, and the part of it that it belongs to."""
    found = [
        (part, level)
        for level, parts in enumerate(LAYERS)
        for part in parts
        if name == part or (name.startswith(part + ".") and part not in ("ckptfs", "ckptfs_mount"))
    ]
    assert found, f"{name} is in no layer: say where it belongs"
    part, level = max(found, key=lambda each: len(each[0]))
    return level, part


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_point_down(name: str) -> None:
    """A module imports only from layers below its own, or from its own part of its layer."""
    level, part = place(name)
    wrong = sorted(each for each in ours(name) if place(each)[1] != part and place(each)[0] >= level)
    assert wrong == []


def test_no_import_goes_in_a_circle() -> None:
    """No module imports itself by way of others."""
    graph = {name: ours(name) - {name} for name in SOURCES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " > ".join((*path[path.index(name) :], name))
        if name not in done:
            for each in graph.get(name, ()):
                visit(each, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("package", sorted(CONFINED))
def test_packages_stay_where_they_belong(package: str) -> None:
    """pyfuse3 is the adapter's, boto3 one module's, SQL the catalog's; nothing unpickles."""
    places = CONFINED[package]
    users = {name for name in SOURCES if package in {each.split(".")[0] for each in imports(name)}}
    wrong = {
        user
        for user in users
        if not any(user == each.rstrip(".") or user.startswith(each.rstrip(".") + ".") for each in places)
    }
    assert wrong == set()


def test_importing_the_client_brings_nothing_heavy() -> None:
    """`import ckptfs` in a trainer is the standard library alone: no trio, no boto3, no numpy, no threads."""
    code = (
        "import sys, threading, ckptfs;"
        "print(sorted({'trio', 'boto3', 'numpy', 'blake3', 'zstandard', 'pyfuse3', 'click'} & set(sys.modules)),"
        "threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[] 1"
