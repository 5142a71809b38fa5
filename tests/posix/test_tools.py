"""What people copy with works on the mount, and what it copied is equal, also after a remount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.posix.sides import snapshot
from tests.support.mounts import TINY, Site

TOOL_S = 60


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, tuning=TINY) as made:
        made.mount("--owner", "stored", "--allow-other")
        yield made
        made.umount()
        assert "Traceback" not in made.log(), made.log()


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A directory with everything that a copy may lose."""
    root = tmp_path / "original"
    (root / "deep/er/est").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o700)
    for number in range(40):
        (root / f"deep/{number}").write_bytes(os.urandom(257 * number))
    (root / "large").write_bytes(os.urandom(1 << 20) * 3)
    with open(root / "sparse", "wb") as file:
        file.write(b"begin")
        file.seek(1 << 22)
        file.write(b"end")
    os.link(root / "large", root / "deep/hard")
    os.symlink("deep/er", root / "link")
    os.symlink("nowhere", root / "dangling")
    os.mkfifo(root / "fifo", 0o640)
    os.setxattr(root / "large", "user.note", b"\x00value\xff")
    os.setxattr(root / "deep", "user.note", b"of a directory")
    os.chmod(root / "deep/1", 0o4711)
    os.chmod(root / "deep/2", 0o000)
    if os.geteuid() == 0:
        os.chown(root / "deep/3", 1234, 4321)
    (root / os.fsdecode(b"\xff\xfe odd\nname")).write_bytes(b"odd")
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, ns=(1_500_000_000_123_456_789, 1_400_000_000_987_654_321), follow_symlinks=False)
    os.utime(root, ns=(1, 1_300_000_000_000_000_001))
    return root


def run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run(
        [os.fspath(each) for each in command], cwd=cwd, capture_output=True, timeout=TOOL_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")


def with_mtimes(root: Path) -> dict[bytes, Any]:
    found = snapshot(root)
    for name, entry in found.items():
        entry.append(os.lstat(os.path.join(os.fsencode(root), name)).st_mtime_ns)
    return found


def cp(source: Path, target: Path) -> None:
    run("cp", "-a", source, target)


def cp_reflink(source: Path, target: Path) -> None:
    run("cp", "-a", "--reflink=auto", "--sparse=always", source, target)


def rsync(source: Path, target: Path) -> None:
    run("rsync", "-aHAX", f"{source}/", target)


def rsync_in_place(source: Path, target: Path) -> None:
    run("rsync", "-aHX", f"{source}/", target)
    (target / "deep/30").write_bytes(b"damaged" * 1000)
    run("rsync", "-aHX", "--inplace", "--no-whole-file", "--checksum", f"{source}/", target)
    run("rsync", "-aHX", "--delete", "--checksum", f"{source}/", target)


def tar(source: Path, target: Path) -> None:
    target.mkdir()
    archive = target.with_name(target.name + ".tar")
    options = ("--xattrs", "--xattrs-include=*", "--sparse", "--numeric-owner", "-p")
    run("tar", *options, "-cf", archive, "--format=pax", ".", cwd=source)
    run("tar", *options, "-xf", archive, cwd=target)
    archive.unlink()


def copytree(source: Path, target: Path) -> None:
    def copy(one: str, other: str) -> None:  # copytree knows no special files
        if os.path.isfile(one):
            shutil.copy2(one, other)
        else:
            run("cp", "-a", one, other)

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


TOOLS = [cp, cp_reflink, rsync, rsync_in_place, tar, copytree]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_a_copy_onto_the_mount_and_back_is_equal(
    site: Site, original: Path, tmp_path: Path, tool: Callable[[Path, Path], None]
) -> None:
    """Bytes, modes, owners, links, attributes, mtimes are what the tool makes of a plain directory, at each step."""
    plain, back = tmp_path / "plain", tmp_path / "back"
    here, there = site.mountpoint / "here", site.mountpoint / "there"
    tool(original, plain)
    wanted = with_mtimes(plain)
    tool(original, here)
    assert with_mtimes(here) == wanted
    tool(here, there)
    assert with_mtimes(there) == wanted
    site.umount()
    site.mount("--owner", "stored", "--allow-other")
    assert with_mtimes(here) == wanted
    assert with_mtimes(there) == wanted
    tool(there, back)
    assert with_mtimes(back) == wanted
    shutil.rmtree(here)
    shutil.rmtree(there)
    assert os.listdir(site.mountpoint) == []


def test_moving_in_and_out(site: Site, original: Path, tmp_path: Path) -> None:
    """shutil.move carries a tree onto the mount and off it again, and nothing that it carries is lost."""
    (original / "fifo").unlink()
    plain, moved, back = tmp_path / "plain", site.mountpoint / "moved", tmp_path / "back"
    shutil.copytree(original, plain, symlinks=True)  # what move does between two file systems: owners and links go
    wanted = with_mtimes(plain)
    shutil.move(original, moved)
    assert not original.exists()
    assert with_mtimes(moved) == wanted
    shutil.move(moved, back)
    assert os.listdir(site.mountpoint) == []
    assert with_mtimes(back) == wanted


def test_git_works_on_the_mount(site: Site) -> None:
    """A program that locks, links, renames and maps: git commits, clones and checks what it stored."""
    repository, clone = site.mountpoint / "repository", site.mountpoint / "clone"
    git = ("git", "-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main")
    run(*git, "init", repository)
    for number in range(20):
        (repository / f"{number}").write_bytes(os.urandom(1000 * number))
    run(*git, "add", ".", cwd=repository)
    run(*git, "commit", "-m", "all", cwd=repository)
    run(*git, "clone", repository, clone)
    run(*git, "fsck", "--strict", cwd=clone)
    run(*git, "gc", cwd=repository)
    run(*git, "status", "--porcelain", cwd=clone)


def test_sqlite_works_on_the_mount(site: Site) -> None:
    """A database with a write-ahead log, shared memory and locks keeps every row, also after a remount."""
    import sqlite3

    path = site.mountpoint / "database"
    for mode in ("wal", "delete"):
        db = sqlite3.connect(path)
        db.execute(f"PRAGMA journal_mode={mode}")
        db.execute("CREATE TABLE IF NOT EXISTS t (x)")
        for number in range(25):
            with db:
                db.execute("INSERT INTO t VALUES (?)", (number,))
        db.close()
    site.umount()
    site.mount("--owner", "stored", "--allow-other")
    db = sqlite3.connect(path)
    assert db.execute("SELECT count(*), sum(x) FROM t").fetchone() == (50, 600)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
