"""What went wrong elsewhere with full disks, flushes, killed daemons and forks; see the numbers in the tests' names."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from tests.conftest import Bucket
from tests.support.copies import client
from tests.support.disks import free_bytes, small_disk
from tests.support.machines import Machines
from tests.support.mounts import COMMAND_S, Site, is_mounted, until
from tests.support.proxy import Faults

MIB = 1 << 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "disk_mib", [pytest.param(160, id="small"), pytest.param(1000, id="a GB", marks=pytest.mark.slow)]
)
def test_case_015_a_save_larger_than_the_disk(
    machines: Machines, bucket: Bucket, tmp_path: Path, disk_mib: int
) -> None:
    """ENOSPC, the old version stays, nothing of it is seen elsewhere or sent, and what it took comes back."""
    with small_disk(tmp_path, disk_mib) as disk:
        site = machines.site("here", tuning={}, store=disk / "store")
        top, elsewhere = machines.mount(site), machines.mount(machines.site("elsewhere"))
        (top / "model").write_bytes(b"old" * MIB)
        assert ckptfs.wait(top, "replicated", 60)
        before = free_bytes(disk)
        temporary, data = top / "model.tmp", os.urandom(MIB)
        with pytest.raises(OSError) as full, open(temporary, "wb", buffering=0) as file:
            for _ in range(2 * disk_mib):
                assert file.write(data) == len(data) or file.write(data)
        assert full.value.errno == errno.ENOSPC
        assert (top / "model").read_bytes() == b"old" * MIB
        temporary.unlink()
        until(lambda: free_bytes(disk) > before - 8 * MIB, "the space to come back")
        (top / "small").write_bytes(b"small")
        assert ckptfs.wait(top, "replicated", 60)
        until(lambda: (elsewhere / "small").exists(), "the small save elsewhere")
        assert sorted(os.listdir(elsewhere)) == ["model", "small"]
        s3 = client(bucket)
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket.name)
        assert sum(each["Size"] for page in pages for each in page.get("Contents", [])) < 4 * MIB
        s3.close()
        assert (elsewhere / "model").read_bytes() == b"old" * MIB


@pytest.mark.timeout(120)
@pytest.mark.parametrize("passthrough", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_case_017_room_that_is_asked_for_first(site: Site, tmp_path: Path, passthrough: str) -> None:
    """np.save of a large array, tofile behind something, and posix_fallocate are as on a plain directory."""
    site.mount("--passthrough", passthrough)
    array = np.random.default_rng(17).integers(0, 1 << 60, 8 * MIB)  # 64 MiB
    plain = tmp_path / "plain"
    plain.mkdir()
    for top in (plain, site.mountpoint):
        np.save(top / "array.npy", array)
        with open(top / "behind", "ab") as file:
            file.write(b"header")
            array[:MIB].tofile(file)
        with open(top / "extended", "wb") as file:
            file.write(b"begin")
            file.flush()
            os.posix_fallocate(file.fileno(), 0, MIB)
    for name in ("array.npy", "behind", "extended"):
        assert (plain / name).stat().st_size == (site.mountpoint / name).stat().st_size
        assert digest(plain / name) == digest(site.mountpoint / name), name


@pytest.mark.timeout(120)
def test_case_020_fsync_waits_for_the_disk_alone(machines: Machines) -> None:
    """With a remote that never answers: write, fsync, rename, fsync of the directory; killed, it is all there."""
    way = machines.proxy()
    site = machines.site("here", by=way, tuning={})
    top = machines.mount(site)
    way.faults = Faults(mode="black_hole")
    data = os.urandom(100 * MIB)
    started = time.monotonic()
    with open(top / "model.tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(top / "model.tmp", top / "model")
    directory = os.open(top, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    assert time.monotonic() - started < 20
    site.kill()
    site.mount("--offline")
    assert os.listdir(top) == ["model"]
    assert digest(top / "model") == hashlib.blake2b(data).hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_case_021_unmounted_or_ended_before_the_uploads(machines: Machines) -> None:
    """Whichever way the mount ends right after a save, all bytes are there again and the rest is uploaded unaided."""
    way = machines.proxy()
    site = machines.site("here", by=way, tuning={})
    top = machines.mount(site, "--stop-timeout", "1s")
    saved = {}
    for number, way_out in enumerate(("fusermount", "sigterm", "sigkill")):
        way.faults = Faults(mode="black_hole")
        data = os.urandom(8 * MIB)
        (top / f"model-{number}").write_bytes(data)
        saved[f"model-{number}"] = hashlib.blake2b(data).hexdigest()
        assert site.status()["at_risk"]["bytes"] >= len(data)
        if way_out == "fusermount":
            subprocess.run(["fusermount3", "-u", str(top)], check=True, timeout=COMMAND_S)
        else:
            os.kill(site.pid(), signal.SIGTERM)
        if way_out == "sigkill":
            site.kill()
        else:
            assert site.gone(60), site.log()
            assert "only in the store" in site.log().splitlines()[-1], site.log()
        way.heal()
        machines.mount(site)
        assert {name: digest(top / name) for name in saved} == saved
        until(lambda: site.status()["safe"], "the uploads to finish unaided", 60)
    elsewhere = machines.mount(machines.site("elsewhere"))
    assert {name: digest(elsewhere / name) for name in saved} == saved


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_case_021_a_machine_that_is_given_half_a_minute(machines: Machines) -> None:
    """A GB was just saved, the network is slow: SIGTERM, and SIGKILL after 30 s, by which it has ended and said what is
    only here. The next mount has all of it and sends the rest."""
    way = machines.proxy()
    site = machines.site("here", by=way, tuning={})
    top = machines.mount(site)
    way.faults = Faults(methods=frozenset({"PUT"}), up_bytes_per_s=256 << 10)
    data = os.urandom(8 * MIB)
    for number in range(128):
        (top / f"shard-{number}").write_bytes(number.to_bytes(8, "big") + data)
    os.kill(site.pid(), signal.SIGTERM)
    assert site.gone(30), site.log()
    assert "only in the store" in site.log().splitlines()[-1], site.log()
    way.heal()
    machines.mount(site)
    for number in range(128):
        assert (top / f"shard-{number}").read_bytes() == number.to_bytes(8, "big") + data
    until(lambda: site.status()["safe"], "the rest to be uploaded", 120)
    there = machines.mount(machines.site("there"))
    assert (there / "shard-127").read_bytes() == (127).to_bytes(8, "big") + data


@pytest.mark.timeout(120)
def test_case_058_killed_in_the_middle_of_a_save(site: Site) -> None:
    """The program gets an error soon; the same command cleans up; what was fsynced is there, and new files open."""
    site.mount()
    with open(site.mountpoint / "fsynced", "wb") as file:
        file.write(b"f" * MIB)
        file.flush()
        os.fsync(file.fileno())
    told: list[OSError] = []

    def save() -> None:
        try:
            for number in range(100_000):
                (site.mountpoint / f"shard-{number}").write_bytes(os.urandom(100_000))
        except OSError as error:
            told.append(error)

    saver = threading.Thread(target=save)
    saver.start()
    until(lambda: (site.mountpoint / "shard-5").exists(), "the save to be under way")
    site.kill()
    saver.join(10)
    assert not saver.is_alive() and told and told[0].errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    site.mount()
    assert (site.mountpoint / "fsynced").read_bytes() == b"f" * MIB
    assert (site.mountpoint / "shard-3").stat().st_size == 100_000
    (site.mountpoint / "new").write_bytes(b"new")
    site.umount()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("passthrough", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_case_060_deleted_while_open(site: Site, passthrough: str) -> None:
    """The file goes on without a name and leaves none behind; its space comes back at the close, or after a kill."""
    site.mount("--passthrough", passthrough)
    directory = site.mountpoint / "directory"

    def images() -> list[Path]:
        return list((site.store / "images").glob("*/*"))

    for end in ("close", "kill"):
        directory.mkdir()
        fd = os.open(directory / "open", os.O_CREAT | os.O_RDWR)
        os.write(fd, b"x" * MIB)
        os.unlink(directory / "open")
        assert os.listdir(directory) == []
        os.pwrite(fd, b"after", 0)
        assert os.pread(fd, 6, 0) == b"afterx"
        os.ftruncate(fd, 100)
        status = os.fstat(fd)
        assert (status.st_nlink, status.st_size) == (0, 100)
        shutil.rmtree(directory)
        assert len(images()) == 1
        if end == "kill":
            site.kill()
        with suppress(OSError):  # of a dead mount
            os.close(fd)
        if end == "kill":
            site.mount("--passthrough", passthrough)
        until(lambda: images() == [], "the space to come back")
    assert list((site.store / "lost+found").iterdir()) == []


def forks_read_while_it_saves(site: Site, seconds: float) -> None:
    site.mount()
    top = site.mountpoint
    saved = {f"shard-{number}": os.urandom(300_000) for number in range(16)}
    for name, data in saved.items():
        (top / name).write_bytes(data)
    fork = multiprocessing.get_context("fork")
    stop, wrong = fork.Event(), fork.Queue()
    counts = [fork.Value("i", 0) for _ in range(8)]

    def read(number: int) -> None:
        random = np.random.default_rng(number)
        while not stop.is_set():
            name = f"shard-{random.integers(len(saved))}"
            if (top / name).read_bytes() != saved[name]:
                wrong.put(name)
            counts[number].value += 1

    threads = [threading.Thread(target=time.sleep, args=(seconds,)) for _ in range(4)]  # trainers fork with some
    for thread in threads:
        thread.start()
    readers = [fork.Process(target=read, args=(number,), daemon=True) for number in range(8)]
    for reader in readers:
        reader.start()
    try:
        deadline, step = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            started = time.monotonic()
            (top / f"step-{step % 3}").write_bytes(os.urandom(4 * MIB))
            assert time.monotonic() - started < 30
            step += 1
        before = [count.value for count in counts]
        until(lambda: all(count.value > old for count, old in zip(counts, before, strict=True)), "each reader to go on")
        stop.set()
        for reader in readers:
            reader.join(30)
            assert reader.exitcode == 0
    finally:
        for reader in readers:
            reader.kill()
    assert wrong.empty() and step > 0
    site.umount()


@pytest.mark.timeout(120)
def test_case_062_forked_readers_during_saves(site: Site) -> None:
    """Eight forked workers read while their parent saves: no hang, no wrong byte. And the daemon is its own process."""
    forks_read_while_it_saves(site, 2)
    assert not is_mounted(site.mountpoint)
    for inside in ("store", "elsewhere/store"):
        done = site.run("mount", str(site.mountpoint), "--store", str(site.mountpoint / inside), "--force")
        assert done.status == 1 and "inside" in done.said, done.said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_062_forked_readers_during_saves_for_five_minutes(site: Site) -> None:
    """The same for five minutes."""
    forks_read_while_it_saves(site, 300)


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()
