"""The process that hashes and encodes is killed while it works, as the kernel does when memory is short."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptfs
from tests.conftest import Bucket
from tests.support.footprint import background_of
from tests.support.mounts import TINY, Site, is_alive, until
from tests.support.proxy import FaultProxy, Faults

FAST = ("--settle", "100ms", "--lag", "100ms")
PACK = 128 << 10
TUNING = {**TINY, "piece_bytes": 32 << 10, "pack_bytes": PACK, "upload_most": 4, "light_bytes": 0}


class PackWatch(FaultProxy):
    """A network that knows which packs passed."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.packs: list[str] = []

    def arrived(self, method: str, target: str) -> None:
        if method == "PUT" and "/packs/" in target:
            self.packs.append(target)


@pytest.fixture
def network(bucket: Bucket) -> Iterator[PackWatch]:
    with PackWatch(bucket.environment["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def site(tmp_path: Path, bucket: Bucket, network: PackWatch) -> Iterator[Site]:
    environment = {**bucket.environment, "AWS_ENDPOINT_URL": network.endpoint}
    with Site(tmp_path, environment=environment, tuning=TUNING) as made:
        yield made


def kill_background(site: Site) -> None:
    """End the process that there is, or the next one."""
    pid: int | None = None

    def found() -> bool:
        nonlocal pid
        pid = background_of(site.pid())
        return pid is not None

    until(found, "a background process")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), "it to end")


def elsewhere(tmp_path: Path, bucket: Bucket, name: str) -> bytes:
    with Site(tmp_path, environment=bucket.environment, name="far") as far:
        far.mount("--remote", f"{bucket.url}/run", "--read-only", *FAST)
        data = (far.mountpoint / name).read_bytes()
        far.umount()
    return data


@pytest.mark.timeout(120)
def test_killed_while_it_uploads(site: Site, tmp_path: Path, bucket: Bucket, network: PackWatch) -> None:
    """Five times: the upload goes on, nothing is sent twice, saves and reads notice nothing, and every byte arrives."""
    site.mount("--remote", f"{bucket.url}/run", *FAST)
    network.faults = Faults(up_bytes_per_s=1.5e6)
    data = os.urandom(8 << 20)
    (site.mountpoint / "weights").write_bytes(data)
    for kill in range(5):
        sent = len(network.packs)
        until(lambda sent=sent: len(network.packs) >= sent + 4, f"upload {kill} to go on")  # type: ignore[misc]
        kill_background(site)
        began = time.monotonic()
        (site.mountpoint / f"step-{kill}").write_bytes(data[:1000])
        assert (site.mountpoint / "weights").read_bytes() == data
        assert time.monotonic() - began < 2
    network.heal()
    assert ckptfs.wait(site.mountpoint, "replicated", 60)
    assert len(network.packs) == len(set(network.packs)) >= len(data) // PACK
    assert site.log().count("another one goes on") == 5
    assert elsewhere(tmp_path, bucket, "weights") == data
    site.umount()


@pytest.mark.timeout(120)
def test_killed_while_it_hashes(site: Site) -> None:
    """A file is sealed by a later process, whatever the number of those that were killed."""
    site.mount()
    data = os.urandom(8 << 20)
    with open(site.mountpoint / "weights", "wb", buffering=0) as file:
        file.write(data)
        (site.mountpoint / "first").write_bytes(b"1")  # so that there is a process
        until(lambda: background_of(site.pid()) is not None, "a background process")
    for _ in range(5):
        kill_background(site)
    assert ckptfs.wait(site.mountpoint, "sealed", 60)
    assert (site.mountpoint / "weights").read_bytes() == data
    site.umount()
