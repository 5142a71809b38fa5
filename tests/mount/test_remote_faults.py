"""The remote misbehaves: saves go on as if nothing were, nothing hangs, and everything heals unaided."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import pytest

import ckptfs
from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.keys import manifest_key, pack_key
from ckptfs.encoding.manifest import decode_manifest
from ckptfs.encoding.tree import Entry
from ckptfs.errors import ObjectMissing
from ckptfs.remote.open import open_remote
from ckptfs.replica.browse import RemoteView
from tests.conftest import Bucket
from tests.support.machines import Machines, same_soon
from tests.support.mounts import TINY, Site, is_mounted, until
from tests.support.polling import Poller
from tests.support.proxy import Faults
from tests.support.seaweed import ACCESS_KEY, Seaweed

pytestmark = pytest.mark.timeout(170)

GET, PUT = frozenset({"GET"}), frozenset({"PUT"})

READ_TIMEOUT_S = 3.0
LOCAL_S = 15.0
"""A local operation that takes longer waits for the remote; the machine is busy with other tests."""
SAVES = 5
"""Before anything goes wrong, and again meanwhile: these take no longer."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong on the way to the remote, and what is to be seen of it."""

    faults: Faults
    says: str | None
    """What status says meanwhile where something is saved (a pattern); None: nothing need fail for good ..."""
    reader_says: str | None
    """... and where something is only read."""
    reads: Literal["fail", "succeed", "either"]
    """What becomes of reading bytes that only the remote has."""


FAULTS = {
    "refused": Fault(Faults(mode="refuse"), "no answer", "no answer", "fail"),
    "black hole": Fault(Faults(mode="black_hole"), "no answer", "no answer", "fail"),
    "403": Fault(
        Faults(error_share=1.0, error=(403, "AccessDenied")), "refuses these credentials", "refuses these", "fail"
    ),
    "expired credentials": Fault(
        Faults(expired_keys=frozenset({ACCESS_KEY})), "credentials have expired", "credentials have expired", "fail"
    ),
    "clock 20 minutes off": Fault(
        Faults(clock_s=1200, signed_within_s=900), "clock is 20 minutes behind", "clock is 20 minutes behind", "fail"
    ),
    "503 at 90 %": Fault(Faults(error_share=0.9), None, None, "either"),
    "full": Fault(
        Faults(methods=PUT, error_share=1.0, error=(507, "XMinioStorageFull")), "the store is full", None, "succeed"
    ),
    "quota reached": Fault(
        Faults(methods=PUT, error_share=1.0, error=(403, "QuotaExceeded")), "the store is full", None, "succeed"
    ),
    "latency": Fault(Faults(latency_s=1.0), None, None, "either"),
    "uploads break off": Fault(Faults(cut_up_after=100), "no answer", None, "succeed"),
    "downloads break off": Fault(Faults(cut_after=10), ".", ".", "fail"),
    "packs break off": Fault(Faults(methods=GET, cut_after=1500), None, "bytes|no answer", "fail"),
    "uploads are reset": Fault(Faults(cut_up_after=100, reset=True), "no answer", None, "succeed"),
    "downloads are reset": Fault(Faults(cut_after=10, reset=True), ".", ".", "fail"),
    "packs are reset": Fault(Faults(methods=GET, cut_after=1500, reset=True), None, "[Rr]eset", "fail"),
    "truncated": Fault(Faults(methods=GET, short_after=20), ".", ".", "fail"),
    "flipped on the way up": Fault(Faults(methods=PUT, flip_up=True), "BadDigest|SHA256|checksum", None, "succeed"),
    "flipped on the way down": Fault(Faults(methods=GET, flip_down=True), ".", ".", "fail"),
    "lost acknowledgements": Fault(Faults(drop_answer=True), "no answer", "no answer", "fail"),
    "listings miss all keys": Fault(Faults(unlisted_share=1.0), None, None, "succeed"),
    "listings miss keys": Fault(Faults(unlisted_share=0.5), None, None, "succeed"),
}


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    taken = time.monotonic() - started
    assert taken < seconds, f"{what} took {taken:.1f} s"


def save(base: Path, round_: int) -> float:
    """A save as trainers make it; the seconds that it took."""
    started = time.monotonic()
    directory = base / f"tmp-{round_}"
    directory.mkdir()
    for number in range(8):
        with open(directory / f"shard-{number}", "wb") as file:
            file.write(os.urandom(9000))
            os.fsync(file.fileno())
    directory.rename(base / f"step-{round_}")
    (base / "latest").write_text(f"step-{round_}")
    return time.monotonic() - started


