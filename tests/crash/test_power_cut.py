"""The power is cut at random moments while programs save: what was promised is there, and nothing else is.

The store, and a remote on the same machine, lie on a disk that writes down every change and every flush. From that the
disk is built as a power cut at any moment may have left it, and mounted again, so to speak: by the library alone.
CKPTFS_CUTS is how many cuts the long test makes (500).
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import ckptfs.local.store
from ckptfs.attributes import Caller
from ckptfs.encoding.keys import HEADS
from ckptfs.engine import Engine
from ckptfs.errors import AttributeMissing
from ckptfs.filesystem import FileSystem
from ckptfs.ids import ROOT_INODE, Inode
from ckptfs.local.store import Store
from ckptfs.remote.open import open_remote
from ckptfs.replica.admission import admit, bind, bound_to
from ckptfs.replica.bound import BoundStore
from tests.support.consistency import problems
from tests.support.mounts import TINY, Site
from tests.support.objects import Dependents
from tests.support.powercut import Replay
from tests.support.promises import FLUSHES, Mark, Promises, link_bytes
from tests.support.testdisk import TestDisk

SYNC_EVERY_S = 0.2
UNASKED_S = 1.0
TUNING = {**TINY, "sync_every_s": SYNC_EVERY_S}
QUICK_CUTS = 30
LOW_BYTES = 40 << 20
"""Free on the disk while files are to be evicted."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[TestDisk]:
    with TestDisk(tmp_path) as made:
        yield made


def some_flush(chance: random.Random) -> str:
    return chance.choice(FLUSHES) if chance.random() < 0.35 else ""


class Run:
    """Saves that were written down."""

    def __init__(
        self,
        tmp_path: Path,
        disk: TestDisk,
        seed: int,
        steps: int,
        *options: str,
        tuning: dict[str, Any] = TUNING,
        unasked_s: float = UNASKED_S,
    ) -> None:
        self.random = random.Random(seed)
        disk.directory("remote")
        with Site(tmp_path) as site:
            site.store = disk.store(tuning)
            site.mount("--remote", f"file://{disk.top}/remote", "--settle", "50ms", "--lag", "100ms", *options)
            self.promises = Promises(site.mountpoint, disk.position, unasked_s)
            for step in range(steps):
                self._step(site.mountpoint, disk, step)
            self.promises.rest(time.sleep)
            self.end = disk.position()
            site.kill()
            assert "Traceback" not in site.log(), site.log()

    def _step(self, root: Path, disk: TestDisk, step: int) -> None:
        promises, chance = self.promises, self.random
        data, fsync = chance.randbytes(chance.randrange(90_000)), some_flush(chance)
        files = [path for path, data in promises.now().items() if data and not path.startswith("symlink-")]
        match chance.randrange(16):
            case 0 | 1 | 2:
                self._checkpoint(step)
            case 3:
                promises.write(f"file-{step}", data, fsync=fsync)
            case 4 if files:
                promises.write(chance.choice(files), data, fsync=fsync)
            case 5:
                promises.write("latest", b"%d" % step, fsync=fsync)
            case 6 if files:
                promises.append(chance.choice(files), data, fsync=fsync)
            case 7 if files:
                promises.overwrite(chance.choice(files), chance.randrange(1000), data[:20_000], fsync=fsync)
            case 8 if files:
                path = chance.choice(files)
                with open(root / path, "rb") as reader:  # emptied in place while somebody reads it
                    reader.read(10)
                    promises.write(path, data, fsync=fsync)
            case 9 if files:
                path = chance.choice(files)
                promises.write("temporary", data, fsync=fsync)
                promises.rename("temporary", path)
            case 10:
                promises.rest(time.sleep)
            case 11:
                disk.free_bytes(LOW_BYTES)
                promises.write(f"file-{step}", data, fsync=fsync)
                time.sleep(0.3)
                disk.free_bytes(None)
            case 12 if files:
                promises.append_twice(chance.choice(files), data[:20_000], data[20_000:40_000])
            case 13 if files:
                promises.mark(chance.choice(files), chance.choice((0o600, 0o640, 0o755)), b"%d" % step)
            case 14:
                promises.make_link(f"symlink-{step}", f"to-{step}")
            case 15 if files:
                promises.add_name(chance.choice(files), f"link-{step}")
        if chance.random() < 0.2:
            promises.fsync_directory()
        time.sleep(chance.choice((0.0, 0.0, 0.05, 0.3)))

    def _checkpoint(self, step: int) -> None:
        promises, chance = self.promises, self.random
        promises.make_directory(f"tmp-{step}")
        for shard in range(chance.randrange(1, 4)):
            data = chance.randbytes(chance.randrange(60_000))
            promises.write(f"tmp-{step}/shard-{shard}", data, fsync=some_flush(chance))
        promises.rename(f"tmp-{step}", f"step-{step}")
        promises.write("latest.tmp", b"step-%d" % step, fsync=some_flush(chance))
        promises.rename("latest.tmp", "latest")
        if chance.random() < 0.5:
            promises.fsync_directory()
        for old in [path for path in promises.paths() if path.startswith("step-") and "/" not in path][:-3]:
            promises.remove(old)

    def cut(self, tmp_path: Path, log: Path, cuts: int) -> None:
        """Cut the power *cuts* times, and check what is there then."""
        replay = Replay(log)
        moments = [each for each in replay.ends() if self.promises.began <= each <= self.end]
        for number, position in enumerate(sorted(self.random.choices(moments, k=cuts))):
            replay.advance(position)
            left, chance = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) / tmp_path.name, number
            shutil.rmtree(left, ignore_errors=True)
            try:
                replay.cut(left, random.Random(chance))
                wrong = after(left, self.promises, position)
                if wrong:
                    shutil.copytree(left, tmp_path / "wrong")
                assert not wrong, f"cut {number} at {position}:\n" + "\n".join(wrong)
            finally:
                shutil.rmtree(left, ignore_errors=True)


