"""What is installed: every package by name, the public names, the command."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import ckptfs

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_every_package_is_listed() -> None:
    """pyproject names each folder with Python in it, because mount/ is installed under another name."""
    folders = {path.parent.relative_to(ROOT) for top in ("ckptfs", "mount") for path in (ROOT / top).rglob("*.py")}
    expected = {".".join(("ckptfs_mount" if folder.parts[0] == "mount" else folder.parts[0], *folder.parts[1:]))
                for folder in folders}  # fmt: skip
    block = re.search(r"^packages = \[(.*?)^\]", PYPROJECT, re.M | re.S)
    assert block is not None
    assert set(re.findall(r'"([^"]+)"', block[1])) == expected
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)


def test_the_public_names() -> None:
    """What `from ckptfs import *` gives is a promise: changes are made on purpose."""
    errors = ["CkptfsError", "ContentUnavailable", "MountError", "RemoteError", "StoreError", "StoreFull"]
    assert ckptfs.__all__ == [*errors, "mounted", "prefetch", "publish", "status", "wait"]
    assert all(hasattr(ckptfs, name) for name in ckptfs.__all__)
    modules = {path.stem for path in (ROOT / "ckptfs").iterdir()}
    assert not modules & set(ckptfs.__all__), "importing the module would hide the function"


def test_the_command_is_installed_and_knows_its_version() -> None:
    """`ckptfs --version` and `python -m ckptfs_mount` are the same program, of the installed version."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="ckptfs")
    assert entry.value == "ckptfs_mount.cli:main"
    done = subprocess.run(
        [sys.executable, "-m", "ckptfs_mount", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert importlib.metadata.version("ckptfs") in done.stdout
    assert importlib.metadata.version("ckptfs") == ckptfs.__version__


def test_the_license_is_whole() -> None:
    """The full text of the license that pyproject names is shipped."""
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in PYPROJECT
