"""`ckptfs fsck`: what is wrong is told exactly, what can be mended is, and no look and no kill makes anything worse."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.mount.test_scrub import KILLS, Saved, original, saved
from tests.support.consistency import problems
from tests.support.damage import image_of, objects
from tests.support.mounts import Site

__all__ = ["original", "saved"]  # fixtures

pytestmark = pytest.mark.timeout(120)


def fsck(site: Site, *options: str, status: int = 0, path: Path | None = None) -> dict[str, Any]:
    done = site.run("fsck", str(path or site.store), "--json", *options)
    assert done.status == status, done.said
    report: dict[str, Any] = json.loads(done.out)
    return report


def sql(store: Path, statement: str, *values: object) -> None:
    """Damage the catalog of *store*."""
    with closing(sqlite3.connect(store / "catalog.db")) as db:
        assert db.execute(statement, values).rowcount > 0, statement
        db.commit()


def snapshot(directory: Path) -> dict[str, bytes | None]:
    """Everything below *directory* but what SQLite needs for reading."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.name != "control.sock" and not path.name.endswith(("-shm", "-wal"))
    }


def test_a_sound_store_is_said_to_be_so_and_left_alone(saved: Saved) -> None:
    """Not mounted and mounted, nothing is found, and looking changes nothing here or there."""
    store, remote = snapshot(saved.site.store), snapshot(saved.remote)
    assert fsck(saved.site)["findings"] == []
    assert (snapshot(saved.site.store), snapshot(saved.remote)) == (store, remote)
    saved.site.mount()
    assert fsck(saved.site, path=saved.site.mountpoint / "run")["findings"] == []
    done = saved.site.run("fsck", "--repair", str(saved.site.mountpoint))
    assert done.status == 1 and "unmount it first" in done.err
    saved.site.umount()
    assert "nothing is wrong" in saved.site.run("fsck", str(saved.site.mountpoint)).out


INO = "(SELECT ino FROM dirent WHERE name = ?)"

DAMAGES: dict[str, Callable[[Path], None]] = {
    "nlink": lambda store: sql(store, f"UPDATE inode SET nlink = 7 WHERE ino = {INO}", b"file-1"),
    "size": lambda store: sql(store, f"UPDATE inode SET size = 5 WHERE ino = {INO}", b"file-2"),
    "no manifest": lambda store: sql(store, f"UPDATE inode SET manifest = 99 WHERE ino = {INO}", b"file-3"),
    "garbled list": lambda store: sql(
        store, f"UPDATE manifest SET body = x'00' WHERE id = (SELECT manifest FROM inode WHERE ino = {INO})", b"file-4"
    ),
    "no image row": lambda store: sql(
        store, f"DELETE FROM image WHERE id = (SELECT image FROM inode WHERE ino = {INO})", b"file-5"
    ),
    "location": lambda store: sql(
        store, "INSERT INTO location (chunk, image, offset, length) VALUES (zeroblob(32), 5, 0, 9)"
    ),
    "packed": lambda store: sql(store, "UPDATE packed SET pack = 99 WHERE pack = 1"),
    "xattr": lambda store: sql(store, "INSERT INTO xattr VALUES (9999, 'user.a', 'b')"),
    "short image": lambda store: os.truncate(image_of(store, "model.bin"), 10_000),
    "long image": lambda store: os.truncate(image_of(store, "file-6"), 90_000),
    "no image": lambda store: image_of(store, "weights.npy").unlink(),
    "cut": lambda store: (
        sql(store, "INSERT INTO cut (id, taken_ns, stamp, vector) VALUES (77, 1, 1, '{}')"),
        sql(store, "INSERT INTO cut_dir (cut, dir, file_id) VALUES (77, 1, zeroblob(16))"),
        sql(store, "INSERT INTO cut_entry (cut, dir, name, ino, image, stamp, changed, kept, file_id)"
                   " VALUES (77, 1, 'x', 5, 5, 1, 1, 0, zeroblob(16))"),
    )[0],
}  # fmt: skip


