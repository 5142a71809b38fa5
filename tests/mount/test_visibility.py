"""What another machine sees while this one saves: whole checkpoints only, markers only after what they mark."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.machines import Machines, same_soon
from tests.support.mounts import until
from tests.support.polling import Poller

pytestmark = pytest.mark.timeout(150)

FILES = 12
SIZE = 3000
LINK = "newest"
"""A marker of this name is a symbolic link: reading it fetches nothing, so what it names is looked at right after."""
SETTLE_S = 0.1
"""As `Machines.mount` sets it."""
BUDGET_S = 15.0
"""How long the small versions go on saving."""


def content(step: int, name: str) -> bytes:
    return f"{step} {name} ".encode().ljust(SIZE, b".") + step.to_bytes(8, "big") * (step % 7)


@dataclass
class Watcher(Poller):
    """Polls a directory on another machine and notes what must never be seen.

    *complete* gives the names that checkpoint *step* has once it is whole. A step is written once and its name never
    used again, so that what is listed before and after a look was there all the time.
    """

    base: Path
    complete: Callable[[int], list[str]]
    marker: Path | None = None
    """A file that names the newest checkpoint; it may lie above *base*."""
    prefix: str = "step-"
    seen: set[int] = field(default_factory=set)
    markers: list[int] = field(default_factory=list)
    excused: set[int] = field(default_factory=set)
    """Steps whose removal paused: they may be seen half gone. Known when it is over."""
    _noted: list[tuple[int | None, str]] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [what for step, what in self._noted if step not in self.excused]

    def is_done(self) -> bool:
        return len(self.problems) >= 5

    def steps(self) -> set[int]:
        try:
            names = os.listdir(self.base)
        except FileNotFoundError:
            return set()
        return {int(name.removeprefix(self.prefix)) for name in names if name.startswith(self.prefix)}

    def marked(self) -> int | None:
        if self.marker is None:
            return None
        try:
            named = os.readlink(self.marker) if self.marker.name == LINK else self.marker.read_text()
            return int(named.removeprefix(self.prefix))
        except FileNotFoundError:
            return None

    def look(self) -> None:
        try:
            self._look()
        except Exception as error:
            self._noted.append((None, f"{type(error).__name__}: {error}"))

    def _look(self) -> None:
        marked = self.marked()
        if marked is not None:
            if not self.markers or self.markers[-1] != marked:
                self.markers.append(marked)
            wrong = self.fault(marked)
            if wrong is not None and self.marked() == marked:
                self._noted.append((None, f"latest names {marked}: {wrong}"))
        for step in self.steps():
            wrong = self.fault(step)
            if wrong is None:
                self.seen.add(step)
            elif step in self.steps():
                self._noted.append((step, f"step {step}: {wrong}"))

    def fault(self, step: int) -> str | None:
        """What is wrong with the checkpoint of *step*, None when it is whole."""
        directory = self.base / f"{self.prefix}{step}"
        wanted = sorted(self.complete(step))
        try:
            names = sorted(os.listdir(directory))
            if names != wanted:
                return f"holds {names}"
            for name in names:
                if (directory / name).read_bytes() != content(step, name):
                    return f"{name} has other bytes"
        except FileNotFoundError as error:
            return f"{error}"
        return None


def plain_names(step: int) -> list[str]:
    return [f"shard-{number}" for number in range(FILES)]


def save_aside(base: Path, marker: Path, step: int) -> None:
    """A checkpoint written under another name, renamed, and marked."""
    aside = base / f"tmp-{step}"
    aside.mkdir()
    for name in plain_names(step):
        (aside / name).write_bytes(content(step, name))
    aside.rename(base / f"step-{step}")
    if marker.name == LINK:
        marker.with_suffix(".tmp").symlink_to(f"step-{step}")
    else:
        marker.with_suffix(".tmp").write_text(f"step-{step}")
    marker.with_suffix(".tmp").rename(marker)


def remove(directory: Path) -> float:
    """`shutil.rmtree` of a directory of files; the longest pause between two steps of it."""
    last, longest = time.monotonic(), 0.0
    for path in [*directory.iterdir(), directory]:
        path.rmdir() if path == directory else path.unlink()
        now = time.monotonic()
        last, longest = now, max(longest, now - last)
    return longest


def save_and_rotate(machines: Machines, below: str, marker: str, rounds: int, budget_s: float) -> Watcher:
    """Save into *below*, with a marker at the top, and rotate to two, while another machine watches."""
    writer, reader = machines.site("writer"), machines.site("reader")
    here = machines.mount(writer)
    base = here / below
    base.mkdir(parents=True, exist_ok=True)
    there = machines.mount(reader, "--read-only")
    deadline = time.monotonic() + budget_s
    step, excused = 0, set[int]()

    def arrived() -> bool:
        return watcher.markers[-1:] == [step] or bool(watcher.problems)

    # One alone would never look while another's look has a head merged.
    watchers = [Watcher(there / below, plain_names, there / marker, excused=excused) for _ in range(3)]
    with watchers[0], watchers[1], watchers[2] as watcher:
        while step < rounds and time.monotonic() < deadline and not watcher.problems:
            step += 1
            save_aside(base, here / marker, step)
            if step > 2 and remove(base / f"step-{step - 2}") > SETTLE_S / 2:
                excused.add(step - 2)  # on a busy machine this was a pause that looks like an end
            if step % 3 == 0:  # published before the next one begins
                until(arrived, f"step {step} there")
        assert watcher.problems == []
        until(lambda: {step - 1, step} <= watcher.seen or bool(watcher.problems), "the last two to be seen")
    for each in watchers:
        assert each.problems == []
        assert each.markers == sorted(each.markers), "latest never goes back"
    assert watcher.steps() == {step - 1, step}
    return watcher


@pytest.mark.parametrize(("below", "marker"), [("", "latest"), ("exp/run1", LINK)], ids=["top", "below"])
def test_no_half_checkpoint_is_ever_seen(machines: Machines, below: str, marker: str) -> None:
    """12 files are written aside, renamed, marked and rotated; a second store sees whole checkpoints only."""
    watcher = save_and_rotate(machines, below, marker, 200, BUDGET_S)
    assert len(watcher.seen) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("below", "marker"), [("", "latest"), ("exp/run1", LINK)], ids=["top", "below"])
def test_no_half_checkpoint_is_ever_seen_in_200_rounds(machines: Machines, below: str, marker: str) -> None:
    """The same, 200 rounds."""
    save_and_rotate(machines, below, marker, 200, 1500)


# In place


def hf_names(step: int) -> list[str]:
    return ["config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"]


def dcp_names(step: int) -> list[str]:
    return ["__0_0.distcp", "__1_0.distcp", ".metadata"]


def sharded_names(step: int) -> list[str]:
    return [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + ["model.safetensors.index.json"]


def save_in_place(base: Path, prefix: str, step: int, names: list[str], pause_s: float) -> None:
    directory = base / f"{prefix}{step}"
    directory.mkdir()
    for name in names:
        time.sleep(pause_s)
        (directory / name).write_bytes(content(step, name))


class Logging:
    """A log that stays open and grows, as TensorBoard's does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.lines = 0

    def _run(self) -> None:
        with open(self._path, "ab") as file:
            while not self._stop.wait(0.05):
                file.write(b"%08d\n" % self.lines)
                file.flush()
                self.lines += 1

    def __enter__(self) -> Logging:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)


