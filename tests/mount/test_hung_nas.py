"""A `file://` remote that hangs, as a NAS whose server is gone does: every call that reaches it waits for ever."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptfs
from tests.support.mounts import TINY, Site, until

pytestmark = pytest.mark.timeout(150)

READ_TIMEOUT_S = 2.0
PROMPT_S = 5.0
"""Far more than anything takes that does not wait for the NAS."""


@pytest.fixture
def nas(tmp_path: Path) -> Iterator[Site]:
    """A mount whose daemon can be stopped. Without passthrough, so that all it serves stops with it."""
    with Site(tmp_path, name="nas", environment={"CKPTFS_PASSTHROUGH": "off"}) as made:
        made.mount()
        (made.mountpoint / "remote").mkdir()
        yield made


def reads_in_time(path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(OSError) as raised:
        path.read_bytes()
    assert raised.value.errno == errno.EIO and time.monotonic() - began < 3 * READ_TIMEOUT_S + PROMPT_S


def test_a_nas_that_hangs(nas: Site, tmp_path: Path) -> None:
    """Saves, listings and status are as quick as ever, reads end with EIO in time, umount leaves; then all heals."""
    url = f"file://{nas.mountpoint}/remote"
    options = ("--remote", url, "--settle", "100ms", "--lag", "100ms", "--read-timeout", f"{READ_TIMEOUT_S:.0f}s")
    data = [os.urandom(200_000) for _ in range(3)]
    with Site(tmp_path, name="here", tuning=TINY) as here, Site(tmp_path, name="there", tuning=TINY) as there:
        here.mount(*options)
        (here.mountpoint / "zero").write_bytes(data[0])
        (here.mountpoint / "one").write_bytes(data[1])
        assert ckptfs.wait(here.mountpoint, "replicated", 60)
        there.mount(*options)
        assert (there.mountpoint / "zero").read_bytes() == data[0]
        os.kill(nas.pid(), signal.SIGSTOP)
        try:
            began = time.monotonic()
            with open(here.mountpoint / "two", "wb") as file:
                file.write(data[2])
                os.fsync(file.fileno())
            assert os.stat(there.mountpoint / "one").st_size == len(data[1])
            assert (there.mountpoint / "zero").read_bytes() == data[0]
            assert time.monotonic() - began < PROMPT_S
            for _ in range(4):
                reads_in_time(there.mountpoint / "one")
            began = time.monotonic()
            status = here.status()
            assert not status["safe"] and status["pending"]["files"] == 1 and "no answer" in status["last_error"]
            assert "no answer" in there.status()["last_error"] and there.status()["damaged"] == []
            assert time.monotonic() - began < 2 * PROMPT_S
            here.umount("--no-wait", status=3)
            assert time.monotonic() - began < 4 * PROMPT_S
        finally:
            os.kill(nas.pid(), signal.SIGCONT)
        here.mount()
        assert ckptfs.wait(here.mountpoint, "replicated", 60)

        def is_read() -> bool:
            try:
                return (there.mountpoint / "one").read_bytes() == data[1]
            except OSError:
                return False

        until(is_read, "reads to go on, unaided")
        until(lambda: (there.mountpoint / "two").exists(), "news to arrive, unaided")
        assert (there.mountpoint / "two").read_bytes() == data[2]
        there.umount()
        here.umount()
        nas.umount()
