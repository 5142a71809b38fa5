"""A bucket whose writer means harm, mounted for real: nothing is written outside the store, nothing hangs or takes
memory without bound, everything else stays usable, and the error says what is wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from ckptfs.encoding.keys import pack_key, tree_key
from ckptfs.ids import digest
from tests.support.hostile import ROOT, HostileRemote, entry, ident
from tests.support.mounts import Site, peak_bytes

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


@pytest.fixture
def remote(tmp_path: Path) -> HostileRemote:
    return HostileRemote(tmp_path / "remote")


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[None]:
    """Everything of the test's directory but store and mountpoint must be the same afterwards."""

    def seen() -> set[tuple[str, int]]:
        ours = {"mnt", "mnt-store", "xdg", "remote"}
        found = {(name, (tmp_path / name).lstat().st_size) for name in os.listdir(tmp_path) if name not in ours}
        return found | {(str(path), path.lstat().st_size) for path in tmp_path.parent.glob("*") if path != tmp_path}

    before = seen()
    yield
    assert seen() == before


def bomb(size: int) -> bytes:
    """A few KiB that unpack to *size* zeros."""
    return zstandard.ZstdCompressor(level=19, write_checksum=True, write_content_size=True).compress(bytes(size))


def directory(name: str, number: int, tree: str) -> dict[str, object]:
    return entry(name, ident(number), 0o40755, tree=tree)


BAD_NAMES = ["..", ".", "", "a/b", "/etc/passwd", "a\0b", "../../outside", "x" * 256, {"b64": "Li4="}]


def test_names_that_lead_elsewhere(remote: HostileRemote, site: Site, outside: None) -> None:
    """A tree with such a name is refused as a whole, EIO; the log names the tree; what is beside it is readable."""
    good = remote.file(b"good")
    bad = {
        f"d{number}": remote.tree([entry(name, ident(1000 + number), manifest=good, size=4)], ident(number + 1))
        for number, name in enumerate(BAD_NAMES)
    }
    entries = [directory(name, number + 1, tree) for number, (name, tree) in enumerate(bad.items())]
    remote.head(remote.tree([*entries, entry("good", ident(99), manifest=good, size=4)]))
    site.mount("--remote", remote.url, "--lag", "100ms")
    assert (site.mountpoint / "good").read_bytes() == b"good"
    for name, tree in bad.items():
        with pytest.raises(OSError, match="Input/output"):
            os.listdir(site.mountpoint / name)
        assert tree in site.log(), name
    saves(site)
    site.umount()


def saves(site: Site) -> None:
    """The mount saves as ever."""
    (site.mountpoint / "mine").write_bytes(b"mine" * 1000)
    assert site.run("wait", str(site.mountpoint / "mine"), "--timeout", "20").status == 0


def circles(remote: HostileRemote) -> str:
    """Directories within themselves: by the root's id, by their parent's id, two within each other."""
    empty = remote.tree([], ident(7))
    inner_root = remote.tree([directory("again", 1, remote.tree([], ident(1)))], ROOT)
    parent = remote.tree([entry("child", ident(5), 0o40755, tree=remote.tree([directory("x", 7, empty)], ident(5)))],
                         ident(5))  # fmt: skip
    other = remote.tree([directory("a", 3, remote.tree([], ident(3)))], ident(4))
    first = remote.tree([directory("b", 4, other)], ident(3))
    return remote.tree([
        directory("a", 3, first), directory("b", 4, other), directory("p", 5, parent),
        entry("root", ROOT, 0o40755, tree=inner_root),
    ])  # fmt: skip


def doubling(remote: HostileRemote) -> str:
    """Forty levels, each twice within the next: a million million paths in forty objects."""
    tree = remote.tree([], ident(100))
    for level in range(101, 140):
        tree = remote.tree([directory("l", level - 1, tree), directory("r", level - 1, tree)], ident(level))
    return remote.tree([directory("top", 139, tree)])


def wrong_kinds(remote: HostileRemote) -> str:
    """Trees of another directory, one name for a file and a directory, and sizes, times, owners at their ends."""
    good = remote.file(b"good")
    most = (1 << 63) - 1
    return remote.tree([
        directory("alien", 20, remote.tree([], ident(21))),
        entry("dev", ident(22), 0o20600, rdev=most),
        entry("ends", ident(23), 0o107777, manifest=good, size=most, mtime=most, ctime=-most - 1, atime=most,
              uid=(1 << 32) - 1, gid=(1 << 32) - 1),
        entry("file", ident(25), manifest=good, size=4),
        entry("link", ident(26), 0o120777, target="../../../etc/passwd"),
        entry("same", ident(25), 0o40755, tree=remote.tree([], ident(25))),
    ])  # fmt: skip


