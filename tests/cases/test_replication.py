"""Group G: what other machines see, and what is asked of the remote, while somebody saves or it is in a bad way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import numpy as np
import pytest

import ckptfs
from tests.conftest import Bucket
from tests.support.disks import small_disk
from tests.support.machines import Machines
from tests.support.mounts import until
from tests.support.polling import Poller
from tests.support.proxy import FaultProxy, Faults
from tests.support.seaweed import ACCESS_KEY, NEXT_ACCESS_KEY, NEXT_SECRET_KEY, SECRET_KEY

pytestmark = pytest.mark.timeout(170)

MIB = 1 << 20
GIB = 1 << 30
LAG_S = 0.1
"""As `Machines.mount` sets it."""
SEEN_S = 10.0
"""From closing to the last other machine, unaided; the machine is busy with other tests."""
PUT = frozenset({"PUT"})
LOCAL_S = 15.0
"""A save that takes longer waits for the remote; the machine is busy with other tests."""


def digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


class Noise:
    """Somebody else who goes on making small files, so that nothing ever settles."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.02):
            (self._directory / f"{number}").write_bytes(os.urandom(2000))
            number += 1

    def __enter__(self) -> Noise:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)


@dataclass
class Commits(Poller):
    """Which runs another machine sees as committed, and whether every shard that the marker names is whole by then."""

    base: Path
    seen: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    pause_s = 0.05

    def look(self) -> None:
        for run in self.base.glob("run-*"):
            if run.name in self.seen or not (run / "COMMIT").exists():
                continue
            for name, expected in json.loads((run / "COMMIT").read_text()).items():
                try:
                    found = digest((run / name).read_bytes())
                except OSError as error:
                    found = str(error)
                if found != expected:
                    self.wrong.append(f"{run.name}/{name}: {found}")
            self.seen.add(run.name)


@dataclass
class Ages(Poller):
    """How old, in seconds, the oldest change was that was not replicated, whenever status was asked."""

    path: Path
    seen: list[float] = field(default_factory=list)
    pause_s = 0.1

    def look(self) -> None:
        since = ckptfs.status(self.path)["oldest_pending_at_s"]
        if since is not None:
            self.seen.append(time.time() - since)


def test_case_045_markers_come_after_shards_and_nothing_waits_for_ever(machines: Machines) -> None:
    """Beside constant other writes, on a slow line: a COMMIT that is seen has all its shards, and the age of what waits
    is told, and bounded."""
    way = machines.proxy()
    writer = machines.site("writer", by=way)
    top = machines.mount(writer, "--max-lag", "1s")
    there = machines.mount(machines.site("reader"), "--read-only")
    (top / "noise").mkdir()
    way.faults = Faults(methods=PUT, up_bytes_per_s=MIB)
    with Commits(there) as commits, Ages(top) as ages, Noise(top / "noise"):
        for step in range(4):
            run = top / f"run-{step}"
            run.mkdir()
            shards = {f"shard-{number}": os.urandom(40_000) for number in range(6)}
            for name, data in shards.items():
                (run / name).write_bytes(data)
            (run / "COMMIT").write_text(json.dumps({name: digest(data) for name, data in shards.items()}))
            time.sleep(0.5)
        until(lambda: len(commits.seen) == 4, "every marker to be seen", 60)
    assert commits.wrong == []
    assert ages.seen and max(ages.seen) < 20, max(ages.seen)
    assert ckptfs.wait(top, "replicated", 60)
    assert ckptfs.status(top)["oldest_pending_at_s"] is None
    way.faults = Faults(mode="refuse")
    (top / "last").write_bytes(b"1")
    time.sleep(1.5)
    assert 1.4 < time.time() - ckptfs.status(top)["oldest_pending_at_s"] < 10
    said = writer.run("status", str(top)).out
    assert "the oldest for" in said, said


@dataclass
class Marker(Poller):
    """When a marker that another machine makes was first seen, and what else looking for it gave, by name and in the
    directory's listing."""

    path: Path
    at_s: float | None = None
    other: Counter[str] = field(default_factory=Counter)
    pause_s = 0.01

    def look(self) -> None:
        try:
            os.stat(self.path)
        except FileNotFoundError:
            self.other["absent again" if self.at_s else "absent"] += 1
        except OSError as error:
            self.other[errno.errorcode[error.errno or 0]] += 1
        else:
            self.at_s = self.at_s or time.monotonic()
            self._list()

    def _list(self) -> None:
        try:
            if self.path.name not in os.listdir(self.path.parent):
                self.other["not listed"] += 1
        except OSError as error:
            self.other[f"{errno.errorcode[error.errno or 0]} of listing"] += 1


