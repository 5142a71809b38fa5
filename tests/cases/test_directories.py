"""Group B: committing a directory by renaming it, rotating old ones, choosing the last."""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import ckptfs
from tests.support.machines import Machines, census, same_soon
from tests.support.mounts import Site, until
from tests.support.proxy import Faults

pytestmark = pytest.mark.timeout(180)

FILES = 2_000
RENAME_S = 0.1


def fill(directory: Path, rank: int) -> None:
    for number in range(50):
        (directory / f"shard-{rank}-{number}").write_bytes(bytes([rank]) * 5000)


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.stat().st_size == 5000)


def rename_errno(source: Path, target: Path) -> int | None:
    try:
        source.rename(target)
    except OSError as error:
        return error.errno
    return None


def test_case_007_ranks_commit_one_directory(top: Path, ranks: ProcessPoolExecutor) -> None:
    """Four processes fill it, one renames it and flushes the parent; all see it whole at once, and nobody again."""
    tmp, final = top / "tmp-checkpoint-5", top / "checkpoint-5"
    tmp.mkdir()
    list(ranks.map(fill, [tmp] * 4, range(4)))
    tmp.rename(final)
    fd = os.open(top, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    wanted = sorted(f"shard-{rank}-{number}" for rank in range(4) for number in range(50))
    assert list(ranks.map(listing, [final] * 4)) == [wanted] * 4
    assert list(ranks.map(rename_errno, [tmp] * 4, [final] * 4)) == [errno.ENOENT] * 4
    tmp.mkdir()
    fill(tmp, 0)
    assert list(ranks.map(rename_errno, [tmp] * 4, [final] * 4)) == [errno.ENOTEMPTY] * 4
    assert listing(final) == wanted
    assert len(listing(tmp)) == 50


class Poller:
    """Looks all the time, in a process of its own, whether exactly one of two names is there."""

    CODE = """
import os, sys
top, looks = sys.argv[1], 0
print("looking", flush=True)
while not select_stdin():
    names = os.listdir(top)
    if len(names) != 1:
        sys.exit(f"saw {names}")
    looks += 1
print(looks)
"""

    def __init__(self, top: Path) -> None:
        code = "import select\ndef select_stdin(): return select.select([sys.stdin], [], [], 0)[0]\n" + self.CODE
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import sys\n" + code, str(top)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Poller:
        assert self._process.stdout is not None and self._process.stdout.readline() == "looking\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)

    def looks(self) -> int:
        out, err = self._process.communicate("\n", timeout=30)
        assert self._process.returncode == 0, err
        return int(out)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "size", [pytest.param(1000, id="small"), pytest.param(1 << 19, id="a GiB", marks=pytest.mark.slow)]
)
def test_case_008_renaming_a_large_directory(machines: Machines, size: int) -> None:
    """2,000 files: in less than 0.1 s, never seen under two names or none, and nothing is copied on the remote."""
    way = machines.proxy()
    here = machines.mount(machines.site("here", by=way, tuning=None))
    (here / "tmp").mkdir()
    for number in range(FILES):
        (here / "tmp" / f"{number}").write_bytes(os.urandom(size))
    assert ckptfs.wait(here, "replicated", 300)
    before, took_s = way.counts["PUT"].bytes_up, []
    with Poller(here) as poller:
        for source, target in (("tmp", "final"), ("final", "tmp")) * 10:
            begun = time.monotonic()
            os.rename(here / source, here / target)
            took_s.append(time.monotonic() - begun)
        assert poller.looks() > 5
    assert statistics.median(took_s) < RENAME_S
    os.rename(here / "tmp", here / "final")
    assert ckptfs.wait(here, "replicated", 60)
    assert way.counts["PUT"].bytes_up - before < FILES * 100
    there = machines.mount(machines.site("there", tuning=None))
    assert census(there) == census(here)


RENAMING = """
import os, sys, itertools
for source, target in itertools.cycle((("tmp", "final"), ("final", "tmp"))):
    os.rename(os.path.join(sys.argv[1], source), os.path.join(sys.argv[1], target))
"""


def rename_through_kills(site: Site, kills: int) -> None:
    site.mount()
    (site.mountpoint / "tmp").mkdir()
    for number in range(FILES):
        (site.mountpoint / "tmp" / f"{number}").write_bytes(b"%d " % number * 100)
    for attempt in range(kills):
        with subprocess.Popen([sys.executable, "-c", RENAMING, str(site.mountpoint)], stderr=subprocess.DEVNULL) as it:
            time.sleep(0.1 + 0.007 * attempt)
            site.kill()
            assert it.wait(30) != 0
        site.mount()
        names = os.listdir(site.mountpoint)
        assert names in (["tmp"], ["final"])
        for number in range(FILES):
            assert (site.mountpoint / names[0] / f"{number}").read_bytes() == b"%d " % number * 100
        assert len(os.listdir(site.mountpoint / names[0])) == FILES
        if names == ["final"]:
            os.rename(site.mountpoint / "final", site.mountpoint / "tmp")
    site.umount()