def many_parts(remote: HostileRemote) -> str:
    """A directory of a hundred thousand parts that are not there."""
    return remote.tree([directory("parts", 30, remote.parts([f"{n:064x}" for n in range(100_000)], ident(30)))])


@pytest.mark.parametrize("make", [circles, doubling, wrong_kinds, many_parts])
def test_trees_that_make_no_sense(
    remote: HostileRemote, site: Site, outside: None, make: Callable[[HostileRemote], str]
) -> None:
    """Listing ends soon, whatever it finds; so does `ckptfs ls -R`; saving and publishing go on."""
    remote.head(make(remote))
    done = site.run("ls", "-R", remote.url, timeout_s=20)
    assert done.status in (0, 1) and len(done.out.splitlines()) < 1000
    site.mount("--remote", remote.url, "--lag", "100ms")
    began = time.monotonic()
    for walked, (each, _, files) in enumerate(os.walk(site.mountpoint)):
        assert walked < 1000
        for name in files:
            path = Path(each) / name
            path.lstat()
            if path.is_file() and not path.is_symlink():
                try:
                    with path.open("rb") as file:
                        file.read(1 << 20)
                except OSError:
                    pass
    saves(site)
    assert time.monotonic() - began < 40
    assert peak_bytes(site.pid()) < 400 * MIB
    assert site.status()["path"] == "/"
    site.umount()


def test_objects_that_are_not_what_their_names_say(remote: HostileRemote, site: Site, outside: None) -> None:
    """Bombs, garbage and other objects' bytes under trees' and packs' keys: EIO, named, in bounded memory and time."""
    good = remote.tree([entry("f", ident(50), manifest=remote.file(b"good"), size=4)], ident(49))
    trees = {
        "bomb": bomb(256 * MIB), "bigger": bomb(600 * MIB), "garbage": os.urandom(5000), "empty": b"",
        "json bomb": zstandard.ZstdCompressor(level=19, write_checksum=True).compress(b"[" + b"{}," * 60_000_000),
        "deep": zstandard.ZstdCompressor(write_checksum=True).compress(b"[" * 10_000_000),
        "another": (remote.directory / tree_key(bytes.fromhex(good))).read_bytes(),  # type: ignore[arg-type]
    }  # fmt: skip
    entries = []
    for number, (name, data) in enumerate(sorted(trees.items())):
        digest_of_none = f"{number:064x}"
        remote.put_at(tree_key(bytes.fromhex(digest_of_none)), data)  # type: ignore[arg-type]
        entries.append(directory(name, 51 + number, digest_of_none))
    # the same JSON bombs under the names that they really have: only their content is to be refused
    for number, body in enumerate((b"[" + b"{}," * 60_000_000 + b"{}]", b"[" + b"0," * 100_000_000 + b"0]")):
        real = digest(body).hex()
        packed = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(body)
        remote.put_at(tree_key(digest(body)), packed)  # type: ignore[arg-type]
        entries.append(directory(f"named bomb {number}", 70 + number, real))
    remote.head(remote.tree(entries))
    site.mount("--remote", remote.url, "--lag", "100ms")
    for each in entries * 3:  # what was refused stays nowhere
        began = time.monotonic()
        with pytest.raises(OSError, match="Input/output"):
            os.listdir(site.mountpoint / str(each["name"]))
        assert time.monotonic() - began < 20, each["name"]
        assert str(each["tree"]) in site.log(), each["name"]
    assert peak_bytes(site.pid()) < 400 * MIB
    saves(site)
    site.umount()


