"""Mounts with a remote: waiting for uploads, leaving without them, losing the network, other credentials."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptfs
from tests.conftest import Bucket
from tests.support.maps import mapped
from tests.support.mounts import COMMAND, COMMAND_S, TINY, Site, is_alive, is_mounted, run, until
from tests.support.proxy import FaultProxy, Faults

pytestmark = pytest.mark.timeout(150)


BLACK_HOLE = Faults(mode="black_hole")


@pytest.fixture
def network(bucket: Bucket) -> Iterator[FaultProxy]:
    """The way to the bucket's server."""
    with FaultProxy(bucket.environment["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def far(tmp_path: Path, bucket: Bucket, network: FaultProxy) -> Iterator[Site]:
    """A site whose bucket lies behind that network."""
    environment = {**bucket.environment, "AWS_ENDPOINT_URL": network.endpoint}
    with Site(tmp_path, environment=environment, tuning=TINY) as made:
        yield made


def listed(site: Site, url: str) -> dict[str, int]:
    done = site.run("ls", "-R", "--json", url)
    assert done.status == 0, done.said
    return {row["path"]: row["size"] for row in json.loads(done.out)}


def test_umount_waits_and_everything_is_on_the_remote(far: Site, bucket: Bucket) -> None:
    """What was closed just before umount is uploaded when it returns, and ls shows it without a mount."""
    url = f"{bucket.url}/run"
    far.mount("--remote", url)
    (far.mountpoint / "exp").mkdir()
    (far.mountpoint / "exp" / "model").write_bytes(os.urandom(300_000))
    assert ckptfs.wait(far.mountpoint / "exp", "replicated", 60)
    (far.mountpoint / "exp" / "late").write_bytes(b"1" * 5000)
    done = far.umount()
    assert f"everything is on {url}" in done.out
    assert listed(far, url) == {"exp": 0, "exp/model": 300_000, "exp/late": 5000}
    assert listed(far, f"{url}/exp/late") == {"late": 5000}
    assert far.run("ls", f"{url}/none").status == 1
    assert far.run("ls", bucket.url).status == 1


def test_ls_leaves_a_terminal_alone(site: Site, tmp_path: Path) -> None:
    """A name can hold anything; a terminal gets what it shows, a program the bytes."""
    url, name = f"file://{tmp_path}/remote", "a\x1b[31m\nb"
    site.mount("--remote", url)
    (site.mountpoint / name).write_bytes(b"1")
    site.umount()
    assert site.run("ls", url).out.endswith(f" {name}\n")
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        try:
            subprocess.run([*COMMAND, "ls", url], env=site.environment, stdout=theirs, timeout=COMMAND_S, check=True)
        finally:
            os.close(theirs)
        assert terminal.read(4096).rstrip().endswith(b" a\\x1b[31m\\nb")


def test_umount_waits_for_what_a_map_wrote_until_just_now(far: Site, bucket: Bucket) -> None:
    """The kernel tells nobody that the last map of a passthrough file is gone: umount looks, and uploads the file."""
    for number in range(3):
        far.mount("--remote", f"{bucket.url}/run")
        (far.mountpoint / "shared").write_bytes(bytes(mmap.PAGESIZE))
        with mapped(far.mountpoint / "shared", writable=True) as content:
            time.sleep(1.03 + 0.15 * number)  # by now it is looked at only twice a second
            content[:4] = f"{number:04}".encode()
        assert "everything is on" in far.umount().out
    assert listed(far, f"{bucket.url}/run") == {"shared": mmap.PAGESIZE}


def test_case_021_leaving_without_uploads_is_told_and_resumed(far: Site, network: FaultProxy, bucket: Bucket) -> None:
    """With the network dead, umount --no-wait returns soon with status 3 and what is pending; then nothing is lost."""
    url = f"{bucket.url}/run"
    far.mount("--remote", url)
    network.faults = BLACK_HOLE
    (far.mountpoint / "model").write_bytes(os.urandom(200_000))
    status = far.status()
    assert not status["safe"] and status["at_risk"]["files"] >= 1
    assert far.run("wait", str(far.mountpoint), "--timeout", "500ms").status == 3
    started = time.monotonic()
    done = far.umount("--no-wait", status=3)
    assert time.monotonic() - started < 30
    assert "NOT on" in done.out and "ckptfs mount" in done.out
    assert not is_mounted(far.mountpoint)
    network.heal()
    far.mount()
    until(lambda: far.status()["safe"], "the uploads to finish unaided", 60)
    assert far.umount().status == 0
    assert listed(far, url) == {"model": 200_000}


def test_ctrl_c_while_umount_waits_leaves_the_rest(far: Site, network: FaultProxy, bucket: Bucket) -> None:
    """Progress lines while waiting; SIGINT unmounts at once with status 3, and a second mount has the file."""
    far.mount("--remote", f"{bucket.url}/run")
    network.faults = BLACK_HOLE
    (far.mountpoint / "model").write_bytes(os.urandom(200_000))
    with far.spawn("umount", str(far.mountpoint)) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("uploading: 2 files") or first.startswith("uploading: 1 file"), first
        assert is_mounted(far.mountpoint)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 3, rest
    assert "not waiting any longer" in rest and "NOT on" in rest
    network.heal()
    far.mount()
    assert (far.mountpoint / "model").stat().st_size == 200_000
    far.umount()


def test_sigterm_uploads_what_was_saved_after_it(far: Site, bucket: Bucket) -> None:
    """A save that begins after SIGTERM is on the remote when the daemon has ended."""
    url = f"{bucket.url}/run"
    far.mount("--remote", url, "--settle", "60s")
    pid = far.pid()
    os.kill(pid, signal.SIGTERM)
    until(lambda: "serving on" in far.log(), "the daemon to take note")
    (far.mountpoint / "last").write_bytes(os.urandom(100_000))
    until(lambda: not is_alive(pid), "the daemon to end", 40)
    assert f"ended: everything is on {url}" in far.log()
    assert listed(far, url) == {"last": 100_000}


def test_a_checkpoint_that_is_saved_after_sigterm_is_whole_or_not_there(far: Site, bucket: Bucket) -> None:
    """The trainer got it, too, and takes its time: others see nothing of the checkpoint, and then all of it."""
    url = f"{bucket.url}/run"
    far.mount("--remote", url, "--settle", "100ms")
    (far.mountpoint / "done").write_bytes(b"1")
    assert ckptfs.wait(far.mountpoint, "replicated", 60)
    pid, top = far.pid(), far.mountpoint / "step-10"
    os.kill(pid, signal.SIGTERM)
    until(lambda: "serving on" in far.log(), "the daemon to take note")
    top.mkdir()
    for rank in range(4):
        name = f"__{rank}_0.distcp"
        (top / name).write_bytes(os.urandom(10_000))
        time.sleep(0.5)
        assert listed(far, url).keys() == {"done"}
    (top / ".metadata").write_bytes(b"1")
    until(lambda: not is_alive(pid), "the daemon to end", 40)
    assert f"ended: everything is on {url}" in far.log()
    assert len([name for name in listed(far, url) if name.startswith("step-10/")]) == 5


def test_case_021_sigterm_without_a_network_says_what_is_not_safe(
    far: Site, network: FaultProxy, bucket: Bucket
) -> None:
    """The daemon ends at stop_timeout all the same, the log says what is only here, the store is clean."""
    far.mount("--remote", f"{bucket.url}/run", "--stop-timeout", "2s")
    network.faults = BLACK_HOLE
    (far.mountpoint / "model").write_bytes(os.urandom(100_000))
    pid = far.pid()
    started = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    until(lambda: not is_alive(pid), "the daemon to end", 25)
    assert time.monotonic() - started < 20
    assert "are only in the store" in far.log()
    network.heal()
    far.mount()
    assert ckptfs.wait(far.mountpoint, "replicated", 60)
    far.umount()


def test_a_store_may_not_change_its_remote(far: Site, bucket: Bucket) -> None:
    """A store knows what its remote has: another one is refused; the same one, spelled with a slash, is not."""
    far.mount("--remote", f"{bucket.url}/run")
    far.umount()
    done = far.try_mount("--remote", f"{bucket.url}/other")
    assert done.status == 1 and f"{bucket.url}/run" in done.err
    far.mount("--remote", f"{bucket.url}/run/")
    far.umount()


def test_credentials_are_asked_for_and_handed_over(far: Site, bucket: Bucket) -> None:
    """Wrong keys fail the mount in one line; a live mount takes new ones from another shell."""
    done = far.try_mount("--remote", f"{bucket.url}/run", AWS_SECRET_ACCESS_KEY="wrong")
    assert done.status == 1 and len(done.err.splitlines()) == 1, done.said
    assert not is_mounted(far.mountpoint)
    far.mount("--remote", f"{bucket.url}/run")
    assert far.run("auth", str(far.mountpoint), AWS_SECRET_ACCESS_KEY="wrong").status == 3
    (far.mountpoint / "file").write_bytes(b"1" * 100)
    until(lambda: bool(far.status()["last_error"]), "an error", 60)
    assert not far.status()["safe"]
    again = far.mount()
    assert "handed over" in again.out
    assert ckptfs.wait(far.mountpoint, "replicated", 60)
    far.umount()


def test_publish_makes_it_visible_to_another_mount(far: Site, bucket: Bucket, tmp_path: Path) -> None:
    """`ckptfs publish` does not wait for settling; a second mount of the same remote then shows the file."""
    url = f"{bucket.url}/run"
    far.mount("--remote", url, "--settle", "600s", "--max-lag", "600s")
    (far.mountpoint / "model").write_bytes(b"2" * 50_000)
    done = far.run("publish", "--json", str(far.mountpoint))
    assert done.status == 0 and json.loads(done.out)["published"], done.said
    with Site(tmp_path, environment=far.environment, name="second", tuning=TINY) as other:
        other.mount("--remote", url, "--lag", "200ms", "--read-only")
        assert (other.mountpoint / "model").read_bytes() == b"2" * 50_000
        other.umount()
    far.umount()


def test_case_021_unmounting_by_other_means_uploads_what_was_just_closed(far: Site, bucket: Bucket) -> None:
    """Closed and at once unmounted with fusermount3: the daemon goes on uploading, then ends."""
    url = f"{bucket.url}/run"
    far.mount("--remote", url)
    pid = far.pid()
    for number in range(5):
        (far.mountpoint / f"model-{number}").write_bytes(os.urandom(50_000))
    assert run(["fusermount3", "-u", str(far.mountpoint)]).status == 0
    until(lambda: not is_alive(pid), "the daemon to end", 40)
    assert f"ended: everything is on {url}" in far.log()
    assert listed(far, url) == {f"model-{number}": 50_000 for number in range(5)}


def test_a_new_mount_takes_over_from_a_daemon_that_still_uploads(
    far: Site, network: FaultProxy, bucket: Bucket
) -> None:
    """A daemon that lost its mount and has no network does not keep the store from the next mount."""
    far.mount("--remote", f"{bucket.url}/run", "--stop-timeout", "100s")
    network.faults = BLACK_HOLE
    pid = far.pid()
    (far.mountpoint / "model").write_bytes(os.urandom(50_000))
    assert run(["fusermount3", "-u", str(far.mountpoint)]).status == 0
    until(lambda: "uploading for up to" in far.log(), "the daemon to go on uploading")
    with far.spawn("mount", str(far.mountpoint), "--store", str(far.store), "--force") as mounting:
        until(lambda: not is_alive(pid), "the old daemon to end")
        network.heal()
        said, _ = mounting.communicate(timeout=COMMAND_S)
    assert mounting.returncode == 0, said
    assert "are only in the store" in far.log()
    assert (far.mountpoint / "model").stat().st_size == 50_000
    assert ckptfs.wait(far.mountpoint, "replicated", 60)
    far.umount()
