"""A series of checkpoints: each takes the bytes in which it differs, and reads back whatever becomes of the others."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs
from tests.conftest import Bucket
from tests.frameworks.conftest import QUICK, MakeSite
from tests.support.copies import client, download
from tests.support.mounts import Site
from tests.support.proxy import FaultProxy, Faults

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).parents[2] / "docs" / "restore.py"
STEPS = (100, 200, 300, 400)


def states(seed: int = 5) -> list[dict[str, Any]]:
    """Weights that move by 0.1 % of themselves from one to the next, in fp32 and rounded to bf16; noise, which no
    delta makes smaller; integers of which few change."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((700, 1000)).astype(np.float32) * np.float32(0.02)
    rows = random.integers(0, 1 << 30, (4000, 64), np.int64)
    made = []
    for _ in STEPS:
        weight = weight * (1 + np.float32(1e-3) * random.standard_normal(weight.shape).astype(np.float32))
        rows = rows.copy()
        rows[random.integers(0, len(rows), 20)] += 1
        made.append(
            {
                "weight": torch.from_numpy(weight),
                "half": torch.from_numpy(weight).to(torch.bfloat16),
                "exp_avg": torch.from_numpy(random.standard_normal((300, 1000)).astype(np.float32)),
                "rows": torch.from_numpy(rows),
            }
        )
    return made


def save(directory: Path, state: dict[str, Any]) -> None:
    directory.mkdir()
    safetensors_torch.save_file(state, directory / "model.safetensors")
    torch.save({"state": {0: state}}, directory / "optimizer.pt")


def is_equal(directory: Path, state: dict[str, Any]) -> bool:
    found = safetensors_torch.load_file(directory / "model.safetensors")
    other = torch.load(directory / "optimizer.pt")["state"][0]
    return all(torch.equal(found[name], each) and torch.equal(other[name], each) for name, each in state.items())


def packed_bytes(bucket: Bucket, prefix: str = "run") -> int:
    s3 = client(bucket)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix=f"{prefix}/packs/")
    found = sum(each["Size"] for page in pages for each in page.get("Contents", []))
    s3.close()
    return int(found)


def saved_series(site: Site, bucket: Bucket) -> tuple[list[dict[str, Any]], list[int]]:
    """The states that were saved one after the other, and how the packs grew with each."""
    made, sizes = states(), [0]
    for step, state in zip(STEPS, made, strict=True):
        save(site.mountpoint / f"checkpoint-{step}", state)
        ckptfs.wait(site.mountpoint, "replicated")
        sizes.append(packed_bytes(bucket))
    return made, [after - before for before, after in itertools.pairwise(sizes)]


def test_a_series_takes_its_differences(machine: MakeSite, bucket: Bucket, url: str, tmp_path: Path) -> None:
    """And reads back elsewhere: mounted, with the first and the third removed, and by the script alone."""
    here = machine("here")
    here.mount("--remote", url, *QUICK)
    made, grown = saved_series(here, bucket)
    assert max(grown[1:]) < 0.6 * grown[0], grown
    there = machine("there")
    there.mount("--remote", url, *QUICK)
    assert all(
        is_equal(there.mountpoint / f"checkpoint-{step}", state) for step, state in zip(STEPS, made, strict=True)
    )
    assert here.run("scrub", "--remote", str(here.mountpoint)).status == 0
    for step in (STEPS[0], STEPS[2]):
        shutil.rmtree(here.mountpoint / f"checkpoint-{step}")
    here.umount()
    later = machine("later")
    later.mount("--remote", url, *QUICK)
    assert sorted(path.name for path in later.mountpoint.iterdir()) == ["checkpoint-200", "checkpoint-400"]
    assert all(is_equal(later.mountpoint / f"checkpoint-{step}", made[step // 100 - 1]) for step in (400, 200))
    download(bucket, tmp_path / "copy")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "copy", tmp_path / "restored"], timeout=100)
    assert done.returncode == 0
    assert all(is_equal(tmp_path / "restored" / f"checkpoint-{step}", made[step // 100 - 1]) for step in (200, 400))


def test_a_backlog_is_a_series_too(machine: MakeSite, bucket: Bucket, url: str, network: FaultProxy) -> None:
    """Checkpoints that were saved while the remote was away are sent in one go, the newest whole."""
    here = machine("here", endpoint=network.endpoint, tuning={"pack_bytes": 2 << 20})
    here.mount("--remote", url, *QUICK)
    (here.mountpoint / "before").touch()
    ckptfs.wait(here.mountpoint, "replicated")
    network.faults = Faults(mode="refuse")
    made = states()
    for step, state in zip(STEPS, made, strict=True):
        save(here.mountpoint / f"checkpoint-{step}", state)
    ckptfs.wait(here.mountpoint, "sealed")
    network.faults = Faults()
    ckptfs.wait(here.mountpoint, "replicated")
    alone = machine("alone")
    alone.mount("--remote", f"{url}-alone", *QUICK)
    save(alone.mountpoint / "checkpoint-100", made[0])
    ckptfs.wait(alone.mountpoint, "replicated")
    one = packed_bytes(bucket, "run-alone")
    assert packed_bytes(bucket) < 2.8 * one, "four states"
    assert here.run("scrub", "--remote", str(here.mountpoint)).status == 0
    there = machine("there")
    there.mount("--remote", url, *QUICK)
    assert all(
        is_equal(there.mountpoint / f"checkpoint-{step}", state) for step, state in zip(STEPS, made, strict=True)
    )


def test_runs_side_by_side_are_series_of_their_own(machine: MakeSite, bucket: Bucket, url: str) -> None:
    """Tensors of the same names that are saved by turns: two runs of a sweep, in files that are numbered themselves."""
    here = machine("here")
    here.mount("--remote", url, *QUICK)
    runs = [states(seed)[:3] for seed in (5, 6)]
    sizes = [0]
    for epoch in range(3):
        for run, made in enumerate(runs):
            directory = here.mountpoint / f"version_{run}"
            directory.mkdir(exist_ok=True)
            torch.save(made[epoch], directory / f"epoch={epoch}-step={10 * epoch}.ckpt")
        ckptfs.wait(here.mountpoint, "replicated")
        sizes.append(packed_bytes(bucket))
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(grown[1:]) < 0.6 * grown[0], grown


def test_without_deltas(machine: MakeSite, bucket: Bucket, url: str) -> None:
    """What the setting says: every checkpoint takes as much, less what is the same in both its files."""
    here = machine("here", tuning={"delta": False})
    here.mount("--remote", url, *QUICK)
    _, grown = saved_series(here, bucket)
    assert min(grown[1:]) > 0.9 * grown[0]
