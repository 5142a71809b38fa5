"""The remote misbehaves: saves go on as if nothing were, nothing hangs, and everything heals unaided."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.machines import Machines, same_soon
from tests.support.mounts import TINY, Site, is_mounted, until
from tests.support.proxy import Faults

pytestmark = pytest.mark.timeout(170)

FAULTS = {
    "refused": Faults(mode="refuse"),
    "black hole": Faults(mode="black_hole"),
    "503 at 90 %": Faults(error_share=0.9),
    "403": Faults(error_share=1.0, error=(403, "AccessDenied")),
    "cut bodies": Faults(cut_after=10),
    "lost acknowledgements": Faults(drop_answer=True),
}

LOCAL_S = 15.0
"""A local operation that takes longer waits for the remote; the machine is busy with other tests."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    taken = time.monotonic() - started
    assert taken < seconds, f"{what} took {taken:.1f} s"


def save(base: Path, round_: int) -> None:
    directory = base / f"tmp-{round_}"
    directory.mkdir()
    for number in range(8):
        with open(directory / f"shard-{number}", "wb") as file:
            file.write(os.urandom(9000))
            os.fsync(file.fileno())
    directory.rename(base / f"step-{round_}")
    (base / "latest").write_text(f"step-{round_}")


@pytest.mark.parametrize("name", FAULTS)
def test_saves_go_on_and_everything_heals(machines: Machines, name: str) -> None:
    """Saves, stat, ls, df and status do not wait for a remote that fails; when it works again, all of it is there."""
    way = machines.proxy()
    site, other = machines.site("a", by=way), machines.site("b")
    top = machines.mount(site)
    save(top, 0)
    assert site.run("wait", str(top), "--timeout", "60s").status == 0
    way.faults = FAULTS[name]
    for round_ in range(1, 4):
        with within(LOCAL_S, "a save"):
            save(top, round_)
        with within(LOCAL_S, "ls and stat"):
            assert {f"step-{each}" for each in range(round_ + 1)} <= set(os.listdir(top))
            assert (top / f"step-{round_}" / "shard-3").stat().st_size == 9000
            assert not (top / f"missing-{round_}").exists()
    with within(LOCAL_S, "df"):
        assert os.statvfs(top).f_blocks > 0
    with within(LOCAL_S, "status"):
        assert site.status()["path"] == "/"
    if name not in ("503 at 90 %", "cut bodies"):  # which let something through
        until(lambda: site.status()["last_error"] is not None, "an error to be told", 60)
        assert not site.status()["safe"]
    way.heal()
    if name == "403":
        assert site.run("auth", str(top)).status == 0
    until(lambda: site.status()["safe"], "everything to be replicated, unaided", 60)
    until(lambda: site.status()["last_error"] is None, "the error to be forgotten", 30)
    there = machines.mount(other)
    same_soon(top, there)
    assert site.umount().status == 0


@pytest.mark.parametrize("name", ["refused", "black hole", "403"])
def test_leaving_is_bounded(machines: Machines, name: str) -> None:
    """umount --no-wait with a remote that fails returns soon, and the next mount has everything."""
    way = machines.proxy()
    site = machines.site("a", by=way)
    top = machines.mount(site)
    way.faults = FAULTS[name]
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
    site = machines.site("a", tuning={**TINY, "retry_most_s": 60.0, "retry_first_s": 30.0})
    top = machines.mount(site)
    assert site.run("auth", str(top), AWS_SECRET_ACCESS_KEY="expired").status == 0
    save(top, 1)
    until(lambda: site.status()["last_error"] is not None, "an error to be told", 60)
    save(top, 2)
    assert site.run("auth", str(top)).status == 0
    until(lambda: site.status()["safe"], "everything to be replicated", 25)


def reading(path: Path, results: list[object]) -> Callable[[], None]:
    def read() -> None:
        try:
            results.append(path.read_bytes())
        except OSError as error:
            results.append(error.errno)

    return read


@pytest.mark.parametrize("name", ["refused", "black hole", "cut bodies", "403"])
def test_reading_what_only_the_remote_has(machines: Machines, name: str) -> None:
    """Bytes that cannot be had are EIO after read_timeout_s; meanwhile stat and ls answer; healed, they are right."""
    writer, way = machines.site("writer"), machines.proxy()
    top = machines.mount(writer)
    content = os.urandom(100_000)
    (top / "d").mkdir()
    for number in range(20):
        (top / "d" / f"file-{number}").write_bytes(content[number:])
    assert writer.run("wait", str(top), "--timeout", "60s").status == 0
    reader: Site = machines.site("reader", by=way, tuning={**TINY, "read_timeout_s": 4.0})
    there = machines.mount(reader)
    assert len(os.listdir(there / "d")) == 20
    way.faults = FAULTS[name]
    results: list[object] = []
    threads = [threading.Thread(target=reading(there / "d" / f"file-{n}", results)) for n in range(20)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with within(6, "ls, stat and df beside 20 waiting readers"):
            assert len(os.listdir(there / "d")) == 20
            assert (there / "d" / "file-7").stat().st_size == len(content) - 7
            os.statvfs(there)
    for thread in threads:
        thread.join(40)
    assert results == [errno.EIO] * 20
    way.heal()

    def whole() -> bool:
        read: list[object] = []
        for number in range(20):
            reading(there / "d" / f"file-{number}", read)()
        return read == [content[number:] for number in range(20)]

    until(whole, "reading to work again", 40)


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
