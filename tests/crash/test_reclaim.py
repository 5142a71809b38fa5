"""Files that give up what newer ones have: whatever is saved, changed, removed and killed, every byte stays.

Random operations on a mount that reclaims at once, beside a dictionary of what each file should hold.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from pathlib import Path

import pytest

from tests.support.mounts import Site, until

pytestmark = pytest.mark.timeout(240)

MIB = 1 << 20
BLOCK = 512 << 10
"""What files have in common comes in such blocks, cut by content."""
NAMES = tuple(f"checkpoint-{number}.bin" for number in range(6))
STEPS = int(os.environ.get("CKPTFS_TEST_STEPS", "60"))


class Series:
    """Files made of blocks out of a few, and what they hold."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.random = random.Random(seed)
        self.pool = [random.Random((seed << 8) + number).randbytes(BLOCK) for number in range(6)]
        self.files: dict[str, bytes] = {}

    def path(self, name: str) -> Path:
        return self.site.mountpoint / name

    def step(self) -> None:
        choose = self.random.random()
        if choose < 0.3 or not self.files:
            self.save(self.random.choice(NAMES))
            return
        name = self.random.choice(sorted(self.files))
        if choose < 0.45:
            os.unlink(self.path(name))
            del self.files[name]
        elif choose < 0.6:
            assert self.path(name).read_bytes() == self.files[name], name
        elif choose < 0.7:
            self.patch(name)
        elif choose < 0.75:
            self.truncate(name)
        elif choose < 0.8:
            self.rename(name)
        elif choose < 0.85:
            self.read_mapped(name)
        elif choose < 0.95:
            time.sleep(self.random.random() * 1.5)
        else:
            self.site.kill()
            self.site.mount()

    def content(self) -> bytes:
        blocks = self.random.choices(self.pool, k=self.random.randint(1, 4))
        return b"".join([*blocks, self.random.randbytes(self.random.randint(1, 200_000))])

    def save(self, name: str) -> None:
        """As programs do: beside, and renamed; or in place."""
        data = self.content()
        if self.random.random() < 0.5:
            self.path("new").write_bytes(data)
            os.replace(self.path("new"), self.path(name))
        else:
            self.path(name).write_bytes(data)
        self.files[name] = data

    def patch(self, name: str) -> None:
        data = bytearray(self.files[name])
        at = self.random.randrange(len(data))
        more = self.random.randbytes(self.random.randint(1, 5000))
        with open(self.path(name), "r+b") as file:
            file.seek(at)
            file.write(more)
        data[at : at + len(more)] = more
        self.files[name] = bytes(data)

    def truncate(self, name: str) -> None:
        size = self.random.randrange(len(self.files[name]) + 1)
        os.truncate(self.path(name), size)
        self.files[name] = self.files[name][:size]
        if not size:
            os.unlink(self.path(name))
            del self.files[name]

    def rename(self, name: str) -> None:
        target = self.random.choice(NAMES)
        os.rename(self.path(name), self.path(target))
        self.files[target] = self.files.pop(name)

    def read_mapped(self, name: str) -> None:
        with open(self.path(name), "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            time.sleep(self.random.random() * 0.5)
            assert mapped[:] == self.files[name], name

    def check(self) -> None:
        assert sorted(os.listdir(self.site.mountpoint)) == sorted(self.files)
        for name, data in self.files.items():
            assert self.path(name).read_bytes() == data, name

    def images_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in (self.site.store / "images").rglob("*") if path.is_file())


def go_on(site: Site, seed: int, *options: str) -> None:
    site.mount("--reclaim-after", "0s", *options)
    series = Series(site, seed)
    for number in range(STEPS):
        try:
            series.step()
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {number}") from error
    series.check()
    for name in sorted(series.files):
        os.unlink(series.path(name))
    until(lambda: series.images_bytes() < MIB, "images of removed files to go", 30)
    site.umount()
    done = site.run("fsck", str(site.store))
    assert done.status == 0, done.said


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_every_byte_stays(tmp_path: Path, seed: int) -> None:
    with Site(tmp_path) as site:
        go_on(site, seed)


@pytest.mark.parametrize("seed", [3])
def test_with_a_remote(tmp_path: Path, seed: int) -> None:
    """Published files alone give up ranges, and are fetched from the remote where nobody here has them any more."""
    with Site(tmp_path) as site:
        go_on(site, seed, "--remote", f"file://{tmp_path}/remote", "--settle", "100ms", "--lag", "100ms")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_seeds(tmp_path: Path, seed: int) -> None:
    with Site(tmp_path) as site:
        remote = ("--remote", f"file://{tmp_path}/remote", "--settle", "100ms", "--lag", "100ms")
        go_on(site, seed, *(remote if seed % 3 == 0 else ()))
