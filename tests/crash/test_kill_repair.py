"""Repairs that are killed at any of their steps: nothing is worse than it was, and the next repair ends it."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from ckptfs_mount.unmounted import look_at
from tests.mount.test_fsck import DAMAGES
from tests.mount.test_scrub import Saved, copied, original, saved
from tests.support.consistency import problems
from tests.support.damage import flip, image_of, objects
from tests.support.mounts import Done, Site, run
from tests.support.publishing import restore

__all__ = ["original", "saved"]  # fixtures

FSCK, SCRUB = ("fsck", "--repair"), ("scrub", "--remote")


def damage_catalog(saved: Saved) -> None:
    """What fsck mends: rows, images and, on the remote, packs that are gone."""
    for name in ("nlink", "size", "no manifest", "garbled list", "no image row", "location", "long image", "cut"):
        DAMAGES[name](saved.site.store)
    for path in objects(saved.remote, "packs")[::2]:
        path.unlink()


def damage_bytes(saved: Saved) -> None:
    """What scrub mends: bytes here that are right there, and bytes there that are right here."""
    flip(image_of(saved.site.store, "weights.npy"), 20_000)
    for number in range(1, 12):  # the first chunk of a pack is another's
        flip(image_of(saved.site.store, f"file-{number}"), number)
    for path in objects(saved.remote, "packs")[::2]:
        flip(path, 10)


def killed(site: Site, step: int, command: tuple[str, ...]) -> Done:
    """*command* on the store, killed at that step; 0: not at all."""
    run_it = [sys.executable, "-m", "tests.support.killed", str(step), *command, str(site.store)]
    return run(run_it, {**site.environment, "PYTHONPATH": str(Path(__file__).parents[2])})


def wrong(store: Path) -> set[tuple[str, str]]:
    """What fsck finds, and what is inconsistent."""
    found = {(each.where, each.what) for each in look_at(store, asks_remote=True).findings}
    return found | {("store", each) for each in problems(store)}


def interrupt(saved: Saved, command: tuple[str, ...], step: int, before: Collection[tuple[str, str]]) -> bool:
    """Kill a repair at *step*; whether it was still at work then."""
    done = killed(saved.site, step, command)
    if done.status != -signal.SIGKILL:
        assert done.status == 0, done.said
        return False
    worse = wrong(saved.site.store) - set(before)
    assert not worse, (step, worse)
    return True


def is_whole(saved: Saved, command: tuple[str, ...], restored: Path) -> None:
    """One more repair, and every byte is as it was saved, here and on the remote."""
    done = saved.site.run(*command, str(saved.site.store), "--json")
    assert done.status == 0 and json.loads(done.out)["sound"], done.said
    saved.check()
    there = restore(saved.remote, restored)
    assert {name: there[name] for name in saved.content} == saved.content


REPAIRS: dict[tuple[str, ...], Callable[[Saved], None]] = {FSCK: damage_catalog, SCRUB: damage_bytes}
FIRST = (4, 11, 17, 22, 26)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", REPAIRS, ids=" ".join)
def test_a_repair_killed_again_and_again(saved: Saved, tmp_path: Path, command: tuple[str, ...]) -> None:
    """One store, a few kills, each of them further in what is left to do."""
    REPAIRS[command](saved)
    before = wrong(saved.site.store)
    killed_at = [step for step in FIRST if interrupt(saved, command, step, before)]
    assert len(killed_at) > 2, "it was hardly ever at work"
    is_whole(saved, command, tmp_path / "restored")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", REPAIRS, ids=" ".join)
def test_a_repair_killed_at_each_step(original: Saved, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Every single step, each on a store damaged afresh."""
    for step in itertools.count(1):
        directory = tmp_path / "step"
        directory.mkdir()
        with copied(original, directory) as saved:
            REPAIRS[command](saved)
            goes_on = interrupt(saved, command, step, wrong(saved.site.store))
            is_whole(saved, command, directory / "restored")
        shutil.rmtree(directory)
        if not goes_on:
            break
    assert step > 30