def after(left: Path, promises: Promises, position: int, until: int | None = None) -> list[str]:
    """Everything that is wrong with what is *left* on the disk; for the others see `Promises.check`."""
    replicated = (left / "remote").is_dir()
    wrong = unreachable(left / "remote")
    found: list[tuple[dict[str, bytes | None], dict[str, Mark]]] = []

    async def mount() -> None:
        store = Store.open(left / "store")
        try:
            engine = Engine(store, remote_of(store, left / "remote") if replicated else None)
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    await nursery.start(engine.run)
                    found.append(await read_tree(engine.filesystem))
                    drained = await engine.drain(30) if replicated else True
                    found.append(await read_tree(engine.filesystem))
                    if not drained:
                        wrong.append(f"what is there cannot be replicated: {engine.progress()}")
                    nursery.cancel_scope.cancel()
        finally:
            store.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckptfs.local.store, "_boot", lambda: "another")
        patch.setattr(Store, "_place", lambda self: self.catalog.get_setting("place"))
        trio.run(mount)
    wrong += promises.check(found[0][0], position, until, found[0][1])
    if found[0] != found[1]:
        wrong.append("sealing or uploading changed what is there")
    wrong += [each for each in problems(left / "store") if "is in lost+found" not in each]
    return wrong + unreachable(left / "remote")


def remote_of(store: Store, directory: Path) -> BoundStore:
    remote = open_remote(f"file://{directory}")
    if bound_to(store.catalog) is None:
        bind(store.catalog, admit(remote, create=True))
    return BoundStore(remote, bound_to(store.catalog))


def unreachable(remote: Path) -> list[str]:
    """What the newest head on *remote* reaches, and is not there."""
    if not any((remote / HEADS).rglob("*")) or not any(path.is_file() for path in (remote / HEADS).rglob("*")):
        return []
    try:
        objects = Dependents(remote).read()
    except (OSError, ValueError) as error:
        return [f"the remote is not whole: {error}"]
    return [f"{key} is missing" for key in objects.spans if not (remote / key).is_file()]


async def read_tree(filesystem: FileSystem) -> tuple[dict[str, bytes | None], dict[str, Mark]]:
    """What each path holds, and the marks of files."""
    found: dict[str, bytes | None] = {}
    marks: dict[str, Mark] = {}

    async def walk(directory: Inode, path: str) -> None:
        for name, ino in await filesystem.entries(directory):
            child = f"{path}{name.decode()}"
            attributes = await filesystem.getattr(ino)
            if stat.S_ISDIR(attributes.mode):
                found[child] = None
                await walk(ino, f"{child}/")
                continue
            if stat.S_ISLNK(attributes.mode):
                found[child] = link_bytes((await filesystem.readlink(ino)).decode())
                continue
            marks[child] = (stat.S_IMODE(attributes.mode), attribute(filesystem, ino))
            fh = await filesystem.open(ino, os.O_RDONLY, Caller(0, 0))
            found[child] = await filesystem.files.read(fh, 0, attributes.size + 1)
            await filesystem.release(fh)

    await walk(ROOT_INODE, "")
    return found, marks


def attribute(filesystem: FileSystem, ino: Inode) -> bytes:
    try:
        return filesystem.xattrs.get(ino, b"user.mark")
    except AttributeMissing:
        return b""


@pytest.mark.timeout(120)
def test_what_was_promised_survives_power_cuts(tmp_path: Path, disk: TestDisk) -> None:
    """At 30 moments of a series of saves: nothing that was durable is lost, and nothing is torn that was replaced."""
    Run(tmp_path, disk, 1, 25).cut(tmp_path, disk.log, QUICK_CUTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("passthrough", ["on", "off"])
@pytest.mark.parametrize("seed", range(2, 7))
def test_what_was_promised_survives_many_power_cuts(
    tmp_path: Path, disk: TestDisk, seed: int, passthrough: str
) -> None:
    """The same at 500 moments of ten series."""
    cuts = int(os.environ.get("CKPTFS_CUTS", "500")) // 10
    Run(tmp_path, disk, seed, 60, "--passthrough", passthrough).cut(tmp_path, disk.log, cuts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_closed_five_seconds_ago_survives_power_cuts(tmp_path: Path, disk: TestDisk) -> None:
    """With the pauses that everybody has."""
    Run(tmp_path, disk, 8, 40, tuning=TINY, unasked_s=5.0).cut(tmp_path, disk.log, 100)