def test_files_that_lie(remote: HostileRemote, site: Site, outside: None) -> None:
    """Sizes beyond everything, chunks that unpack to more, less or something else, packs that are not there: EIO or the
    right bytes, never others, and no disk is filled."""
    data = os.urandom(4000)
    pack = remote.pack(data + bomb(64 * MIB))
    at = len(data)
    bomb_bytes = len(bomb(64 * MIB))
    huge = 1 << 62
    files = {
        "all hole": (huge, remote.manifest(huge, [], [], [[0, huge]])),
        "other bytes": (4000, remote.manifest(4000, [(b"\1" * 32, 4000)], [(pack, 0, 4000, 0)])),
        "bomb": (10, remote.manifest(10, [(digest(bytes(10)), 10)], [(pack, at, bomb_bytes, 1)])),
        "true bomb": (64 * MIB, remote.manifest(64 * MIB, [(b"\2" * 32, 64 * MIB)], [(pack, at, bomb_bytes, 1)])),
        "beyond": (4000, remote.manifest(4000, [(digest(data), 4000)], [(pack, 1 << 60, 4000, 0)])),
        "no pack": (4000, remote.manifest(4000, [(digest(data), 4000)], [("ab" * 32, 0, 4000, 0)])),
        "codec": (4000, remote.manifest(4000, [(digest(data), 4000)], [(pack, 0, 4000, 999)])),
        "does not fill": (5000, remote.manifest(5000, [(digest(data), 4000)], [(pack, 0, 4000, 0)])),
        "entry lies": (1 << 50, remote.manifest(4000, [(digest(data), 4000)], [(pack, 0, 4000, 0)])),
        "right": (4000, remote.manifest(4000, [(digest(data), 4000)], [(pack, 0, 4000, 0)])),
    }
    remote.head(remote.tree([
        entry(name, ident(60 + number), manifest=manifest, size=size)
        for number, (name, (size, manifest)) in enumerate(sorted(files.items()))
    ]))  # fmt: skip
    site.mount("--remote", remote.url, "--lag", "100ms")
    site.status()
    for name in files:
        try:
            with open(site.mountpoint / name, "rb") as file:
                found = file.read(8 * MIB)
        except OSError:
            assert name not in ("right", "entry lies"), name
        else:
            assert found in (data, bytes(8 * MIB)), name
            assert (found == data) == (name in ("right", "entry lies")), name
    assert sum(path.stat().st_blocks * 512 for path in (site.store / "images").rglob("*")) < 80 * MIB
    assert peak_bytes(site.pid()) < 500 * MIB
    assert pack_key(bytes.fromhex(pack)) in site.log()  # type: ignore[arg-type]
    saves(site)
    # Bytes that are here should be in a pack of which nobody can make sense, until they were sent again.
    assert site.run("umount", str(site.mountpoint)).status in (0, 3)


@pytest.mark.parametrize("where", ["head", "entry"])
def test_stamps_of_the_far_future_do_not_stop_the_clock(remote: HostileRemote, site: Site, where: str) -> None:
    """The greatest stamp that a number can hold is refused: else no stamp of ours could come after it."""
    good = remote.file(b"good")
    most = (1 << 63) - 1
    of_entry = {"changed": most} if where == "entry" else {}
    tree = remote.tree([entry("f", ident(80), manifest=good, size=4, **of_entry)])
    remote.head(tree, **({"stamp": most} if where == "head" else {}))
    site.mount("--remote", remote.url, "--lag", "100ms")
    for each in range(3):
        (site.mountpoint / "mine").write_bytes(b"x" * 100)
        (site.mountpoint / "mine").rename(site.mountpoint / f"yours-{each}")
    site.umount("--no-wait", status=3)
    site.mount("--offline")
    assert (site.mountpoint / "yours-2").read_bytes() == b"x" * 100
    (site.mountpoint / "more").write_bytes(b"x" * 100)
    site.umount("--no-wait", status=3)


def test_heads_that_contradict_each_other(remote: HostileRemote, site: Site) -> None:
    """Garbage among the heads, one of another key, vectors that claim our future: left out or followed, never fatal."""
    remote.head(remote.tree([entry("f", ident(90), manifest=remote.file(b"good"), size=4)]),
                vector={"ab" * 16: (1 << 63) - 1})  # fmt: skip
    heads = remote.directory / "heads"
    (heads / ("99" * 16)).mkdir()
    (heads / ("99" * 16) / "fffffffffffffffe").write_bytes(os.urandom(100))
    (heads / ("98" * 16)).mkdir()
    (heads / ("98" * 16) / "0000000000000001").write_bytes(next(heads.rglob("ffff*")).read_bytes())
    (heads / "no writer").mkdir()
    (heads / "no writer" / "x").write_bytes(b"")
    site.mount("--remote", remote.url, "--lag", "100ms")
    saves(site)
    assert (site.mountpoint / "f").read_bytes() == b"good"
    site.umount()


@pytest.mark.parametrize("writers", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_heads_of_thousands_of_writers(remote: HostileRemote, site: Site, writers: int) -> None:
    """So many heads, none of which another covers, hold up no mount and take little memory; saving goes on."""
    root = remote.tree([entry("f", ident(90), manifest=remote.file(b"good"), size=4)])
    for number in range(writers):
        remote.head(root, writer=f"{number:032x}")
    began = time.monotonic()
    site.mount("--remote", remote.url, "--lag", "100ms")
    assert (site.mountpoint / "f").read_bytes() == b"good"
    saves(site)
    assert time.monotonic() - began < 60
    assert peak_bytes(site.pid()) < 200 * MIB
    site.umount()