class Reading(threading.Thread):
    """Reads a file in the background: `result` is what came, or the errno; `took_s` how long that took."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.result: object = None
        self.took_s = 0.0

    def run(self) -> None:
        started = time.monotonic()
        try:
            self.result = self.path.read_bytes()
        except OSError as error:
            self.result = error.errno
        self.took_s = time.monotonic() - started

    def check(self, expected: bytes, outcome: str) -> None:
        """It ended in time, and with what may be seen."""
        self.join(60)
        assert not self.is_alive(), f"reading {self.path} hangs"
        allowed = {"fail": [errno.EIO], "succeed": [expected], "either": [errno.EIO, expected]}[outcome]
        assert self.result in allowed, f"{self.path}: {str(self.result)[:40]}"
        if self.result == errno.EIO:
            # Twice: the kernel reads ahead, and then again, alone, what did not come.
            assert self.took_s < 2 * READ_TIMEOUT_S + LOCAL_S / 2, f"EIO only after {self.took_s:.1f} s"


class World:
    """A machine that saves and one that only reads, both behind one faulty way, and one beside them that is not."""

    def __init__(self, machines: Machines) -> None:
        self.way = machines.proxy()
        settings = {"read_timeout_s": READ_TIMEOUT_S}
        self.site = machines.site("saver", by=self.way, settings=settings)
        self.reader = machines.site("reader", by=self.way, settings=settings)
        self.elsewhere = machines.mount(machines.site("elsewhere"))
        self.remote = open_remote(machines.url, environment=machines.environment)
        self.saved: list[int] = []
        """Rounds of which every call returned."""
        self.early = [os.urandom(60_000) for _ in range(3)]
        (self.elsewhere / "early").mkdir()
        for number, data in enumerate(self.early):
            (self.elsewhere / "early" / f"{number}").write_bytes(data)
        assert ckptfs.wait(self.elsewhere, "replicated", 60)
        self.top, self.there = machines.mount(self.site), machines.mount(self.reader, "--read-only")
        self.usual_s = median(self.save(round_) for round_ in range(SAVES))
        assert ckptfs.wait(self.top, "replicated", 60)
        until((self.there / "latest").exists, "the first save to be seen")
        for top in (self.top, self.there):
            assert sorted(os.listdir(top / "early")) == ["0", "1", "2"]

    def save(self, round_: int) -> float:
        taken_s = save(self.top, round_)
        self.saved.append(round_)
        return taken_s

    def says(self, site: Site, pattern: str | None) -> None:
        """Status gives the reason, in both its forms, and so does the log."""
        if pattern is None:
            assert ckptfs.status(site.mountpoint)["path"] == "/"
            return
        said = re.compile(pattern)
        os.listdir(site.mountpoint)  # who looks has others' changes looked for, if it was not done just now
        until(lambda: said.search(last_error(site) or "") is not None, f"status to say {pattern}", 60)
        until(lambda: said.search(site.run("status", str(site.mountpoint)).out) is not None, "people to be told", 20)
        until(lambda: said.search(site.log()) is not None, "the log to have it", 20)

    def endures(self, fault: Fault) -> None:
        """While *fault* is on: everything local goes on, status tells, and reading what is elsewhere ends in time."""
        readings = [Reading(top / "early" / "0") for top in (self.top, self.there)]
        for reading in readings:
            reading.start()
        taken_s = []
        for round_ in range(SAVES, 2 * SAVES):
            with within(LOCAL_S, "a save"):
                taken_s.append(self.save(round_))
            with within(LOCAL_S, "ls, stat and rename"):
                assert {f"step-{each}" for each in range(round_ + 1)} <= set(os.listdir(self.top))
                assert (self.top / f"step-{round_}" / "shard-3").stat().st_size == 9000
                assert not (self.top / f"missing-{round_}").exists()
                for top in (self.top, self.there):
                    assert (top / "early" / "1").stat().st_size == 60_000
                (self.top / "early" / "2").rename(self.top / "early" / "3")
                (self.top / "early" / "3").rename(self.top / "early" / "2")
        assert median(taken_s) < 5 * self.usual_s + 0.2, f"saves took {taken_s} s, {self.usual_s} s before"
        with within(LOCAL_S, "df"):
            assert os.statvfs(self.top).f_blocks > 0
        self.says(self.site, fault.says)
        self.says(self.reader, fault.reader_says)
        if fault.says is not None:
            assert not ckptfs.status(self.top)["safe"]
        for reading in readings:
            reading.check(self.early[0], fault.reads)

    def heals(self) -> None:
        """Nobody does anything: all is uploaded, every byte can be read everywhere, and no error is told any more."""
        until(lambda: ckptfs.status(self.top)["safe"], "everything to be replicated, unaided", 60)
        for top in (self.top, self.there):
            for number, data in enumerate(self.early):
                until(lambda path=top / "early" / f"{number}", data=data: is_there(path, data), "reading to work", 40)
        for site in (self.site, self.reader):
            until(lambda site=site: last_error(site) is None, "the error to be forgotten", 30)
        same_soon(self.top, self.elsewhere)
        same_soon(self.top, self.there)


class Truth(Poller):
    """Asks status all the time, and looks on the remote, past what goes wrong, whenever that says "safe"."""

    pause_s = 0.05

    def __init__(self, world: World) -> None:
        self._world = world
        self.calm = 0
        """How often status said that everything was safe."""
        self.lies: list[str] = []
        """Files that had been saved before it said so, and that another machine could not have read then."""

    def look(self) -> None:
        saved = list(self._world.saved)
        if not ckptfs.status(self._world.top)["safe"]:
            return
        shown = dict(RemoteView(self._world.remote).walk(b"/"))
        for round_ in saved:
            for number in range(8):
                path = f"step-{round_}/shard-{number}"
                if not self._is_readable(shown.get(os.fsencode(path))):
                    self.lies.append(path)
        self.calm += 1

    def _is_readable(self, entry: Entry | None) -> bool:
        if entry is None or entry.size != 9000 or entry.manifest is None:
            return False
        remote, body = self._world.remote, entry.manifest_body
        try:
            body = body or open_object(remote.get(manifest_key(entry.manifest)), entry.manifest)
        except ObjectMissing:
            return False
        packs = {each.pack for each in decode_manifest(body).places}
        return all(remote.size(pack_key(each)) is not None for each in packs)


def last_error(site: Site) -> str | None:
    told: str | None = ckptfs.status(site.mountpoint)["last_error"]
    return told


def is_there(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


@pytest.mark.parametrize("name", FAULTS)
def test_saves_go_on_and_everything_heals(machines: Machines, name: str) -> None:
    """Saves, stat, ls, rename, df and status do not wait for a remote that fails; reads of what it has alone wait a
    while; when it works again, all of it is there, on every machine. What status calls safe is there at any time."""
    world = World(machines)
    with Truth(world) as truth:
        world.way.faults = FAULTS[name].faults
        world.endures(FAULTS[name])
        world.way.heal()
        world.heals()
    assert truth.calm and not truth.lies
    assert world.site.umount().status == 0


@pytest.mark.slow
def test_saves_go_on_with_half_a_minute_of_latency(machines: Machines) -> None:
    """Nothing is slower for it here, reads give up, and status says that nobody answers."""
    world = World(machines)
    slow = Fault(Faults(latency_s=30.0), "no answer", "no answer", "fail")
    world.way.faults = slow.faults
    world.endures(slow)
    world.way.heal()
    world.heals()


def test_a_bucket_that_is_deleted_and_made_anew(machines: Machines, seaweed: Seaweed, bucket: Bucket) -> None:
    """Gone, it is waited for; empty, nothing is put there; when it holds what it held, all heals."""
    world = World(machines)
    remote = world.remote
    held = {each.key: remote.get(each.key) for each in remote.list("", limit=10_000).objects}
    seaweed.delete_bucket(bucket.name)
    world.endures(Fault(Faults(), "no such bucket", "no such bucket", "fail"))
    assert not ckptfs.status(world.top)["safe"] and ckptfs.status(world.top)["newest_safe_set"] is None
    seaweed.create_named_bucket(bucket.name)
    until(lambda: "not the remote that this store" in ckptfs.status(world.top)["last_error"], "this to be told")
    save(world.top, 2 * SAVES)
    time.sleep(1.0)  # several attempts
    assert remote.list("").objects == ()
    for key, data in sorted(held.items(), key=lambda each: each[0].startswith("heads/")):
        remote.put(key, data)
    world.heals()


@pytest.mark.parametrize("name", ["refused", "black hole", "403"])
def test_leaving_is_bounded(machines: Machines, name: str) -> None:
    """umount --no-wait with a remote that fails returns soon, and the next mount has everything."""
    way = machines.proxy()
    site = machines.site("a", by=way)
    top = machines.mount(site)
    way.faults = FAULTS[name].faults
    save(top, 1)
    with within(30, "umount --no-wait"):
        site.umount("--no-wait", status=3)
    assert not is_mounted(top)
    way.heal()
    machines.mount(site)
    until(lambda: site.status()["safe"], "the rest to be replicated", 60)
    assert (top / "latest").read_text() == "step-1"


def test_wrong_credentials_heal_with_right_ones(machines: Machines) -> None:
    """After keys expire, saves go on; `ckptfs auth` from a shell with good ones gets everything uploaded at once."""
    site = machines.site("a", tuning={**TINY, "retry_most_s": 600.0, "retry_first_s": 0.1})
    top = machines.mount(site)
    done = site.run("auth", str(top), AWS_SECRET_ACCESS_KEY="expired")
    assert done.status == 3 and "refuses these credentials" in done.err, done.said
    save(top, 1)
    until(lambda: site.log().count("publishing waits") == 5, "pauses of seconds", 60)
    assert "refuses these credentials" in (last_error(site) or "")
    save(top, 2)
    assert site.run("auth", str(top)).status == 0
    until(lambda: ckptfs.status(top)["safe"], "everything to be replicated", 30)


class Dead:
    """A machine whose remote went silent: *readers* wait for files of "d" already, and another, "held", is open."""

    def __init__(self, machines: Machines, readers: int, *options: str) -> None:
        top = machines.mount(machines.site("writer"))
        (top / "d").mkdir()
        for name in [*map(str, range(readers)), "held"]:
            (top / "d" / name).write_bytes(os.urandom(5000))
        assert ckptfs.wait(top, "replicated", 60)
        way = machines.proxy()
        self.site = machines.site("reader", by=way)
        self.top = machines.mount(self.site, "--read-timeout", f"{READ_TIMEOUT_S:.0f}s", *options)
        assert len(os.listdir(self.top / "d")) == readers + 1
        self._held = os.open(self.top / "d" / "held", os.O_RDONLY)
        way.faults = Faults(mode="black_hole")
        self.readings = [Reading(self.top / "d" / f"{number}") for number in range(readers)]
        for each in self.readings:
            each.start()

    @contextmanager
    def blocked(self) -> Iterator[subprocess.Popen[bytes]]:
        """A program that waits within read(2); it alone has "held" open."""
        with subprocess.Popen("cat", stdin=self._held, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
            os.close(self._held)
            try:
                until(lambda: is_reading(reader.pid), "cat to wait in read(2)", 10)
                yield reader
            finally:
                reader.kill()


def is_reading(pid: int) -> bool:
    """Whether *pid* sleeps in a system call on its standard input."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[1:2] == ["0x0"]


