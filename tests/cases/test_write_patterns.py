"""Group D: the ways in which programs write, which some mounts could not take."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs.config import Settings
from tests.support.machines import Machines
from tests.support.mounts import until

pytestmark = pytest.mark.timeout(180)

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def test_case_022_headers_are_written_last(top: Path, tmp_path: Path) -> None:
    """As h5py seeks back: writes here and there, and the beginning in the end."""
    for path in (tmp_path / "plain", top / "file"):
        with open(path, "wb", buffering=0) as file:
            for offset in (96, 2048, 6144, 135_168, 0):
                assert os.pwrite(file.fileno(), struct.pack("q", offset) * 12, offset) == 96
    assert (top / "file").read_bytes() == (tmp_path / "plain").read_bytes()


def test_case_024_numpy_maps(machines: Machines) -> None:
    """Every mode of np.memmap: what was stored and flushed is read at once, after a remount, and elsewhere; a file that
    was made longer is mapped again."""
    site = machines.site("here")
    path = machines.mount(site) / "array"
    first = np.memmap(path, np.float32, "w+", shape=(300, 500))
    first[:] = np.arange(500)
    first.flush()
    del first
    wanted = np.tile(np.arange(500, dtype=np.float32), (300, 1))
    assert path.read_bytes() == wanted.tobytes()
    changed = np.memmap(path, np.float32, "r+", shape=(300, 500))
    changed[7] = wanted[7] = -1
    changed.flush()
    private = np.memmap(path, np.float32, "c", shape=(300, 500))
    private[8] = 5  # in memory alone
    assert np.array_equal(np.memmap(path, np.float32, "r", shape=(300, 500)), wanted)
    del changed, private
    assert path.read_bytes() == wanted.tobytes()
    os.truncate(path, 400 * 500 * 4)
    grown = np.memmap(path, np.float32, "r+", shape=(400, 500))
    assert not grown[300:].any()
    grown[399] = 9
    grown.flush()
    del grown
    wanted = np.concatenate([wanted, np.zeros((99, 500), np.float32), np.full((1, 500), 9, np.float32)])
    assert ckptfs.wait(path.parent, "replicated", 60)
    there = machines.mount(machines.site("there"))
    site.umount()
    for top in (machines.mount(site), there):
        for mode in ("r", "c", "r+"):
            assert np.array_equal(np.memmap(top / "array", np.float32, mode, shape=(400, 500)), wanted)


def exchange(path: Path, rank: int, rounds: int) -> int:
    """Store through a map and read by another descriptor at once, and the reverse, in a page of one's own."""
    wrong = 0
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    with mmap.mmap(first, 0) as mapped:
        for number in range(rounds):
            at = rank * PAGE + number % (PAGE - 16)
            mapped[at : at + 8] = word = struct.pack("q", number * 7919 + rank)
            wrong += os.pread(second, 8, at) != word
            os.pwrite(second, word[::-1], at + 8)
            wrong += mapped[at + 8 : at + 16] != word[::-1]
    os.close(first)
    os.close(second)
    return wrong


