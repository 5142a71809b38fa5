"""`ckptfs prefetch`: what is under a path comes to this disk before anybody reads it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from tests.support.machines import Machines, census
from tests.support.mounts import COMMAND, end
from tests.support.proxy import Faults

GONE = Faults("refuse")


def fill(top: Path) -> None:
    random = np.random.default_rng(11)
    for step in (1, 2):
        directory = top / f"step-{step}" / "model"
        directory.mkdir(parents=True)
        for shard in range(3):
            (directory / f"shard-{shard}").write_bytes(random.bytes(400_000))
        (top / f"step-{step}" / "config.json").write_text("{}")
        (top / f"step-{step}" / "empty").touch()
        os.link(directory / "shard-0", directory / "same")
        os.symlink("model/shard-0", top / f"step-{step}" / "link")


def test_what_was_prefetched_is_read_without_the_remote(machines: Machines) -> None:
    """Everything below the path, and nothing else; asking again finds it here."""
    near, way = machines.site("near"), machines.proxy()
    far = machines.site("far", by=way, settings={"read_timeout_s": 1.0})
    here, there = machines.mount(near), machines.mount(far)
    fill(here)
    assert ckptfs.wait(here, "replicated", 30)
    done = far.run("prefetch", "--json", str(there / "step-2"))
    assert done.status == 0, done.said
    assert json.loads(done.out) == {"path": str(there / "step-2"), "files": 5, "bytes": 1_200_002}
    other = far.run("prefetch", str(there / "step-2"))
    assert (other.status, other.out) == (0, "everything is here already\n")
    wanted = census(here / "step-2")
    way.faults = GONE
    assert census(there / "step-2") == wanted
    with pytest.raises(OSError):
        (there / "step-1" / "model" / "shard-1").read_bytes()
    way.heal()
    ckptfs.prefetch(there)
    way.faults = GONE
    assert census(there) == census(here)


def test_a_prefetch_that_fails_goes_on_the_next_time(machines: Machines) -> None:
    """The remote breaks off in the middle: one clear line, what came is kept, and the rest comes later."""
    near, way = machines.site("near"), machines.proxy()
    far = machines.site("far", by=way, tuning={"fetch_bytes": 65536}, settings={"read_timeout_s": 5.0})
    here, there = machines.mount(near), machines.mount(far)
    data = np.random.default_rng(12).bytes(4 << 20)
    (here / "file").write_bytes(data)
    assert ckptfs.wait(here, "replicated", 30)
    assert os.listdir(there) == ["file"]
    way.faults = Faults(down_bytes_per_s=1 << 20)
    with subprocess.Popen([*COMMAND, "prefetch", str(there / "file")], env=far.environment) as process:
        while way.counts["GET"].bytes_down < 2 << 20:
            assert process.poll() is None
        way.faults = GONE
        assert process.wait(60) == 1
    way.heal()
    way.reset()
    ckptfs.prefetch(there)
    assert way.counts["GET"].bytes_down < 3.5 * (1 << 20)
    way.faults = GONE
    assert (there / "file").read_bytes() == data


def test_what_cannot_be_prefetched(machines: Machines) -> None:
    """No such name, no mount, and a daemon that dies meanwhile: one line each, and no hanging."""
    site, way = machines.site("site"), machines.proxy()
    far = machines.site("far", by=way)
    here = machines.mount(site)
    (here / "file").write_bytes(os.urandom(2 << 20))
    assert ckptfs.wait(here, "replicated", 30)
    assert site.run("prefetch", str(here / "missing")).status == 1
    assert site.run("prefetch", "/").status == 1
    there = machines.mount(far)
    assert os.listdir(there) == ["file"]
    way.faults = Faults(down_bytes_per_s=100_000)
    with subprocess.Popen([*COMMAND, "prefetch", str(there)], env=far.environment) as process:
        while not way.counts["GET"].bytes_down:
            assert process.poll() is None
        end(far.pid())
        assert process.wait(30) == 1
