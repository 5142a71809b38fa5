"""One damaged object on the remote: EIO for what depends on it, and nothing else; never other bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.mounts import TINY, Site, until
from tests.support.objects import Dependents

pytestmark = pytest.mark.timeout(150)

FORMAT = "ckptfs.json"


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def remove(data: bytes) -> bytes | None:
    return None


DAMAGES: tuple[Callable[[bytes], bytes | None], ...] = (flip, truncate, remove)


@dataclass
class Published:
    """A remote in a directory, filled through a mount, and what it holds."""

    directory: Path
    remote: Path
    content: dict[str, bytes]
    listings: dict[str, set[str]]

    @property
    def url(self) -> str:
        return f"file://{self.remote}"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    directory = tmp_path_factory.mktemp("damaged")
    remote = directory / "remote"
    remote.mkdir()
    random = np.random.default_rng(4)
    with Site(directory, name="writer", tuning=TINY) as site:
        site.mount("--remote", f"file://{remote}", "--settle", "100ms")
        top = site.mountpoint
        for name in ("one", "two"):
            (top / name / "deep").mkdir(parents=True)
            np.save(top / name / "model.npy", random.normal(size=9000).astype(np.float32))
            (top / name / "random").write_bytes(random.bytes(30_000))
            for number in range(12):
                (top / name / "deep" / f"small-{number}").write_bytes(random.bytes(700))
        (top / "text").write_text("so it goes on\n" * 2000)
        site.umount()
    with Site(directory, name="writer") as site:
        site.mount()
        content, listings = {}, {}
        for each, directories, files in os.walk(site.mountpoint):
            path = os.path.relpath(each, site.mountpoint).removeprefix(".")
            listings[path] = {*directories, *files}
            for name in files:
                content[os.path.join(path, name)] = (Path(each) / name).read_bytes()
        site.umount()
    yield Published(directory, remote, content, listings)


def look(site: Site, published: Published) -> set[str]:
    """Read everything; the paths that give EIO. Anything else than EIO and the right bytes fails."""
    failed = set()
    for path, names in published.listings.items():
        if any(
            path == each or path.startswith(f"{each}/") or each == "" for each in failed & published.listings.keys()
        ):
            continue  # cannot be reached
        try:
            assert set(os.listdir(site.mountpoint / path)) == names, path
        except OSError as error:
            assert error.errno == errno.EIO, (path, error)
            failed.add(path)
            continue
        for name in names:
            child = os.path.join(path, name)
            if child not in published.content:
                continue
            assert os.stat(site.mountpoint / child).st_size == len(published.content[child])
            try:
                assert (site.mountpoint / child).read_bytes() == published.content[child], child
            except OSError as error:
                assert error.errno == errno.EIO, (child, error)
                failed.add(child)
    return failed


def expected(dependents: Dependents, kind: str, key: str, size: int, damaged: bytes | None) -> set[str]:
    if kind == "tree":
        return dependents.listings[key]
    if kind == "manifest":
        return dependents.files[key]
    if kind == "pack":
        if damaged is None:
            return {path for _, _, path in dependents.spans[key]}
        if len(damaged) < size:
            return {path for _, end, path in dependents.spans[key] if end > len(damaged)}
        return {path for start, end, path in dependents.spans[key] if start <= size // 2 < end}
    return set()


def check(published: Published, tmp_path: Path, kind: str, key: str, damage: Callable[[bytes], bytes | None]) -> None:
    dependents = Dependents(published.remote).read()
    path = published.remote / key
    data = path.read_bytes()
    damaged = damage(data)
    wanted = expected(dependents, kind, key, len(data), damaged)
    path.unlink()
    try:
        if damaged is not None:
            path.write_bytes(damaged)
        with Site(tmp_path, name=f"{damage.__name__}-{kind}", tuning=TINY) as site:
            site.mount("--remote", published.url, "--read-only", "--lag", "100ms")
            assert look(site, published) == wanted, (key, damage.__name__)
            assert look(site, published) == wanted, "the second time"
            if wanted:
                assert key.rpartition("/")[2] in site.log()
            path.write_bytes(data)
            if kind != "head":
                until(lambda: look(site, published) == set(), "everything to be readable again", 10)
            site.umount()
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES, ids=[each.__name__ for each in DAMAGES])
@pytest.mark.parametrize("kind", ["pack", "manifest", "tree", "index"])
def test_one_damaged_object(
    published: Published, tmp_path: Path, kind: str, damage: Callable[[bytes], bytes | None]
) -> None:
    """One object of each kind, changed, cut or gone: what needs it is EIO and its name is logged, the rest is right."""
    keys = Dependents(published.remote).read().used(kind)
    check(published, tmp_path, kind, keys[len(keys) // 2], damage)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("damage", DAMAGES, ids=[each.__name__ for each in DAMAGES])
def test_every_damaged_object(published: Published, tmp_path: Path, damage: Callable[[bytes], bytes | None]) -> None:
    """The same for every single object."""
    for kind in ("pack", "manifest", "tree", "index"):
        for number, key in enumerate(Dependents(published.remote).read().used(kind)):
            check(published, tmp_path / f"{kind}-{number}", kind, key, damage)


@pytest.mark.parametrize("damage", [flip, truncate], ids=["flip", "truncate"])
def test_a_damaged_head(published: Published, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Nothing is shown as empty that is only unreadable: listing the mount fails, the log names the head; it heals."""
    key = Dependents(published.remote).keys("head")[0]
    path = published.remote / key
    data = path.read_bytes()
    path.unlink()
    try:
        path.write_bytes(damage(data))
        with Site(tmp_path, tuning=TINY) as site:
            site.mount("--remote", published.url, "--read-only", "--lag", "100ms")
            assert look(site, published) == {""}
            assert key.rpartition("/")[2] in site.log()
            path.unlink()
            path.write_bytes(data)
            assert look_until_whole(site, published)
            site.umount()
    finally:
        path.write_bytes(data)


def look_until_whole(site: Site, published: Published) -> bool:
    def whole() -> bool:
        try:
            return bool(os.listdir(site.mountpoint))
        except OSError:
            return False

    until(whole, "the head to be followed", 10)
    return look(site, published) == set()


@pytest.mark.parametrize("damage", DAMAGES, ids=[each.__name__ for each in DAMAGES])
def test_a_damaged_format_object(published: Published, tmp_path: Path, damage: Callable[[bytes], bytes | None]) -> None:
    """Without a sound ckptfs.json nothing is mounted, nothing is written, and one line says why."""
    path = published.remote / FORMAT
    data = path.read_bytes()
    damaged = damage(data)
    path.unlink()
    try:
        if damaged is not None:
            path.write_bytes(damaged)
        with Site(tmp_path, tuning=TINY) as site:
            done = site.try_mount("--remote", published.url)
            assert done.status == 1 and FORMAT in done.err and len(done.err.splitlines()) == 1, done.said
            assert path.exists() == (damaged is not None)
    finally:
        path.write_bytes(data)