def write_whole(path: Path, size: int) -> None:
    path.write_bytes(struct.pack("q", size) * (size // 8))


def test_case_025_maps_and_reads_agree(top: Path, ranks: ProcessPoolExecutor) -> None:
    """Four processes, a thousand rounds each; and what another process has just closed is read whole."""
    path = top / "shared"
    path.write_bytes(bytes(4 * PAGE))
    assert list(ranks.map(exchange, [path] * 4, range(4), [1000] * 4)) == [0] * 4
    for number in range(100):
        size = 8 * (number * 97 % 5000)
        ranks.submit(write_whole, top / f"{number}", size).result(60)
        assert (top / f"{number}").read_bytes() == struct.pack("q", size) * (size // 8)


def test_case_027_a_summary_writer(machines: Machines) -> None:
    """TensorBoard's own writer runs, and its own reader finds every event, here and elsewhere."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    here = machines.mount(machines.site("here"))
    with tensorboard.SummaryWriter(here / "run", flush_secs=1) as writer:
        for step in range(500):
            writer.add_scalar("loss", 1 / (step + 1), step)
            if step % 100 == 99:
                writer.flush()
    assert ckptfs.wait(here, "replicated", 60)
    there = machines.mount(machines.site("there"))
    for base in (here, there):
        (file,) = (base / "run").iterdir()
        steps = [event.step for event in loader.EventFileLoader(str(file)).Load() if event.HasField("summary")]
        assert steps == list(range(500))


def test_case_028_a_log_that_stays_open(machines: Machines) -> None:
    """Flushed and never closed: read at once here, elsewhere within the lag, and not sent again and again."""
    settings = {"log_after_s": 0.3, "log_seal_s": 0.5, "log_seal_after_fsync_s": 0.5}
    way = machines.proxy()
    here = machines.mount(machines.site("here", by=way, tuning=None, settings=settings))
    there = machines.mount(machines.site("there", tuning=None), "--read-only")
    with open(here / "log", "ab") as file:
        for number in range(40):
            file.write(os.urandom(100_000))
            file.flush()
            assert (here / "log").stat().st_size == (number + 1) * 100_000
            time.sleep(0.1)
        whole = (here / "log").read_bytes()
        until(lambda: (there / "log").exists() and (there / "log").read_bytes() == whole, "the log elsewhere")
        assert way.counts["PUT"].bytes_up <= 2 * len(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_028_a_log_that_stays_open_with_the_usual_pauses(machines: Machines) -> None:
    """Two minutes after it was begun it is seen elsewhere; from then on what was flushed a minute ago, and what was
    fsynced ten seconds ago; and what is read is always a beginning of it."""
    settings, slack_s = Settings(), 15.0
    here = machines.mount(machines.site("here", tuning=None))
    there = machines.mount(machines.site("there", tuning=None), "--read-only")
    whole, flushed = b"", list[tuple[float, int]]()  # when, and how much there was by then

    def append() -> None:
        nonlocal whole
        whole += os.urandom(1000)
        os.write(file, whole[-1000:])
        flushed.append((time.monotonic(), len(whole)))
        time.sleep(0.5)

    def seen() -> int:
        data = (there / "log").read_bytes() if (there / "log").exists() else b""
        assert whole.startswith(data)
        return len(data)

    began_s = time.monotonic()
    known_s = began_s + settings.log_after_s + settings.log_seal_s + slack_s
    file = os.open(here / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while time.monotonic() < known_s + 2 * settings.log_seal_s:
            append()
            due_s = time.monotonic() - settings.log_seal_s - slack_s
            if time.monotonic() > known_s:
                assert seen() >= max(size for at_s, size in flushed if at_s <= due_s)
        os.fsync(file)
        due, due_s = len(whole), time.monotonic() + settings.log_seal_after_fsync_s + slack_s
        while seen() < due:
            assert time.monotonic() < due_s, f"{seen()} of {due} bytes"
            append()
    finally:
        os.close(file)


def test_case_030_overwriting_what_exists(top: Path, tmp_path: Path) -> None:
    """Opened anew with 'w', shortened and made longer, changed in the middle, and empty: sizes and zeros as ext4."""

    def overwrite(path: Path) -> list[tuple[int, bytes]]:
        seen = []

        def look() -> None:
            seen.append((path.stat().st_size, path.read_bytes()))

        path.write_bytes(b"first" * 3000)
        look()
        with open(path, "wb") as file:
            look()
            file.write(b"second")
        look()
        with open(path, "r+b") as file:
            file.truncate(3)
            look()
            file.truncate(20_000)
            look()
            file.seek(9_000)
            file.write(b"middle")
        look()
        path.write_bytes(b"")
        look()
        return seen

    assert overwrite(top / "file") == overwrite(tmp_path / "plain")


def by_cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--reflink=auto", source, target], check=True, timeout=60)


def by_copy_file_range(source: Path, target: Path) -> None:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        left = os.fstat(reader.fileno()).st_size
        if source.parent != target.parent:
            shutil.copyfileobj(reader, writer)  # EXDEV between file systems of two kinds
            return
        while left:
            left -= os.copy_file_range(reader.fileno(), writer.fileno(), left)


@pytest.mark.parametrize("megabytes", [16, pytest.param(300, marks=pytest.mark.slow)])
def test_case_032_fast_copies_are_whole(top: Path, tmp_path: Path, megabytes: int) -> None:
    """Onto the mount, within it and off it, by sendfile, copy_file_range and cp: every byte, or an error."""
    data = np.random.default_rng(megabytes).bytes(megabytes * MIB)
    for number, copy in enumerate((shutil.copyfile, shutil.copy2, by_copy_file_range, by_cp, shutil.move)):
        here, there = top / f"{number}", tmp_path / f"{number}"
        for directory in (here, there):
            directory.mkdir()
        (there / "plain").write_bytes(data)
        copy(there / "plain", here / "one")
        copy(here / "one", here / "two")
        copy(here / "two", there / "back")
        assert (there / "back").read_bytes() == data, copy
        if copy is not shutil.move:
            assert (here / "one").read_bytes() == (here / "two").read_bytes() == data, copy
        shutil.rmtree(here)
        shutil.rmtree(there)


def test_case_033_direct_and_nameless(top: Path) -> None:
    """O_DIRECT agrees with buffered descriptors; O_TMPFILE is refused as programs know it; no name is left."""
    page = mmap.mmap(-1, 4 * PAGE)
    page.write(os.urandom(4 * PAGE))
    fd = os.open(top / "direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    try:
        assert os.pwritev(fd, [page], 2 * PAGE) == 4 * PAGE
        assert (top / "direct").read_bytes() == bytes(2 * PAGE) + page[:]
        with open(top / "direct", "r+b", buffering=0) as buffered:
            buffered.write(b"buffered" * 1000)
        assert os.preadv(fd, [page], 0) == 4 * PAGE
        assert page[: 8 * 1000] == b"buffered" * 1000
    finally:
        os.close(fd)
        page.close()
    with pytest.raises(OSError) as refusal:
        os.open(top, os.O_TMPFILE | os.O_RDWR)
    assert refusal.value.errno == errno.EOPNOTSUPP
    with tempfile.TemporaryFile(dir=top) as nameless:
        nameless.write(b"x" * 100_000)
        assert os.listdir(top) == ["direct"]
        nameless.seek(0)
        assert nameless.read() == b"x" * 100_000