def test_case_008_killed_while_it_renames(tmp_path: Path) -> None:
    """Whenever the daemon is killed, a directory being renamed has exactly one name, and everything in it."""
    with Site(tmp_path) as site:
        rename_through_kills(site, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_008_killed_fifty_times_while_it_renames(tmp_path: Path) -> None:
    """The same, fifty times."""
    with Site(tmp_path) as site:
        rename_through_kills(site, 50)


TRAINER = """
import os, sys, time
base = sys.argv[1]
def save(step, stop):
    os.mkdir(f"{base}/checkpoint-{step}")
    for number in range(4):
        with open(f"{base}/checkpoint-{step}/shard-{number}", "wb", buffering=0) as file:
            for piece in range(20):
                file.write(bytes([step * 4 + number]) * 10_000)
                if stop and number == 2 and piece == 9:
                    print("halfway", flush=True)
                    time.sleep(600)
save(1, False)
save(2, True)
"""


def test_case_010_a_trainer_killed_in_the_middle_of_a_file(machines: Machines, tmp_path: Path) -> None:
    """What is there is what a plain disk has; elsewhere no file is ever empty or short, and earlier ones are whole."""
    here, there = machines.mount(machines.site("here")), machines.mount(machines.site("there"))
    plain, short, stop = tmp_path / "plain", [], threading.Event()
    plain.mkdir()

    def look() -> None:
        while not stop.is_set():
            for path in there.rglob("shard-*"):
                size = path.stat().st_size
                if size not in (100_000, 200_000) or len(path.read_bytes()) != size:
                    short.append((path, size))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for base in (plain, here):
            with subprocess.Popen([sys.executable, "-c", TRAINER, str(base)], stdout=subprocess.PIPE, text=True) as it:
                assert it.stdout is not None and it.stdout.readline() == "halfway\n"
                it.kill()
        assert census(here, times=False) == census(plain, times=False)
        assert ckptfs.wait(here, "replicated", 60)
        same_soon(here, there)
    finally:
        stop.set()
        watcher.join(60)
    assert short == []


def changed(path: Path, change: Callable[[], object]) -> bool:
    before = path.stat().st_mtime_ns
    change()
    return path.stat().st_mtime_ns != before


def test_case_011_rotation_by_the_times_of_directories(machines: Machines) -> None:
    """A directory's mtime rises with each save, changes with its entries only, and is the same elsewhere and later."""
    site = machines.site("here")
    here = machines.mount(site)
    for step in range(1, 5):
        (here / f"checkpoint-{step}").mkdir()
        (here / f"checkpoint-{step}" / "weights").write_bytes(b"x" * 10_000 * step)
        time.sleep(0.05)
    newest_first = sorted(here.iterdir(), key=os.path.getmtime, reverse=True)
    assert [path.name for path in newest_first] == [f"checkpoint-{step}" for step in (4, 3, 2, 1)]
    one = here / "checkpoint-1"
    assert changed(one, (one / "added").touch)
    assert changed(one, lambda: (one / "added").rename(one / "renamed"))
    assert changed(one, (one / "renamed").unlink)
    assert not changed(one, lambda: (one / "weights").write_bytes(b"other"))
    assert not changed(one, lambda: (one / "weights").chmod(0o600))
    os.utime(here / "checkpoint-2", ns=(1_234_567_890, 987_654_321))
    times = {path.name: path.stat().st_mtime_ns for path in here.iterdir()}
    assert times["checkpoint-2"] == 987_654_321
    assert ckptfs.wait(here, "replicated", 60)
    there = machines.mount(machines.site("there"))
    for _ in range(2):
        for top in (here, there):
            assert {path.name: path.stat().st_mtime_ns for path in top.iterdir()} == times
        site.umount()
        machines.mount(site)


def remove(directory: Path) -> list[str]:
    """rmtree as ranks do it at once; what failed, other than by being too late."""
    failures: list[str] = []

    def failed(function: object, path: str, error: BaseException | tuple[object, BaseException, object]) -> None:
        error = error[1] if isinstance(error, tuple) else error
        if not isinstance(error, FileNotFoundError):
            failures.append(repr(error))

    shutil.rmtree(directory, onerror=failed)
    return failures


def test_case_012_ranks_remove_one_tree(top: Path, tmp_path: Path, ranks: ProcessPoolExecutor) -> None:
    """Four processes remove 500 files at once: all that can fail is that a name is gone; open directories as ext4."""
    seen = []
    for base in (tmp_path / "plain", top):
        old = base / "old"
        for number in range(500):
            (old / f"{number % 10}").mkdir(parents=True, exist_ok=True)
            (old / f"{number % 10}" / f"{number}").touch()
        fd = os.open(old, os.O_RDONLY)
        try:
            assert list(ranks.map(remove, [old] * 4)) == [[]] * 4
            assert not old.exists()
            status = os.fstat(fd)
            seen.append((status.st_nlink, oct(status.st_mode), os.listdir(fd)))
        finally:
            os.close(fd)
    assert seen[0] == seen[1]


def test_case_014_replication_leaves_no_trace(machines: Machines) -> None:
    """While it uploads, a walk finds the program's names and no other, and none that vanishes; status tells how far."""
    way = machines.proxy()
    way.faults = Faults(up_bytes_per_s=1_500_000)
    site = machines.site("here", by=way)
    here = machines.mount(site)
    for step in range(3):
        (here / f"step-{step}").mkdir()
        for number in range(20):
            (here / f"step-{step}" / f"{number}").write_bytes(os.urandom(50_000))
    wanted = sorted(path for path in here.rglob("*"))
    assert site.status()["pending"]["bytes"] > 0
    walks = 0
    while site.status()["pending"]["changes"]:
        found = []
        for folder, folders, files in os.walk(here):
            for name in folders + files:
                os.lstat(os.path.join(folder, name))
                found.append(Path(folder, name))
        assert sorted(found) == wanted
        walks += 1
    assert walks > 1
    until(lambda: site.status()["state"] in ("replicated", "verified"), "everything to be replicated")
    status = site.status()
    assert status["pending"]["bytes"] == 0 and status["last_success_at_s"], status