def test_case_046_throttling_makes_no_file_vanish(machines: Machines) -> None:
    """A marker is seen within the lag by who polled for it before. Throttled, stat knows what it knew and is EIO for
    the rest, never ENOENT, and no error is remembered."""
    way = machines.proxy()
    here = machines.mount(machines.site("here"))
    reader = machines.site("there", by=way, settings={"read_timeout_s": 1.0})
    there = machines.mount(reader)
    (here / "seen").mkdir()
    assert ckptfs.publish(here) == []
    until((there / "seen").is_dir, "the directory")
    with Marker(there / "seen" / "_READY") as marker:
        until(lambda: marker.other["absent"] > 20, "the marker to be looked for")
        (here / "seen" / "_READY").touch()
        (here / "unseen").mkdir()
        (here / "unseen" / "_READY").touch()
        assert ckptfs.publish(here) == []
        published_s = time.monotonic()
        until(lambda: marker.at_s is not None, "the marker")
        assert marker.at_s is not None and marker.at_s - published_s < LAG_S + 3
        until((there / "unseen").is_dir, "the other directory")
        for error in ((503, "SlowDown"), (429, "TooManyRequests")):
            way.faults = Faults(error_share=1.0, error=error)
            for _ in range(2):
                with pytest.raises(OSError) as failed:
                    os.stat(there / "unseen" / "_READY")
                assert failed.value.errno == errno.EIO
            assert sorted(os.listdir(there)) == ["seen", "unseen"]
            assert "TooMany" in ckptfs.status(there)["last_error"] or "SlowDown" in ckptfs.status(there)["last_error"]
        way.heal()
        assert os.stat(there / "unseen" / "_READY").st_size == 0
    assert set(marker.other) == {"absent"}, marker.other


def nine_of_ten_refused(machines: Machines, markers: int, pause_s: float) -> None:
    """Nine requests of ten are refused, one way and the other, while new markers appear: each is seen, and stays."""
    way = machines.proxy()
    here = machines.mount(machines.site("here"))
    there = machines.mount(machines.site("there", by=way), "--read-timeout", "5s")
    errors = ((503, "SlowDown"), (429, "TooManyRequests"))
    with ExitStack() as stack:
        looked_for = []
        for number in range(markers):
            way.faults = Faults(error_share=0.9, error=errors[number % 2])
            (here / f"step-{number}").mkdir()
            (here / f"step-{number}" / "_READY").touch()
            assert ckptfs.publish(here) == []
            looked_for.append(stack.enter_context(Marker(there / f"step-{number}" / "_READY")))
            time.sleep(pause_s)
        way.heal()
        until(lambda: all(each.at_s is not None for each in looked_for), "every marker")
    for each in looked_for:
        assert not set(each.other) & {"absent again", "not listed", "ENOENT of listing"}, each.other


