"""Random changes of one file, checked against a copy in memory, across sealing, remounts, kills and evictions.

The slow ones go on for as long as CKPTFS_EXERCISE_S says, in seconds (default 300), each with a seed that a failure
names; CKPTFS_EXERCISE_SEED sets it:

    CKPTFS_EXERCISE_S=7200 python -m pytest -m slow tests/posix/test_data_exerciser.py
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import ckptfs
from tests.posix.exerciser import HEAVY, LIGHT, MEDIUM, Exerciser, evict, own
from tests.support.disks import small_disk
from tests.support.mounts import TINY, Site

EXERCISE_S = float(os.environ.get("CKPTFS_EXERCISE_S", "300"))
ASKED = int(os.environ.get("CKPTFS_EXERCISE_SEED", "0"))
SEED = ASKED or random.randrange(1, 1 << 30)
QUICK_SEED = ASKED or 1
DISK_MIB = 160
PROCESSES = 4
SHARED_BYTES = 150_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, DISK_MIB) as top:
        yield top


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "remote").mkdir()
    return ("--remote", f"file://{tmp_path}/remote", "--settle", "100ms", "--lag", "100ms", "--owner", "stored")


@pytest.fixture
def site(tmp_path: Path, disk: Path, options: tuple[str, ...]) -> Iterator[Site]:
    """A mount whose store is on a small disk of its own, so that it can be filled, and whose remote is elsewhere."""
    with Site(disk, tuning=TINY) as made:
        made.mountpoint = tmp_path / "mnt"
        made.mount(*options)
        yield made
        made.umount()
        assert "Traceback" not in made.log(), made.log()


def exercise(exerciser: Exerciser, rounds: int) -> None:
    """Each round many changes of bytes, some of the file, and one of what it lies on: each of those comes in turn."""
    heavy = itertools.cycle(exerciser.shuffled(HEAVY))
    try:
        for _ in range(rounds):
            for _ in range(6):
                for _ in range(40):
                    exerciser.perform(LIGHT)
                exerciser.perform(MEDIUM)
            exerciser.perform((next(heavy),))
            exerciser.compare()
    finally:
        exerciser.let_go()


def share(site: Site, disk: Path, options: tuple[str, ...], seed: int, rounds: int) -> None:
    """Several processes, each with ranges of its own, which end in the middle of pages.

    They let go four times, and begin again with a file that was sealed, evicted, or found by another daemon.
    """
    path, told = site.mountpoint / f"shared {seed}", f"seed {seed}"
    with open(path, "wb") as file:
        file.truncate(SHARED_BYTES)
    chooser = random.Random(seed)
    cuts = [0, *sorted(chooser.sample(range(1, SHARED_BYTES), 39)), SHARED_BYTES]
    contents = {part: bytes(part[1] - part[0]) for part in itertools.pairwise(cuts)}
    parts = list(contents)

    def replicated() -> None:
        assert ckptfs.wait(site.mountpoint, "replicated", 60), told

    def evicted() -> None:
        replicated()
        evict(site, disk, path, told)

    def remounted() -> None:
        site.umount()
        site.mount(*options)

    def killed() -> None:
        site.kill()
        site.mount(*options)

    between = (replicated, evicted, killed, remounted)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for leg, event in enumerate(between):
            running = [
                pool.submit(
                    own,
                    str(path),
                    seed + 1000 * leg + number,
                    {part: contents[part] for part in parts[number::PROCESSES]},
                    SHARED_BYTES,
                    rounds // len(between),
                )
                for number in range(PROCESSES)
            ]
            for each in running:
                contents |= each.result(600)
            event()
            assert path.read_bytes() == b"".join(contents.values()), f"after leg {leg}, {told}"


def test_one_file_against_its_shadow(site: Site, disk: Path, options: tuple[str, ...]) -> None:
    """Whatever happens to a file and to what it lies on, its bytes are what was last put there."""
    exerciser = Exerciser(site, disk, options, QUICK_SEED)
    exercise(exerciser, rounds=len(HEAVY))
    kinds = {kind.__name__ for kind in (*LIGHT, *MEDIUM, *HEAVY)}
    if not site.has_passthrough():
        kinds -= {"punch", "zero"}  # fallocate is refused then
    assert kinds <= exerciser.performed.keys(), "each kind of operation was done"


def test_processes_that_share_a_file(site: Site, disk: Path, options: tuple[str, ...]) -> None:
    """Bytes that a process wrote, or stored through a map, stay what they are while others write beside them."""
    share(site, disk, options, QUICK_SEED, rounds=2000)


@pytest.mark.slow
@pytest.mark.timeout(EXERCISE_S + 900)
def test_one_file_against_its_shadow_for_long(site: Site, disk: Path, options: tuple[str, ...]) -> None:
    """The same for as long as asked, with a new seed each time."""
    until, seed = time.monotonic() + EXERCISE_S, SEED
    while time.monotonic() < until:
        exercise(Exerciser(site, disk, options, seed), rounds=20)
        seed += 1


@pytest.mark.slow
@pytest.mark.timeout(EXERCISE_S + 900)
def test_processes_that_share_a_file_for_long(site: Site, disk: Path, options: tuple[str, ...]) -> None:
    """The same for as long as asked, with a new seed each time."""
    until, seed = time.monotonic() + EXERCISE_S, SEED
    while time.monotonic() < until:
        share(site, disk, options, seed, rounds=8000)
        seed += PROCESSES
