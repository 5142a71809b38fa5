"""One machine's changes reach a directory of another while programs there make, look at and remove names in it."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ckptfs
from tests.support.machines import Machines, same_soon
from tests.support.mounts import run, until
from tests.support.polling import Poller

LONGEST_S = 5.0
"""That a single call may take, with other tests on the same processors."""
NAMES = 32
"""Both machines change the first half of them, one of them the others."""

BUSY = """
import errno, json, os, random, sys, threading, time
top, names, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
failures, times, counts, theirs = [], {}, {}, set()

def create(path):
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(fd, b"here " * 100)
    os.close(fd)

def read(path):
    with open(path, "rb") as file:
        if (data := file.read()) and not data.startswith((b"here ", b"anew ")):
            theirs.add(data)

def overwrite(path):
    with open(path, "wb") as file:
        file.write(b"anew " * 100)

def names_below(_):
    os.listdir(top)

def stat_all(_):
    [entry.stat() for entry in os.scandir(top)]

def rename(path):
    os.rename(path, f"{top}/{chooser.randrange(names // 2)}")

changes = (create, create, overwrite, os.unlink, rename)
calls = (*changes, read, read, os.stat, os.stat, names_below, stat_all)
allowed = {create: [errno.EEXIST], overwrite: [], names_below: []}

def work(number):
    while time.monotonic() < end:
        kind = chooser.randrange(len(calls))
        begun = time.monotonic()
        try:
            calls[kind](f"{top}/{chooser.randrange(names // 2 if calls[kind] in changes else names)}")
            counts[kind] = counts.get(kind, 0) + 1
        except OSError as error:
            if error.errno not in allowed.get(calls[kind], [errno.ENOENT]):
                failures.append(f"{calls[kind].__name__}: {error!r}")
        times[kind] = max(times.get(kind, 0), time.monotonic() - begun)

chooser, end = random.Random(1), time.monotonic() + seconds
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
found = {"failures": failures[:20], "longest": max(times.values()), "theirs": len(theirs)}
print(json.dumps({**found, "kinds": len(counts) == len(calls)}))
"""


@dataclass
class Changer(Poller):
    """Changes names below *top* on and on."""

    top: Path
    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    pause_s = 0.002

    def __post_init__(self) -> None:
        self._random = random.Random(2)

    def look(self) -> None:
        path, other = (self.top / f"{self._random.randrange(NAMES)}" for _ in range(2))
        what = self._random.choice(("create", "replace", "unlink", "rename"))
        try:
            if what == "create":
                path.write_bytes(os.urandom(self._random.randrange(5000)))
            elif what == "replace":
                (self.top / "aside").write_bytes(os.urandom(3000))
                (self.top / "aside").rename(path)
            elif what == "unlink":
                path.unlink()
            else:
                path.rename(other)
            self.done[what] += 1
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or what not in ("unlink", "rename"):
                self.failures.append(f"{what}: {error!r}")


def change_and_be_changed(machines: Machines, passthrough: str, seconds: float) -> None:
    options = ("--passthrough", passthrough, "--max-lag", "200ms")  # else what never rests is not published
    tops = [machines.mount(machines.site(name), *options) / "shared" for name in ("a", "b")]
    tops[0].mkdir()
    assert ckptfs.wait(tops[0], "replicated", 30)
    until(tops[1].exists, "the directory")
    with Changer(tops[0]) as changer:
        done = run([sys.executable, "-c", BUSY, str(tops[1]), str(NAMES), str(seconds)], timeout_s=seconds + 60)
    assert done.status == 0, done.said
    found = json.loads(done.out)
    assert found["failures"] == changer.failures == []
    assert found["longest"] < LONGEST_S
    assert found["kinds"], "each kind of call was done"
    assert found["theirs"] > seconds, "what the other machine wrote was met all the time"
    assert min(changer.done[what] for what in ("create", "replace", "unlink", "rename")) > seconds, changer.done
    for top in tops:
        assert ckptfs.wait(top, "replicated", 60)
    same_soon(*tops)


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_no_call_hangs_in_a_directory_that_others_change(machines: Machines, passthrough: str) -> None:
    """Every call of four threads ends soon, with ENOENT or EEXIST where those can be; both machines agree at last."""
    change_and_be_changed(machines, passthrough, 5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_no_call_hangs_in_a_directory_that_others_change_for_long(machines: Machines, passthrough: str) -> None:
    """The same for a minute."""
    change_and_be_changed(machines, passthrough, 60)
