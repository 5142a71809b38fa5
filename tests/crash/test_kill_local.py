"""The daemon of a store without a remote is killed while it saves, seals and recovers; the disk stays up."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.consistency import problems
from tests.support.mounts import TINY, Site, until
from tests.support.saver import Saver

OPTIONS = ("--owner", "stored", "--allow-other")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, tuning=TINY) as made:
        yield made
        assert "Traceback" not in made.log(), made.log()


def saves_through_kills(site: Site, kills: int, seed: int) -> None:
    """Kill the daemon *kills* times while a saver works; after each, all that returned must be there."""
    moments = random.Random(seed)
    saver = Saver(site.mountpoint, seed, largest=100_000)
    for kill in range(kills):
        site.mount(*OPTIONS)
        what = f"kill {kill}, seed {seed}"
        if kill:
            try:
                saver.adopt()
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
        saver.start()
        saver.ended.wait(moments.uniform(0.0, 1.0))
        assert saver.error is None, f"{what}: {saver.error}"
        site.kill()
        saver.ended.wait(30)
        saver.stop()
        assert saver.error is not None, f"{what}: the saver noticed nothing"
        if kill % 5 == 0:  # the next start is killed as well, at whatever it is doing then
            with site.spawn("mount", str(site.mountpoint), "--store", str(site.store), "--force", *OPTIONS) as starting:
                time.sleep(moments.uniform(0.0, 1.0))
                site.kill()
                starting.communicate(timeout=60)
            site.kill()  # if the first came before the daemon did
        if kill % 4 == 3:
            site.mount(*OPTIONS)
            site.umount()
            assert not problems(site.store), f"{what}: " + "\n".join(problems(site.store))
    site.mount(*OPTIONS)
    saver.adopt()
    until(lambda: site.status()["state"] == "sealed", "everything to be sealed")
    saver.adopt()
    site.umount()
    assert not problems(site.store), "\n".join(problems(site.store))
    assert saver.saves > 1


@pytest.mark.timeout(400)
def test_nothing_that_returned_is_lost(site: Site) -> None:
    """Killed at 20 random moments, the next mount has every call that returned and a consistent store."""
    saves_through_kills(site, 20, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 7))
def test_nothing_that_returned_is_lost_in_many_kills(site: Site, seed: int) -> None:
    """The same at 60 other moments, five times."""
    saves_through_kills(site, 60, seed)


def test_open_files_come_back_as_they_were_written(site: Site) -> None:
    """Files that were open, appended to, truncated, renamed or unlinked at the kill are as the last call left them."""
    site.mount(*OPTIONS)
    root = site.mountpoint
    fds = [os.open(root / f"{number}", os.O_CREAT | os.O_RDWR) for number in range(5)]
    for fd in fds:
        os.write(fd, b"x" * 10_000)
    os.ftruncate(fds[1], 100)
    os.pwrite(fds[2], b"y", 1 << 20)
    os.rename(root / "3", root / "renamed")
    os.unlink(root / "4")
    (root / "sealed").write_bytes(b"first")
    until(lambda: os.getxattr(root / "sealed", "user.ckptfs.state") == b"sealed", "the file to be sealed")
    again = os.open(root / "sealed", os.O_WRONLY | os.O_APPEND)
    os.write(again, b" second")
    site.kill()
    for fd in (*fds, again):
        with pytest.raises(OSError):
            os.close(fd)
    site.mount(*OPTIONS)
    assert {path.name: path.stat().st_size for path in root.iterdir()} == {
        "0": 10_000, "1": 100, "2": (1 << 20) + 1, "renamed": 10_000, "sealed": 12
    }  # fmt: skip
    assert (root / "sealed").read_bytes() == b"first second"
    assert (root / "2").read_bytes()[9_990:10_010] == b"x" * 10 + bytes(10)
    until(lambda: site.status()["state"] == "sealed", "everything to be sealed")
    site.umount()
    assert not problems(site.store)


def test_the_consistency_check_finds_damage(site: Site) -> None:
    """The check above is no formality: a lost image, a wrong link count and changed bytes are all told."""
    import sqlite3

    site.mount(*OPTIONS)
    for name in ("a", "b", "c"):
        (site.mountpoint / name).write_bytes(name.encode() * 10_000)
    until(lambda: site.status()["state"] == "sealed", "everything to be sealed")
    site.umount()
    assert not problems(site.store)
    first, second, third = sorted((site.store / "images").glob("*/*"))
    first.unlink()
    second.write_bytes(b"other" * 2000)
    third.rename(third.with_name("00000000000000ff"))
    db = sqlite3.connect(site.store / "catalog.db")
    with db:
        db.execute("UPDATE inode SET nlink = 7 WHERE ino = 2")
    db.close()
    told = "\n".join(problems(site.store))
    for expected in ("a row and no file", "a file and no row", "nlink 7", "not the chunk"):
        assert expected in told, told