@pytest.mark.parametrize(
    ("prefix", "names", "pause_s", "settle"),
    [
        ("checkpoint-", hf_names, 0.25, "100ms"),
        ("step-", dcp_names, 0.3, "100ms"),
        ("model-", sharded_names, 0.3, "100ms"),
        ("epoch_", plain_names, 0.1, "500ms"),
    ],
    ids=["hf", "dcp", "sharded", "unrecognised"],
)
def test_written_in_place_beside_a_growing_log(
    machines: Machines, prefix: str, names: Callable[[int], list[str]], pause_s: float, settle: str
) -> None:
    """Checkpoints written straight into place, with pauses, show when they are whole, while a log goes on growing."""
    logs = {"log_after_s": 0.5, "log_seal_s": 0.3, "log_seal_after_fsync_s": 0.2}
    writer, reader = machines.site("writer", settings=logs), machines.site("reader")
    base = machines.mount(writer, "--settle", settle)
    there = machines.mount(reader, "--read-only")
    with Logging(base / "events.log") as log, Watcher(there, names, prefix=prefix) as watcher:
        for step in (1, 2, 3):
            save_in_place(base, prefix, step, names(step), pause_s)
            if step == 3:
                shutil.rmtree(base / f"{prefix}1")
        until(lambda: watcher.seen >= {2, 3} or bool(watcher.problems), "whole checkpoints, while the log grows", 20)
        assert watcher.problems == []
        until(lambda: watcher.steps() == {2, 3}, "the first to be gone")
        lines = log.lines
        until(
            lambda: (there / "events.log").exists() and len((there / "events.log").read_bytes()) >= 9 * lines,
            "the log to be followed",
        )
    assert watcher.problems == []
    until(lambda: (there / "events.log").read_bytes() == (base / "events.log").read_bytes(), "the whole log")


