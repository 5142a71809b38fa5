"""Saving faster than the uplink: the newest complete state goes next, and what was rotated away is never sent."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.machines import Machines
from tests.support.mounts import until
from tests.support.polling import Poller
from tests.support.proxy import Faults

pytestmark = pytest.mark.timeout(170)

KEEP = 2


@dataclass
class Publications(Poller):
    """Which steps another machine has whenever its newest one changes, and which the saver had by then."""

    base: Path
    saved: int = 0
    seen: list[tuple[int, set[int]]] = field(default_factory=list)
    """(steps saved by then, steps there)."""
    pause_s = 0.05

    def look(self) -> None:
        steps = {int(name.removeprefix("step-")) for name in os.listdir(self.base) if name.startswith("step-")}
        if steps and (not self.seen or steps != self.seen[-1][1]):
            self.seen.append((self.saved, steps))

    def sent(self) -> set[int]:
        return set().union(*(steps for _, steps in self.seen))


def save_faster_than_the_uplink(machines: Machines, size: int, every_s: float, for_s: float) -> None:
    """Checkpoints of *size* incompressible bytes, twice as fast as the uplink takes them, rotated to two.

    A checkpoint takes two saves' time to send. The newest of a state goes first, and the other one is rotated away by
    then and is not sent: a state is two saves old when it is published, and another save may end while its head is put
    and followed.
    """
    # Checkpoints are larger than what is on its way at once, as real ones are.
    tuning = {"piece_bytes": 1 << 16, "pack_bytes": 1 << 17, "upload_threads": 2, "upload_most": 2}
    writer, reader, way = machines.site("writer", tuning=tuning), machines.site("reader", tuning=None), machines.proxy()
    writer.environment["AWS_ENDPOINT_URL"] = way.endpoint
    top, there = machines.mount(writer), machines.mount(reader, "--read-only")
    assert writer.run("publish", str(top)).status == 0
    way.faults = Faults(methods=frozenset({"PUT"}), up_bytes_per_s=size / every_s / 2)
    way.reset()
    with Publications(there) as publications:
        started = time.monotonic()
        step = 0
        while time.monotonic() < started + for_s:
            step += 1
            (top / "aside").mkdir()
            for number in range(4):
                (top / "aside" / f"shard-{number}").write_bytes(os.urandom(size // 4))
            (top / "aside").rename(top / f"step-{step}")
            if step > KEEP:
                shutil.rmtree(top / f"step-{step - KEEP}")
            publications.saved = step
            time.sleep(max(0.0, started + step * every_s - time.monotonic()))
        seen, sent = list(publications.seen), way.counts["PUT"].bytes_up
        published = publications.sent()
        way.heal()
        until(lambda: {step - 1, step} in [steps for _, steps in publications.seen[-1:]], "the last state", 60)
    assert len(seen) > for_s / every_s / 10, seen
    for saved, steps in seen:
        assert len(steps) <= KEEP, seen
        assert saved - max(steps) <= 3, seen
    most = (len(published) + KEEP) * size  # and what is on its way
    assert sent < 1.1 * most + (1 << 18), (sent, most, seen)
    assert sent < 0.75 * step * size, "twice the uplink's rate was saved"


def test_the_newest_state_goes_next(machines: Machines) -> None:
    """40 seconds of it."""
    save_faster_than_the_uplink(machines, 2 << 20, 2.0, 40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_newest_state_goes_next_for_ten_minutes(machines: Machines) -> None:
    """Ten minutes."""
    save_faster_than_the_uplink(machines, 8 << 20, 5.0, 600)