def test_case_046_seconds_of_throttling(machines: Machines) -> None:
    """What was seen is never ENOENT, by stat and by listdir, with 503 and with 429."""
    nine_of_ten_refused(machines, 4, 1.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_case_046_a_minute_of_throttling(machines: Machines) -> None:
    """The same for a minute."""
    nine_of_ten_refused(machines, 12, 5.0)


@dataclass
class Wholes(Poller):
    """Whatever a machine sees of shards is one of the contents that were closed, whole."""

    base: Path
    expected: dict[str, bytes]
    looks: int = 0
    wrong: list[str] = field(default_factory=list)

    def look(self) -> None:
        for name in os.listdir(self.base):
            if self.is_ending:
                return
            data = (self.base / name).read_bytes()
            self.looks += 1
            if data != self.expected[name]:
                self.wrong.append(f"{name}: {len(data)} of {len(self.expected[name])} bytes")
            if (self.base / name).stat().st_size != len(self.expected[name]):
                self.wrong.append(f"{name}: wrong size")


def add_shards(machines: Machines, rounds: int, *, publish: bool = True) -> None:
    """Where they are not published, settling and the lag bring them."""
    here = machines.mount(machines.site("here"))
    readers = [machines.mount(machines.site(f"reader-{number}"), "--read-only") for number in range(2)]
    (here / "shards").mkdir()
    assert ckptfs.publish(here) == []
    for each in readers:
        until((each / "shards").is_dir, "the directory")
    expected: dict[str, bytes] = {}
    random = np.random.default_rng(48)
    with Wholes(readers[0] / "shards", expected) as first, Wholes(readers[1] / "shards", expected) as second:
        for number in range(rounds):
            name = f"shard-{number}"
            expected[name] = data = random.bytes(int(random.integers(1, 60_000)))
            with open(here / "shards" / name, "wb", buffering=0) as file:
                for at in range(0, len(data), 10_000):
                    file.write(data[at : at + 10_000])
            closed_s = time.monotonic()
            if publish:
                assert ckptfs.publish(here / "shards" / name) == []
                time.sleep(LAG_S)
            for each in readers:
                path = each / "shards" / name
                until(path.exists, "the shard", closed_s + SEEN_S - time.monotonic())
                with open(path, "rb") as file:
                    assert os.fstat(file.fileno()).st_size == len(data)
                    file.seek(-min(len(data), 4096), os.SEEK_END)
                    assert file.read() == data[-4096:]
    assert first.wrong == [] and second.wrong == []
    assert first.looks > rounds / 2 and second.looks > rounds / 2


@pytest.mark.parametrize("publish", [True, False])
def test_case_048_a_shard_is_absent_or_whole(machines: Machines, publish: bool) -> None:
    """Two machines look all the time while a third adds shards: after publishing and the lag, or in a while by
    themselves, both have each whole."""
    add_shards(machines, 15, publish=publish)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_case_048_a_shard_is_absent_or_whole_in_a_thousand_rounds(machines: Machines) -> None:
    """The same, a thousand shards."""
    add_shards(machines, 1000)


def test_case_051_what_is_not_replicated_is_never_evicted(machines: Machines, tmp_path: Path) -> None:
    """A disk filled while the remote is down: ENOSPC, each file that was closed is whole, and all arrives later."""
    way = machines.proxy()
    with small_disk(tmp_path, 160) as disk:
        site = machines.site("here", by=way, tuning={}, store=disk / "store")
        top = machines.mount(site)
        (top / "early").write_bytes(early := os.urandom(8 * MIB))
        assert ckptfs.wait(top, "replicated", 60)
        way.faults = Faults(mode="refuse")
        closed: dict[str, str] = {}
        with pytest.raises(OSError) as full:
            for number in range(40):
                data = os.urandom(8 * MIB)
                with open(top / f"{number}", "wb", buffering=0) as file:
                    assert file.write(data) == len(data) or file.write(data)
                closed[f"{number}"] = digest(data)
        assert full.value.errno == errno.ENOSPC
        with suppress(FileNotFoundError):
            (top / f"{len(closed)}").unlink()
        assert len(closed) >= 4
        assert {name: digest((top / name).read_bytes()) for name in closed} == closed
        site.kill()
        machines.mount(site, "--offline")
        assert {name: digest((top / name).read_bytes()) for name in closed} == closed
        site.umount("--no-wait", status=3)
        way.heal()
        machines.mount(site)
        assert ckptfs.wait(top, "replicated", 60)
        there = machines.mount(machines.site("there"))
        assert {name: digest((there / name).read_bytes()) for name in closed} == closed
        assert (there / "early").read_bytes() == early


def write_keys(file: Path, key: str, secret: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    new.replace(file)


def test_case_052_keys_expire_in_the_middle_of_an_upload(machines: Machines, tmp_path: Path) -> None:
    """And signatures older than 3 s are refused: each request is signed when it goes, nothing counts as replicated too
    early, and new keys in the file are taken up unaided."""
    way, keys = machines.proxy(), tmp_path / "credentials"
    write_keys(keys, ACCESS_KEY, SECRET_KEY)
    site = machines.site("here", by=way)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del site.environment[name]
    site.environment["AWS_SHARED_CREDENTIALS_FILE"] = str(keys)
    top = machines.mount(site)
    way.faults = Faults(methods=PUT, up_bytes_per_s=256 << 10, signed_within_s=3.0)
    way.reset()
    data = os.urandom(MIB)
    (top / "model").write_bytes(data)
    until(lambda: way.counts.get("PUT") is not None and way.counts["PUT"].requests > 8, "the upload to be under way")
    way.faults = Faults(expired_keys=frozenset({ACCESS_KEY}), signed_within_s=3.0)
    until(lambda: "have expired" in (ckptfs.status(top)["last_error"] or ""), "the refusal to be told")
    time.sleep(4.0)  # what was signed before would be too old
    assert not ckptfs.status(top)["safe"] and os.getxattr(top / "model", "user.ckptfs.state") == b"sealed"
    assert "model" not in site.run("ls", machines.url, **machines.environment).out
    write_keys(keys, NEXT_ACCESS_KEY, NEXT_SECRET_KEY)
    until(lambda: ckptfs.status(top)["safe"], "the rest to be uploaded, unaided", 60)
    there = machines.mount(machines.site("there"))
    assert (there / "model").read_bytes() == data


def interrupted_uploads(machines: Machines, bucket: Bucket, kills: int) -> None:
    way = machines.proxy()
    targets: list[tuple[str, str]] = []
    way.arrived = lambda method, target: targets.append((method, target))  # type: ignore[method-assign]
    site = machines.site("here", by=way)
    top = machines.mount(site)
    places = [0, 7 * GIB, 63 * GIB + 4096, 199 * GIB]
    blocks = [os.urandom(128 << 10) for _ in places]
    with open(top / "large", "wb", buffering=0) as file:
        file.truncate(200 * GIB)
        for at, block in zip(places, blocks, strict=True):
            os.pwrite(file.fileno(), block, at)
    way.faults = Faults(methods=PUT, up_bytes_per_s=32 << 10)
    begun = 0

    def data_is_on_its_way() -> bool:
        return any(method == "PUT" and "/packs/" in target for method, target in targets[begun:])

    for _ in range(kills):
        until(data_is_on_its_way, "data to be on its way")
        time.sleep(random.uniform(0.0, 0.5))
        site.kill()
        begun = len(targets)
        machines.mount(site)
    way.reset()
    way.heal()
    assert ckptfs.wait(top, "replicated", 60)
    assert way.counts["PUT"].bytes_up < (kills + 2) * MIB  # what dead daemons had sent passes the proxy late
    assert not any("upload" in each.lower() or "partnumber" in each.lower() for _, each in targets)
    client = boto3.client(
        "s3",
        endpoint_url=bucket.environment["AWS_ENDPOINT_URL"],
        region_name=bucket.environment["AWS_DEFAULT_REGION"],
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    assert client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", []) == []
    client.close()
    there = machines.mount(machines.site("there"))
    with open(there / "large", "rb", buffering=0) as file:
        assert os.fstat(file.fileno()).st_size == 200 * GIB
        for at, block in zip(places, blocks, strict=True):
            assert os.pread(file.fileno(), len(block) + 4096, at) == block + bytes(4096)


def test_case_053_a_file_of_200_gb_and_a_daemon_that_is_killed(machines: Machines, bucket: Bucket) -> None:
    """Only data is sent, in single requests: a kill in the middle of them leaves no multipart upload, and nothing is
    lost."""
    interrupted_uploads(machines, bucket, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_053_a_file_of_200_gb_and_many_kills(machines: Machines, bucket: Bucket) -> None:
    """The same with more of them."""
    interrupted_uploads(machines, bucket, 8)


def save(base: Path, round_: int) -> None:
    (base / f"step-{round_}").mkdir()
    for number in range(8):
        with open(base / f"step-{round_}" / f"{number}", "wb") as file:
            file.write(os.urandom(9000))
            os.fsync(file.fileno())


def arrivals(way: FaultProxy, seconds: float) -> list[float]:
    """When requests came, in seconds from now on, while *seconds* pass."""
    started, came = time.monotonic(), list[float]()
    way.arrived = lambda method, target: came.append(time.monotonic() - started)  # type: ignore[method-assign]
    time.sleep(seconds)
    del way.arrived
    return came


def throttled(machines: Machines, seconds: float, latency_s: float, tuning: dict[str, object]) -> None:
    way = machines.proxy()
    site = machines.site("here", by=way, tuning=tuning)
    top = machines.mount(site)
    save(top, 0)
    assert ckptfs.wait(top, "replicated", 60)
    way.faults = Faults(error_share=1.0)
    save(top, 1)
    came = arrivals(way, seconds)
    # Each wait is at most half as long as a third of the time: there is a request in the last one.
    first, last = (sum(start <= at < start + seconds / 3 for at in came) for start in (0, seconds * 2 / 3))
    assert 0 < last < first, (first, last)
    way.faults = Faults(error_share=0.9)
    started = time.monotonic()
    for round_ in range(2, 5):
        save(top, round_)
    assert time.monotonic() - started < LOCAL_S
    came = arrivals(way, seconds)
    assert len(came) < 10 * seconds, len(came)
    way.faults = Faults(latency_s=latency_s)
    started = time.monotonic()
    for round_ in range(5, 8):
        save(top, round_)
    assert time.monotonic() - started < LOCAL_S
    way.heal()
    assert ckptfs.wait(top, "replicated", 120)
    there = machines.mount(machines.site("there"))
    assert sorted(os.listdir(there)) == [f"step-{round_}" for round_ in range(8)]


def test_case_054_a_store_that_says_slow_down_is_asked_less(machines: Machines) -> None:
    """Refused, requests come more and more rarely; saves are as quick as ever, also when each request takes long; all
    is replicated later."""
    throttled(machines, 9.0, 1.0, {"retry_first_s": 0.1, "retry_most_s": 1.5})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_case_054_five_minutes_of_slow_down(machines: Machines) -> None:
    """The same with the usual pauses, for five minutes, and then half a minute for each request."""
    throttled(machines, 300.0, 30.0, {})