def test_many_readers_of_a_dead_remote(machines: Machines) -> None:
    """Twenty readers wait for the remote and get EIO; beside them ls, stat, df and saves go on, and SIGKILL ends one
    within read(2), at the latest when that would have given up."""
    dead = Dead(machines, 20)
    there = dead.top
    with dead.blocked() as reader:
        for round_ in range(5):
            with within(6, "ls, stat, df and a save beside 20 waiting readers"):
                assert len(os.listdir(there / "d")) == 21
                assert (there / "d" / "7").stat().st_size == 5000
                os.statvfs(there)
                save(there, round_)
                assert (there / f"step-{round_}" / "shard-7").stat().st_size == 9000
            if round_ == 0:
                reader.kill()
                killed_s = time.monotonic()
        assert reader.wait(60) == -signal.SIGKILL
        assert time.monotonic() - killed_s < READ_TIMEOUT_S + LOCAL_S / 2, "a killed reader stays"
    for each in dead.readings:
        each.check(b"", "fail")


def test_leaving_a_dead_remote_with_readers(machines: Machines) -> None:
    """umount says in one line who reads, and SIGTERM ends the mount and their reads; neither waits for the remote."""
    dead = Dead(machines, 20, "--stop-timeout", "1s")
    with dead.blocked() as reader:
        with within(LOCAL_S, "a refused umount"):
            done = dead.site.run("umount", str(dead.top))
        assert done.status == 1 and len(done.said.splitlines()) == 1, done.said
        assert f"{dead.top} is in use by pid {reader.pid} (cat: {dead.top}/d/held)" in done.said
        os.kill(dead.site.pid(), signal.SIGTERM)
        with within(LOCAL_S, "the end of the daemon"):
            assert dead.site.gone(60)
        assert not is_mounted(dead.top)
        assert reader.wait(10) == 1
    for each in dead.readings:
        each.join(10)
        assert isinstance(each.result, int), f"reading {each.path} hangs, or came to {each.result!r}"


def test_a_remote_that_is_slow_to_answer_does_not_slow_lookups(machines: Machines) -> None:
    """With 3 s of latency, lookups wait for news at most half a second, and saves not at all."""
    way = machines.proxy()
    site = machines.site("a", by=way)
    top = machines.mount(site, "--lag", "500ms")
    (top / "file").write_bytes(b"1")
    assert site.run("wait", str(top), "--timeout", "60s").status == 0
    way.faults = Faults(latency_s=3.0)
    for _ in range(4):
        with within(3, "a lookup"):
            assert os.listdir(top) == ["file"]
        time.sleep(0.5)  # older than the lag: the next look asks again
