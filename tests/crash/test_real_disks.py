"""Real disks: the power is cut for the kernel too, and a disk turns read-only under the daemon.

The store is on an ext4 that lies as a file on an xfs with reflinks, both loop-mounted. `cp --reflink` of that file
while everything runs takes it as it is at one instant, which is what a power cut leaves. The copy is mounted elsewhere,
where ext4 replays its journal, and the store with it, as after a start of the machine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.crash.test_power_cut import after, some_flush
from tests.support.consistency import problems
from tests.support.disks import reflinked_disk, small_disk
from tests.support.mounts import TINY, Site, until
from tests.support.promises import Promises

TUNING = {**TINY, "sync_every_s": 0.2}
UNASKED_S = 5.0  # what is promised; flushes that begin every 0.2 s end when a busy machine lets them


class Instants:
    """Stands for the position in a log: counts the calls of the program, and knows those that had begun or returned."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def save_until(stop: threading.Event, promises: Promises, chance: random.Random, frozen: bytes) -> None:
    """Checkpoints, logs and pointers, and renames; what is long begins with what is *frozen*."""
    step = 0
    while not stop.is_set():
        step += 1
        fsync = some_flush(chance)
        data = frozen + chance.randbytes(chance.randrange(400_000))
        match chance.randrange(5):
            case 0:
                promises.write(f"file-{chance.randrange(10)}", data, fsync=fsync)
            case 1:
                promises.write("latest", b"%d" % step, fsync=fsync)
            case 2:
                promises.write("temporary", data, fsync=fsync)
                promises.rename("temporary", "model")
            case 3:
                promises.make_directory(f"tmp-{step}")
                promises.write(f"tmp-{step}/shard", data, fsync=fsync)
                promises.rename(f"tmp-{step}", f"step-{step}")
                for old in [path for path in promises.paths() if path.startswith("step-") and "/" not in path][:-3]:
                    promises.remove(old)
            case 4:
                promises.fsync_directory()
        if step % 20 == 0:
            promises.rest(time.sleep)


def cuts_power(
    tmp_path: Path, cuts: int, seed: int, *options: str, frozen: bytes = b"", replicated: bool = True
) -> None:
    """With something *frozen*, files that share it give up their copies, if *options* say so."""
    chance, stop = random.Random(seed), threading.Event()
    instants = Instants()
    with reflinked_disk(tmp_path, 512) as disk, Site(tmp_path) as site:
        remote = []
        if replicated:
            (disk.top / "remote").mkdir()
            remote = ["--remote", f"file://{disk.top}/remote", "--settle", "50ms"]
        site.store = disk.top / "store"
        site.store.mkdir(mode=0o700)
        (site.store / "settings.json").write_text(json.dumps({"tuning": TUNING}))
        site.mount(*remote, *options)
        os.sync()
        promises = Promises(site.mountpoint, instants, UNASKED_S)
        saver = threading.Thread(target=save_until, args=(stop, promises, chance, frozen))
        saver.start()
        try:
            for cut in range(cuts):
                time.sleep(chance.uniform(0.0, 1.0))
                before = instants.count
                with disk.cut() as left:
                    during = instants.count  # calls that began while the copy was made may be in it, or not
                    wrong = after(left, promises, before, during)
                if frozen:  # who copied back what it lacked needs no donor any more, and the next look frees that
                    wrong = [each for each in wrong if "is needed by nobody" not in each]
                assert not wrong, f"cut {cut}, seed {seed}:\n" + "\n".join(wrong)
        finally:
            stop.set()
            saver.join(60)
        if frozen:
            until(lambda: has_holes(site.store / "images"), "a file to give up what another has")
        site.umount()
        assert problems(site.store) == []


def has_holes(images: Path) -> bool:
    found = (path.stat() for path in images.rglob("*") if path.is_file())
    return any(status.st_blocks * 512 < status.st_size // 2 for status in found)


@pytest.mark.timeout(90)
def test_the_power_is_cut_for_the_kernel_too(tmp_path: Path) -> None:
    """Three times while a program saves: what was promised is there after ext4 has replayed its journal."""
    cuts_power(tmp_path, 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_power_is_cut_for_the_kernel_many_times(tmp_path: Path) -> None:
    """The same CKPTFS_DISK_CUTS times (100)."""
    cuts_power(tmp_path, int(os.environ.get("CKPTFS_DISK_CUTS", "100")), seed=2)


RECLAIM = ("--reclaim-after", "0s")
FROZEN = random.Random(7).randbytes(600_000)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replicated", [True, False], ids=["replicated", "alone"])
def test_the_power_is_cut_while_copies_are_given_up(tmp_path: Path, replicated: bool) -> None:
    """Four times while checkpoints share most of their bytes, and all but the newest give them up at once."""
    cuts_power(tmp_path, 4, 3, *RECLAIM, frozen=FROZEN, replicated=replicated)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("replicated", [True, False], ids=["replicated", "alone"])
def test_the_power_is_cut_many_times_while_copies_are_given_up(tmp_path: Path, replicated: bool) -> None:
    """The same CKPTFS_DISK_CUTS times (100)."""
    cuts = int(os.environ.get("CKPTFS_DISK_CUTS", "100"))
    cuts_power(tmp_path, cuts, 4, *RECLAIM, frozen=FROZEN, replicated=replicated)


@pytest.mark.timeout(90)
def test_a_disk_that_turns_read_only(tmp_path: Path) -> None:
    """ext4 finds an error and is read-only from then on: saving fails, reading goes on; mounted again, all is well."""
    with small_disk(tmp_path, 200, journal=True) as disk, Site(tmp_path) as site:
        site.store = disk / "store"
        site.mount()
        root = site.mountpoint
        for number in range(5):
            (root / f"{number}").write_bytes(b"%d" % number * 100_000)
        (root / "latest").write_bytes(b"1")
        until(lambda: site.status()["state"] == "sealed", "everything to be sealed")
        subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(disk)], check=True, timeout=30)
        device = subprocess.run(["findmnt", "-no", "SOURCE", str(disk)], capture_output=True, text=True, check=True)
        trigger = Path("/sys/fs/ext4") / Path(device.stdout.strip()).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel's ext4 cannot be made to fail")
        trigger.write_text("a test")
        for name in ("new", "latest"):
            with pytest.raises(OSError), open(root / name, "wb") as file:
                file.write(b"2" * 100_000)
                file.flush()
                os.fsync(file.fileno())
        with pytest.raises(OSError):
            os.rename(root / "1", root / "renamed")
        with pytest.raises(OSError):
            os.unlink(root / "2")
        assert site.daemon() is not None, site.log()
        for number in range(5):
            assert (root / f"{number}").read_bytes() == b"%d" % number * 100_000
        assert (root / "latest").read_bytes() == b"1"
        assert site.status()["state"] == "sealed"
        subprocess.run(["umount", str(root)], check=True, timeout=30)
        assert site.gone(30), site.log()
        until(
            lambda: subprocess.run(["umount", str(disk)], capture_output=True, timeout=30, check=False).returncode == 0,
            "the disk to be let go",
        )
        subprocess.run(["e2fsck", "-fy", str(tmp_path / "disk.ext4")], capture_output=True, timeout=30, check=False)
        subprocess.run(["mount", "-o", "loop", str(tmp_path / "disk.ext4"), str(disk)], check=True, timeout=30)
        site.mount()
        assert sorted(os.listdir(root)) == ["0", "1", "2", "3", "4", "latest"]
        assert (root / "latest").read_bytes() == b"1"
        (root / "latest").write_bytes(b"2")
        site.umount()
        assert problems(site.store) == []