def test_what_is_wrong_is_told_and_mended(saved: Saved) -> None:
    """A dozen things are wrong: all are found, with what they mean; --repair mends them; everything reads as it was."""
    check(saved, *DAMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_each_thing_that_is_wrong(saved: Saved, damage: str) -> None:
    """The same for each alone."""
    check(saved, damage)


def check(saved: Saved, *damages: str) -> None:
    for damage in damages:
        DAMAGES[damage](saved.site.store)
    before = snapshot(saved.site.store)
    found = fsck(saved.site, status=3)["findings"]
    assert len(found) >= len(damages), found
    assert all(each["state"] == "found" and each["meaning"] and each["repair"] for each in found), found
    assert snapshot(saved.site.store) == before
    report = fsck(saved.site, "--repair")
    assert {each["state"] for each in report["findings"]} == {"repaired"}
    assert fsck(saved.site)["findings"] == []
    saved.check()


def test_damage_upon_damage_does_not_keep_a_store_from_opening(saved: Saved) -> None:
    """An image without a row whose chunk list is garbled, too: the store opens, and the file comes from the remote."""
    for damage in ("no image row", "garbled list"):
        DAMAGES[damage](saved.site.store)
    sql(saved.site.store, f"UPDATE manifest SET body = x'01' WHERE id = (SELECT manifest FROM inode WHERE ino = {INO})",
        b"file-5")  # fmt: skip
    assert fsck(saved.site, "--repair")["sound"]
    saved.check()


def test_a_cut_that_names_no_image(site: Site) -> None:
    """Everything else is saved and flushed all the same, and fsck mends it where the store has always been."""
    site.mount()
    (site.mountpoint / "file").write_bytes(b"x" * 5000)
    site.umount()
    DAMAGES["cut"](site.store)
    site.mount()
    with open(site.mountpoint / "file", "r+b") as file:
        file.write(b"y")
        os.fsync(file.fileno())
    site.umount()
    assert fsck(site, "--repair")["sound"]
    site.mount()
    assert (site.mountpoint / "file").read_bytes() == b"y" + b"x" * 4999
    site.umount()


def test_what_the_remote_lost_is_put_again(saved: Saved) -> None:
    """Objects that the remote does not list any more are found without reading a byte, and made anew."""
    paths = [path for kind in ("packs", "manifests", "trees") for path in objects(saved.remote, kind)]
    before = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.unlink()
    found = {each["where"] for each in fsck(saved.site, status=3)["findings"]}
    assert found and found <= {str(path.relative_to(saved.remote)) for path in paths}  # parts of a tree go with it
    assert fsck(saved.site, "--local")["findings"] == []
    report = fsck(saved.site, "--repair")
    assert {each["state"] for each in report["findings"]} == {"repaired"}
    assert {path: path.read_bytes() for path in paths} == before


@pytest.mark.slow
def test_the_own_head_is_put_again(site: Site, tmp_path: Path) -> None:
    """The newest head of this store itself, gone from the remote, comes back byte for byte."""
    remote = tmp_path / "remote"
    remote.mkdir()
    site.mount("--remote", f"file://{remote}")
    (site.mountpoint / "file").write_bytes(b"x" * 5000)
    site.umount()
    (head,) = objects(remote, "heads")
    before = head.read_bytes()
    head.unlink()
    assert [each["where"] for each in fsck(site, status=3)["findings"]] == [str(head.relative_to(remote))]
    assert fsck(site, "--repair")["sound"]
    assert head.read_bytes() == before


def test_a_file_without_a_name_comes_back_in_lost_and_found(saved: Saved) -> None:
    """Its name is gone, and so is a directory's: both are found in /lost+found of the mount with all they held."""
    sql(saved.site.store, "DELETE FROM dirent WHERE name = ?", b"weights.npy")
    sql(saved.site.store, "DELETE FROM dirent WHERE name = ?", b"many")
    assert len(fsck(saved.site, status=3)["findings"]) >= 2
    assert fsck(saved.site, "--repair")["sound"]
    assert problems(saved.site.store) == []
    saved.site.mount()
    lost = list((saved.site.mountpoint / "lost+found").iterdir())
    (weights,) = [path for path in lost if path.is_file()]
    assert weights.read_bytes() == saved.content["run/weights.npy"]
    (many,) = [path for path in lost if path.is_dir()]
    assert (many / "file-7").read_bytes() == saved.content["run/many/file-7"]
    saved.site.umount()


def test_what_is_lost_is_named(site: Site) -> None:
    """Bytes that were nowhere else: exit status 3, with the path; an image without a row goes to lost+found."""
    site.mount()
    (site.mountpoint / "gone").write_bytes(b"g" * 5000)
    (site.mountpoint / "stays").write_bytes(b"x" * 5000)
    assert site.run("wait", str(site.mountpoint), "--for", "sealed").status == 0
    site.umount()
    image_of(site.store, "gone").unlink()
    stray = site.store / "images" / "00" / "00000000000abc00"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"y" * 5000)
    assert {each["state"] for each in fsck(site, status=3)["findings"]} == {"lost", "found"}
    report = fsck(site, "--repair", status=3)
    assert report["lost"] == ["/gone"]
    assert (site.store / "lost+found" / stray.name).read_bytes() == b"y" * 5000
    told = site.run("fsck", str(site.store))
    assert told.status == 3 and "/gone" in told.out
    site.mount()
    assert (site.mountpoint / "stays").read_bytes() == b"x" * 5000
    site.umount()


def test_a_catalog_that_is_no_database_is_one_line(saved: Saved) -> None:
    """The first pages overwritten: fsck says so, and touches nothing."""
    with open(saved.site.store / "catalog.db", "r+b") as file:
        file.write(os.urandom(8192))
    before = snapshot(saved.site.store)
    done = saved.site.run("fsck", str(saved.site.store))
    assert done.status == 1 and "catalog" in done.err and len(done.err.splitlines()) == 1, done.said
    assert snapshot(saved.site.store) == before


@pytest.mark.slow
def test_a_remote_that_cannot_be_asked_is_told(saved: Saved) -> None:
    """What is here is looked at all the same; the exit status says that it was not everything."""
    saved.remote.rename(saved.remote.with_name("elsewhere"))
    report = fsck(saved.site, status=3)
    assert report["findings"] == [] and "the remote" in report["skipped"][0]
    assert fsck(saved.site, "--local")["skipped"] == []


@pytest.mark.slow
def test_a_repair_that_is_killed_makes_nothing_worse(saved: Saved) -> None:
    """Killed at any moment, fsck finds no more than before, and the next repair ends it."""
    store = saved.site.store
    for damage in ("nlink", "size", "no manifest", "garbled list", "no image row", "location", "long image", "cut"):
        DAMAGES[damage](store)
    for path in objects(saved.remote, "packs")[::2]:
        path.unlink()
    before = {(each["where"], each["what"]) for each in fsck(saved.site, status=3)["findings"]}
    for step in range(KILLS):
        with saved.site.spawn("fsck", "--repair", str(store)) as process:
            try:
                process.wait(0.4 + 1.2 * step / KILLS)
            except subprocess.TimeoutExpired:
                process.kill()
        done = saved.site.run("fsck", str(store), "--json")
        now = {(each["where"], each["what"]) for each in json.loads(done.out)["findings"]}
        assert now <= before, (step, now - before)
    assert fsck(saved.site, "--repair")["sound"]
    saved.check()