# What others do


def test_changes_of_others_show_within_the_lag(machines: Machines) -> None:
    """What another machine creates, replaces, renames, chmods and removes shows in lookups and listings soon after."""
    a, b = machines.site("a"), machines.site("b")
    here, there = machines.mount(a), machines.mount(b)

    def published(expected: Callable[[], bool], what: str) -> None:
        assert a.run("publish", str(here)).status == 0
        until(expected, what, 5)

    def reads(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    (here / "d").mkdir()
    (here / "d" / "file").write_bytes(b"one")
    published(lambda: reads(there / "d" / "file") == b"one", "a new file")
    for names in (["file"], ["file", "second"], ["file"]):  # the kernel may keep a listing, but not for longer
        if "second" in names:
            (here / "d" / "second").write_bytes(b"2")
        elif (here / "d" / "second").exists():
            (here / "d" / "second").unlink()
        published(lambda names=names: sorted(os.listdir(there / "d")) == names, f"a listing of {names}")  # type: ignore[misc]
        assert sorted(os.listdir(there / "d")) == names
    (here / "d" / "file").write_bytes(b"number two")
    published(lambda: reads(there / "d" / "file") == b"number two", "its new content")
    assert (there / "d" / "file").stat().st_size == 10
    (here / "d" / "other").write_bytes(b"by rename")
    (here / "d" / "other").rename(here / "d" / "file")
    published(lambda: reads(there / "d" / "file") == b"by rename", "what was renamed over it")
    assert os.listdir(there / "d") == ["file"]
    (here / "d" / "file").chmod(0o600)
    os.utime(here / "d" / "file", ns=(1_000_000_007, 2_000_000_009))
    published(lambda: (there / "d" / "file").stat().st_mtime_ns == 2_000_000_009, "its time")
    assert (there / "d" / "file").stat().st_mode & 0o777 == 0o600
    (here / "d").rename(here / "e")
    published(lambda: os.listdir(there) == ["e"], "the directory's name")
    assert reads(there / "e" / "file") == b"by rename"
    until(lambda: not (there / "d").exists(), "the kernel to be told of the rename", 5)
    shutil.rmtree(here / "e")
    published(lambda: os.listdir(there) == [], "its removal")
    until(lambda: not (there / "e").exists(), "the kernel to be told of the removal", 5)


@pytest.mark.parametrize("way", ["rename", "link and unlink"])
def test_a_file_that_is_moved_and_then_changed_leaves_its_old_place(machines: Machines, way: str) -> None:
    """Also where the other machine's kernel knows the file: the old name is gone there, and stays gone here."""
    a, b = machines.site("a"), machines.site("b")
    here, there = machines.mount(a), machines.mount(b)
    (here / "d").mkdir()
    (here / "d" / "x").write_bytes(b"1" * 1000)
    assert a.run("publish", str(here)).status == 0
    until((there / "d" / "x").exists, "the file", 5)
    if way == "rename":
        (here / "d" / "x").rename(here / "x")
    else:
        (here / "x").hardlink_to(here / "d" / "x")
        (here / "d" / "x").unlink()
    with open(here / "x", "ab") as file:
        file.write(b"more")
    assert a.run("publish", str(here)).status == 0
    until((there / "x").exists, "the new name", 5)
    assert os.listdir(there / "d") == []
    assert (there / "x").read_bytes() == b"1" * 1000 + b"more"
    (there / "d" / "other").touch()
    assert b.run("publish", str(there)).status == 0
    until((here / "d" / "other").exists, "the other machine's file", 5)
    assert os.listdir(here / "d") == ["other"]


def test_a_file_that_is_replaced_while_it_is_read(machines: Machines) -> None:
    """Who reads a file goes on with what was opened; who opens it later has the new one, never a mixture."""
    a, b = machines.site("a"), machines.site("b")
    here, there = machines.mount(a), machines.mount(b)
    old, new = os.urandom(400_000), os.urandom(300_000)
    (here / "model").write_bytes(old)
    assert a.run("publish", str(here)).status == 0
    until((there / "model").exists, "the file", 5)
    for replace in ("in place", "by rename"):
        with open(there / "model", "rb", buffering=0) as file:
            head = file.read(50_000)
            assert head == old[:50_000]
            if replace == "in place":
                (here / "model").write_bytes(new)
            else:
                (here / "aside").write_bytes(new)
                (here / "aside").rename(here / "model")
            assert a.run("publish", str(here)).status == 0
            until(lambda: (there / "model").read_bytes() == new, f"the new content, {replace}", 10)  # noqa: B023
            assert head + file.read() == old, replace
        old, new = new, os.urandom(350_000)


def test_two_writers_in_one_directory_converge(machines: Machines) -> None:
    """Two machines create, rename, replace and delete in one directory at once; both end with the same."""
    a, b = machines.site("a"), machines.site("b")
    mounts = machines.mount(a), machines.mount(b)
    (mounts[0] / "shared").mkdir()
    assert a.run("publish", str(mounts[0])).status == 0
    until((mounts[1] / "shared").exists, "the directory", 5)
    failures: list[BaseException] = []

    def work(index: int) -> None:
        base, me = mounts[index] / "shared", "ab"[index]
        for round_ in range(40):
            try:
                (base / f"{me}-{round_}").write_bytes(os.urandom(2000))
                (base / f"both-{round_ % 5}").write_bytes(f"{me}{round_}".encode() * 100)
                if round_ % 3 == 0:
                    (base / f"{me}-{round_}").rename(base / f"moved-{me}-{round_}")
                if round_ % 4 == 0 and round_:
                    (base / f"{me}-{round_ - 2}").unlink()
                if round_ % 10 == 5:
                    (base / f"dir-{round_}").mkdir(exist_ok=True)
                    (base / f"dir-{round_}" / me).write_bytes(me.encode())
                os.listdir(base)
            except FileNotFoundError:
                continue  # the other machine was here
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for site, mountpoint in zip((a, b), mounts, strict=True):
        assert site.run("wait", str(mountpoint), "--timeout", "40s").status == 0
    same_soon(*mounts)
    names = set(os.listdir(mounts[0] / "shared"))
    assert {f"both-{n}" for n in range(5)} <= names
    for me in "ab":
        kept = {f"moved-{me}-{n}" for n in range(0, 40, 3)} | {f"{me}-{n}" for n in range(40) if n % 3}
        gone = {f"{me}-{n - 2}" for n in range(4, 40, 4)}
        assert kept - gone <= names
        assert not names & (gone - {f"moved-{me}-{n}" for n in range(0, 40, 3)})
    for directory in ("dir-5", "dir-15", "dir-25", "dir-35"):
        assert set(os.listdir(mounts[0] / "shared" / directory)) == {"a", "b"}
