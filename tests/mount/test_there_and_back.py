"""A run that moves to another machine and back, while the first one still holds what it could not upload."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.machines import Machines, census, same_soon
from tests.support.mounts import Site, until
from tests.support.proxy import Faults

pytestmark = pytest.mark.timeout(150)


def save(base: Path, step: int) -> None:
    directory = base / f"checkpoint-{step}"
    directory.mkdir()
    for name in ("model.bin", "optimizer.bin"):
        (directory / name).write_bytes(f"{step} {name}".encode() * 2000)
    (directory / "trainer_state.json").write_text(f'{{"global_step": {step}}}')


def replicated(site: Site) -> None:
    done = site.run("wait", str(site.mountpoint), "--timeout", "60s")
    assert done.status == 0, done.said


@pytest.mark.parametrize("unplugged", ["killed", "without a network"])
def test_there_and_back(machines: Machines, unplugged: str) -> None:
    """A is unplugged with uploads pending, B resumes, rotates and overwrites; back on A: B's state and A's additions.

    What both changed is as the later one left it, and nothing that B deleted comes back, on either machine.
    """
    way, other_way = machines.proxy(), machines.proxy()
    a = machines.site("a", by=way)
    base = machines.mount(a) / "exp"
    base.mkdir()
    for step in (1, 2):
        save(base, step)
    for name in ("config", "deleted-there", "edited-here-then-deleted-there", "edited-here", "renamed-here"):
        (base / name).write_text("first")
    replicated(a)

    way.faults = Faults(mode="refuse")
    save(base, 3)
    (base / "checkpoint-2" / "late").write_text("added by A")
    (base / "checkpoint-1" / "late").write_text("added by A to what B removes")
    (base / "config").write_text("by A, earlier")
    (base / "edited-here-then-deleted-there").write_text("by A, earlier")
    (base / "edited-here").write_text("by A, the only one")
    (base / "renamed-here").rename(base / "renamed")
    if unplugged == "killed":
        a.kill()
    else:
        a.umount("--no-wait", status=3)
    way.heal()

    b = machines.site("elsewhere/b", by=other_way)
    there = machines.mount(b, "--owner", "1234:4321") / "exp"
    assert sorted(each.name for each in there.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert (there / "config").stat().st_uid == 1234 and (there / "config").stat().st_gid == 4321
    assert (there / "checkpoint-2" / "model.bin").read_bytes() == b"2 model.bin" * 2000
    save(there, 4)
    shutil.rmtree(there / "checkpoint-1")
    (there / "config").write_text("by B, later")
    (there / "deleted-there").unlink()
    (there / "edited-here-then-deleted-there").unlink()
    b.umount()

    base = machines.mount(a) / "exp"
    (base / "after").write_text("back on A")

    def right(top: Path) -> None:
        steps = [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
        assert sorted(os.listdir(top)) == ["after", *steps, "config", "edited-here", "renamed"]
        # B did not know of it and so did not delete it: the one thing that is left of the first.
        assert os.listdir(top / "checkpoint-1") == ["late"]
        assert (top / "checkpoint-1" / "late").read_text() == "added by A to what B removes"
        assert (top / "config").read_text() == "by B, later"
        assert (top / "edited-here").read_text() == "by A, the only one"
        assert (top / "renamed").read_text() == "first"
        for step in (2, 3, 4):
            assert (top / f"checkpoint-{step}" / "model.bin").read_bytes() == f"{step} model.bin".encode() * 2000
        assert (top / "checkpoint-2" / "late").read_text() == "added by A"

    right(base)
    replicated(a)
    right(base)
    machines.mount(b)
    same_soon(a.mountpoint, b.mountpoint)
    right(there)
    a.umount()
    with_a_third = machines.site("third")
    right(machines.mount(with_a_third) / "exp")


def test_a_store_that_moved_goes_on(machines: Machines, tmp_path: Path) -> None:
    """A's store, unplugged, carried elsewhere and mounted at another path, uploads what was pending."""
    way = machines.proxy()
    a = machines.site("a", by=way)
    top = machines.mount(a)
    save(top, 1)
    replicated(a)
    way.faults = Faults(mode="refuse")
    save(top, 2)
    a.umount("--no-wait", status=3)
    way.heal()
    moved = machines.site("other/place", by=way)
    shutil.rmtree(moved.store)
    a.store.rename(moved.store)
    moved.mount()
    replicated(moved)
    third = machines.site("third")
    assert sorted(os.listdir(machines.mount(third))) == ["checkpoint-1", "checkpoint-2"]
    same_soon(moved.mountpoint, third.mountpoint)


@pytest.mark.parametrize("told_by", ["wait", "status"])
def test_the_machine_is_gone(machines: Machines, told_by: str) -> None:
    """Unplugged and never seen again: every checkpoint that was called replicated is elsewhere, byte for byte."""
    way = machines.proxy()
    a = machines.site("a", by=way)
    top = machines.mount(a)
    for step in (1, 2, 3):
        save(top, step)
        if told_by == "wait":
            replicated(a)
        else:
            until(lambda: a.status()["safe"], "status to call everything safe", 60)
    promised = census(top)
    way.faults = Faults(mode="refuse")
    save(top, 4)
    assert not a.status()["safe"]
    unsafe = a.run("wait", str(top / "checkpoint-4"), "--timeout", "1s")
    assert unsafe.status == 3 and a.run("wait", str(top / "checkpoint-3"), "--timeout", "1s").status == 0
    a.kill()
    shutil.rmtree(a.store)
    there = census(machines.mount(machines.site("elsewhere")))
    assert there == promised
