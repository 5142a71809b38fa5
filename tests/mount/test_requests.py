"""What replication costs at the remote: requests and bytes, counted on the way there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.machines import Machines
from tests.support.mounts import Site, until
from tests.support.proxy import FaultProxy

pytestmark = pytest.mark.timeout(150)


def replicated(site: Site) -> None:
    done = site.run("wait", str(site.mountpoint), "--timeout", "60s")
    assert done.status == 0, done.said


def puts(proxy: FaultProxy) -> int:
    count = proxy.counts.get("PUT")
    return count.requests if count else 0


def sent(proxy: FaultProxy) -> int:
    count = proxy.counts.get("PUT")
    return count.bytes_up if count else 0


def save(directory: Path, backbone: np.ndarray, head: np.ndarray, step: int) -> None:
    directory.mkdir()
    np.savez(directory / "model.npz", backbone=backbone, head=head)
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def test_a_second_machine_sends_only_what_changed(machines: Machines) -> None:
    """A frozen-backbone series, resumed elsewhere: the other machine uploads the head's bytes and little else."""
    random = np.random.default_rng(2)
    backbone = random.random((2_000_000,), dtype=np.float32)
    heads = [random.random((50_000,), dtype=np.float32) for _ in range(5)]
    first_way, second_way = machines.proxy(), machines.proxy()
    first = machines.site("first", by=first_way, tuning=None)
    top = machines.mount(first)
    save(top / "checkpoint-1", backbone, heads[0], 1)
    replicated(first)
    whole = sent(first_way)
    assert whole > 4_000_000
    save(top / "checkpoint-2", backbone, heads[1], 2)
    replicated(first)
    assert sent(first_way) - whole < 1.2 * heads[0].nbytes
    first.umount()
    second = machines.site("second", by=second_way, tuning=None)
    top = machines.mount(second)
    with np.load(top / "checkpoint-2" / "model.npz") as loaded:
        assert (loaded["head"] == heads[1]).all()
        resumed = loaded["backbone"]
    for step in (3, 4):
        before = sent(second_way)
        save(top / f"checkpoint-{step}", resumed, heads[step], step)
        replicated(second)
        assert sent(second_way) - before < 1.2 * heads[0].nbytes, step


def test_a_machine_that_read_nothing_sends_only_what_changed(machines: Machines) -> None:
    """Also one that never opened the checkpoints there learns which chunks the remote has."""
    random = np.random.default_rng(3)
    backbone, head = random.random((1_000_000,), dtype=np.float32), random.random((20_000,), dtype=np.float32)
    first, way = machines.site("first", tuning=None), machines.proxy()
    save(machines.mount(first) / "checkpoint-1", backbone, head, 1)
    replicated(first)
    second = machines.site("second", by=way, tuning=None)
    save(machines.mount(second) / "checkpoint-2", backbone, head + 1, 2)
    replicated(second)
    assert sent(way) < 1.5 * head.nbytes


def test_ten_small_files_cost_four_puts(machines: Machines) -> None:
    """A directory of ten 100-byte files: a pack, what names it, a head."""
    way = machines.proxy()
    site = machines.site("mnt", by=way, tuning=None)
    top = machines.mount(site)
    (top / "before").write_bytes(b"1")
    replicated(site)
    way.reset()
    (top / "small").mkdir()
    for number in range(10):
        (top / "small" / f"file-{number}").write_bytes(b"%010d" % number * 10)
    replicated(site)
    assert 1 <= puts(way) <= 4, way.counts


def watch_idle(machines: Machines, seconds: float, at_most: int, *options: str) -> None:
    way = machines.proxy()
    site, other = machines.site("mnt", by=way, tuning=None), machines.site("other", by=way, tuning=None)
    for each in (site, other):
        each.mount("--remote", machines.url, *options)
    (site.mountpoint / "file").write_bytes(b"1" * 1000)
    replicated(site)
    until((other.mountpoint / "file").exists, "the file on the other machine")
    assert (other.mountpoint / "file").read_bytes() == b"1" * 1000
    began = time.monotonic()
    seen: list[tuple[float, str, str]] = []
    way.arrived = lambda method, target: seen.append((time.monotonic() - began, method, target))  # type: ignore[method-assign]
    until(lambda: time.monotonic() - began - max([0.0, *(at for at, _, _ in seen)]) > 2.0, "what the last look started")
    seen.clear()
    time.sleep(seconds)
    assert len(seen) <= at_most, seen


def test_an_idle_mount_is_silent(machines: Machines) -> None:
    """Mounts that nobody reads make no requests."""
    watch_idle(machines, 10, 0, "--settle", "100ms", "--lag", "100ms")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_idle_mount_makes_a_request_a_minute_at_most(machines: Machines) -> None:
    """The same with the usual settings, two mounts, over two minutes."""
    watch_idle(machines, 120, 4)
