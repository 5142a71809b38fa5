"""What a series takes on this disk when earlier files give up what later ones have."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.disks import small_disk
from tests.support.mounts import Site, until

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.timeout(200)

MIB = 1 << 20
FROZEN, HEAD = 4 * MIB, MIB // 2


def save(site: Site, step: int) -> None:
    random = np.random.default_rng(step)
    frozen = np.random.default_rng(0).integers(0, 1 << 32, FROZEN // 4, np.uint32).view(np.int32)
    state = {
        "backbone": torch.from_numpy(frozen),
        "head": torch.from_numpy(random.integers(0, 1 << 32, HEAD // 4, np.uint32).view(np.int32)),
    }
    (site.mountpoint / f"checkpoint-{step}").mkdir()
    safetensors_torch.save_file(state, path(site, step))


def path(site: Site, step: int) -> Path:
    return site.mountpoint / f"checkpoint-{step}" / "model.safetensors"


def is_right(site: Site, step: int) -> bool:
    found = safetensors_torch.load_file(path(site, step))
    frozen = np.random.default_rng(0).integers(0, 1 << 32, FROZEN // 4, np.uint32).view(np.int32)
    head = np.random.default_rng(step).integers(0, 1 << 32, HEAD // 4, np.uint32).view(np.int32)
    return np.array_equal(found["backbone"].numpy(), frozen) and np.array_equal(found["head"].numpy(), head)


def image_bytes(site: Site) -> int:
    return sum(each.stat().st_blocks * 512 for each in (site.store / "images").rglob("*") if each.is_file())


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_series_takes_what_is_unique_in_it(tmp_path: Path, kind: str) -> None:
    """Fifty checkpoints with a frozen part: to a twentieth. The newest is whole, any may go, all are right."""
    count = 50
    with small_disk(tmp_path, 600, kind=kind) as disk, Site(disk) as site:
        site.mount("--reclaim-after", "0s")
        for step in range(count):
            save(site, step)
        unique = FROZEN + count * HEAD
        until(lambda: image_bytes(site) < 1.05 * unique, "the series to shrink", 60)
        assert os.stat(path(site, count - 1)).st_blksize > 4096, "the newest is whole"
        assert all(is_right(site, step) for step in (0, 17, count - 1))
        for step in range(1, count, 2):
            shutil.rmtree(site.mountpoint / f"checkpoint-{step}")
        left = FROZEN + count // 2 * HEAD
        until(lambda: image_bytes(site) < 1.05 * left, "what is left to shrink", 60)
        site.kill()
        site.mount()
        assert all(is_right(site, step) for step in range(0, count, 2))
        assert site.run("scrub", str(site.mountpoint)).status == 0
        for step in range(0, count, 2):
            shutil.rmtree(site.mountpoint / f"checkpoint-{step}")
        until(lambda: image_bytes(site) == 0, "all to be gone", 30)


def test_who_has_a_file_open_or_mapped_keeps_it(tmp_path: Path) -> None:
    """Its image is left alone, and the map reads what it read."""
    with Site(tmp_path) as site:
        site.mount("--reclaim-after", "0s")
        save(site, 0)
        with open(path(site, 0), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        before = mapped[:]
        for step in (1, 2):
            save(site, step)
        whole = FROZEN + HEAD
        until(lambda: image_bytes(site) < 2 * whole + 2 * HEAD, "the other to give up what it has", 30)
        time.sleep(2.5)
        assert image_bytes(site) > 2 * whole, "the mapped one and the newest are whole"
        assert mapped[:] == before
        mapped.close()
        until(lambda: image_bytes(site) < whole + 3 * HEAD, "it to give up what it has, too", 30)
        assert all(is_right(site, step) for step in range(3))


def test_hard_links_and_copies(tmp_path: Path) -> None:
    """`last` and `best` take nothing more, as links or as copies."""
    with Site(tmp_path) as site:
        site.mount("--reclaim-after", "0s")
        save(site, 0)
        os.link(path(site, 0), site.mountpoint / "last")
        shutil.copy(path(site, 0), site.mountpoint / "best")
        until(lambda: image_bytes(site) < 1.05 * (FROZEN + HEAD), "the copy to take nothing", 30)
        shutil.rmtree(site.mountpoint / "checkpoint-0")
        os.unlink(site.mountpoint / "best")
        assert (site.mountpoint / "last").stat().st_nlink == 1
        site.kill()
        site.mount()
        shutil.copytree(site.mountpoint, tmp_path / "copied")
        (tmp_path / "copied" / "checkpoint-0").mkdir()
        os.rename(tmp_path / "copied" / "last", tmp_path / "copied" / "checkpoint-0" / "model.safetensors")
        found = safetensors_torch.load_file(tmp_path / "copied" / "checkpoint-0" / "model.safetensors")
        assert found["head"].numel() == HEAD // 4 and found["backbone"].numel() == FROZEN // 4


def test_never_by_default(tmp_path: Path) -> None:
    """Until it is asked for, every file is whole."""
    with Site(tmp_path) as site:
        site.mount()
        for step in range(3):
            save(site, step)
        time.sleep(4)
        assert image_bytes(site) >= 3 * (FROZEN + HEAD)


def test_a_scrub_meanwhile_finds_nothing_wrong(tmp_path: Path) -> None:
    """What a file gave up after the scrub had begun is not missed."""
    count = 8
    with Site(tmp_path) as site:
        site.mount("--reclaim-after", "8s")
        for step in range(count):
            save(site, step)
        assert site.run("wait", str(site.mountpoint), "--for", "sealed").status == 0
        done = site.run("scrub", str(site.mountpoint), "--rate", "2M", "--json")
        assert done.status == 0 and json.loads(done.out)["findings"] == [], done.said
        assert image_bytes(site) < count * (FROZEN + HEAD) // 2, "nothing was given up meanwhile"
        assert all(is_right(site, step) for step in range(count))
        site.umount()
