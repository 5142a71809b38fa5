"""Packs that are damaged or gone on the remote: once a reader missed something, nothing is told or done as if it were
there, and what is here is sent again."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfs.encoding.keys import pack_key
from ckptfs.local.store import Store
from tests.support.damage import flip, image_of, objects
from tests.support.disks import filled, small_disk
from tests.support.mounts import TINY, Site, until

pytestmark = pytest.mark.timeout(120)

FAST = ("--settle", "100ms", "--lag", "100ms")
SIZE, MIB = 6000, 1 << 20


@dataclass
class Pair:
    """Two machines with one remote in a directory."""

    near: Site
    far: Site
    remote: Path

    @property
    def url(self) -> str:
        return f"file://{self.remote}"

    def save(self, **files: bytes) -> None:
        """Save *files* on the near machine, wait until they are published, and unmount it."""
        self.near.mount("--remote", self.url, *FAST)
        (self.near.mountpoint / "run").mkdir()
        for name, data in files.items():
            (self.near.mountpoint / "run" / name).write_bytes(data)
        self.near.umount()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    remote = tmp_path / "remote"
    remote.mkdir()
    slow = {**TINY, "retry_most_s": 4}  # to see what is told before it is looked at again
    with Site(tmp_path, name="near", tuning=TINY) as near, Site(tmp_path, name="far", tuning=slow) as far:
        yield Pair(near, far, remote)


def scrub(site: Site, *options: str, status: int) -> dict[str, Any]:
    done = site.run("scrub", str(site.mountpoint), "--remote", "--json", *options)
    assert done.status == status, done.said
    report: dict[str, Any] = json.loads(done.out)
    return report


def fails_to_read(path: Path) -> None:
    with pytest.raises(OSError) as raised:
        path.read_bytes()
    assert raised.value.errno == errno.EIO


def heals_every(site: Site, seconds: float) -> None:
    """From the next mount on, packs in doubt are looked at so long after they were missed."""
    path = site.store / "settings.json"
    settings = json.loads(path.read_text())
    settings["tuning"]["retry_most_s"] = seconds
    path.write_text(json.dumps(settings))


def state(path: Path) -> str:
    return os.getxattr(path, "user.ckptfs.state").decode()


def damaged(site: Site) -> list[str]:
    return [each["object"] for each in site.status()["damaged"]]


def test_what_is_here_and_not_in_its_pack_any_more(pair: Pair, tmp_path: Path) -> None:
    """It is not called safe until it was sent again, unaided; what is lost is told until the pack is back."""
    kept, lost = os.urandom(SIZE), os.urandom(SIZE)
    pair.save(kept=kept, lost=lost)
    (pack,) = objects(pair.remote, "packs")
    body, top = pack.read_bytes(), pair.far.mountpoint / "run"
    heals_every(pair.far, 3600)
    pair.far.mount("--remote", pair.url, *FAST)
    assert (top / "kept").read_bytes() == kept
    pack.unlink()
    assert pair.far.status()["safe"], "nobody noticed"
    fails_to_read(top / "lost")
    until(lambda: not pair.far.status()["safe"], "it to be recorded what is here", 5)
    status = pair.far.status()
    assert [each["object"] for each in status["damaged"]] == [f"packs/{pack.parent.name}/{pack.name}"]
    assert status["newest_safe_set"] is None and pack.name in status["last_error"]
    assert (top / "kept").read_bytes() == kept
    assert pack.name in pair.far.status()["last_error"], "other reads say nothing of it"
    told = pair.far.run("status", str(top)).out
    assert pack.name in told and "scrub --remote" in told and "nothing would be lost" not in told
    assert [state(top / name) for name in ("kept", "lost")] == ["sealed", "sealed"]
    waited = pair.far.run("wait", str(top / "lost"), "--timeout", "30s")
    assert waited.status == 1 and "scrub --remote" in waited.err, waited.said
    assert pair.far.run("wait", str(top / "kept"), "--timeout", "10ms").status == 3
    assert "scrub --remote" in pair.far.umount(status=3).out
    heals_every(pair.far, 10)
    pair.far.mount()
    assert not pair.far.status()["safe"], "it was forgotten"
    assert pair.far.run("wait", str(top / "kept"), "--timeout", "60s").status == 0
    assert pair.far.status()["safe"] and state(top / "kept") != "sealed"
    assert pack.name in damaged(pair.far)[0]
    pair.far.umount()
    with Site(tmp_path, name="third", tuning=TINY) as third:
        third.mount("--remote", pair.url, "--read-only")
        assert (third.mountpoint / "run" / "kept").read_bytes() == kept
        fails_to_read(third.mountpoint / "run" / "lost")
        assert third.status()["safe"], "what is lost has nothing to do with this machine"
        third.umount()
    pair.far.mount()
    assert pack.name in damaged(pair.far)[0]
    pack.write_bytes(body)
    until(lambda: damaged(pair.far) == [], "the pack to be looked at again", 60)
    assert pair.far.status()["newest_safe_set"] is not None and (top / "lost").read_bytes() == lost
    pair.far.umount()


def test_a_pack_is_made_anew(pair: Pair) -> None:
    """By whoever has all that should be in it: byte for byte, and nothing is in doubt for anybody."""
    kept, other = os.urandom(SIZE), os.urandom(SIZE)
    pair.save(kept=kept, other=other)
    (pack,) = objects(pair.remote, "packs")
    body = pack.read_bytes()
    pair.near.mount()
    pair.far.mount("--remote", pair.url, *FAST)
    flip(pack, body.find(other[:100]) + 10)
    fails_to_read(pair.far.mountpoint / "run" / "other")
    assert len(damaged(pair.far)) == 1
    assert scrub(pair.far, status=3)["lost"] == ["/run/other"]
    report = scrub(pair.near, status=0)
    assert [each["state"] for each in report["findings"]] == ["repaired"] and pack.read_bytes() == body
    until(lambda: damaged(pair.far) == [], "the pack to be looked at again", 60)
    assert (pair.far.mountpoint / "run" / "other").read_bytes() == other
    pair.near.umount()
    pair.far.umount()


def test_a_reader_that_has_the_bytes_elsewhere_heals_the_pack(pair: Pair) -> None:
    """Nobody asks for anything: the pack is as it was before, a little later."""
    data = os.urandom(SIZE)
    pair.save(one=data)
    (pack,) = objects(pair.remote, "packs")
    body = pack.read_bytes()
    pair.far.mount("--remote", pair.url, *FAST)
    pack.unlink()
    fails_to_read(pair.far.mountpoint / "run" / "one")
    (pair.far.mountpoint / "run" / "two").write_bytes(data)
    assert not pair.far.status()["safe"] or pack.exists()
    until(lambda: pack.exists() and damaged(pair.far) == [], "the pack to be made anew")
    assert pack.read_bytes() == body and (pair.far.mountpoint / "run" / "one").read_bytes() == data
    pair.far.umount()


def third_reads(tmp_path: Path, pair: Pair, name: str) -> bytes | None:
    """What a machine without anything reads; None for EIO."""
    with Site(tmp_path, name="third", tuning=TINY) as third:
        third.mount("--remote", pair.url, "--read-only")
        try:
            return (third.mountpoint / "run" / name).read_bytes()
        except OSError as error:
            assert error.errno == errno.EIO
            return None


def test_a_save_that_is_said_to_be_there_already_stays_until_it_is(pair: Pair, tmp_path: Path) -> None:
    """Equal bytes of another machine are not sent again; but before they go from here their packs are asked for, and
    one that is gone is made anew."""
    data = os.urandom(SIZE)
    pair.save(theirs=data)
    (pack,) = objects(pair.remote, "packs")
    pack.unlink()
    top = pair.far.mountpoint
    pair.far.mount("--remote", pair.url, "--evict-after", "1s", *FAST)
    (top / "run" / "mine").write_bytes(data)
    (top / "newer").mkdir()
    (top / "newer" / "other").write_bytes(os.urandom(SIZE))
    until(pack.exists, "the pack to be made anew", 60)
    until(lambda: damaged(pair.far) == [], "the doubt to end")
    assert (top / "run" / "mine").read_bytes() == data
    pair.far.umount()
    assert third_reads(tmp_path, pair, "mine") == third_reads(tmp_path, pair, "theirs") == data


def test_waiting_for_verified_finds_what_is_missing(pair: Pair) -> None:
    """Without any reader: a pack that is not as it should be is in doubt, and healed."""
    data = os.urandom(SIZE)
    pair.save(theirs=data)
    (pack,) = objects(pair.remote, "packs")
    pack.unlink()
    pair.far.mount("--remote", pair.url, *FAST)
    path = pair.far.mountpoint / "run" / "mine"
    path.write_bytes(data)
    assert pair.far.run("wait", str(path), "--for", "verified", "--timeout", "60s").status == 0
    assert pack.exists()
    pair.far.umount()


def test_what_was_given_up_once_can_be_missed_again(pair: Pair) -> None:
    """A pack of which a part is needed no more is not trusted for the rest for ever."""
    parts = {name: os.urandom(SIZE) for name in "abc"}
    pair.save(**parts)
    (pack,) = objects(pair.remote, "packs")
    top = pair.far.mountpoint / "run"
    pair.far.mount("--remote", pair.url, *FAST)
    assert (top / "b").read_bytes() == parts["b"]
    flip(pack, pack.read_bytes().find(parts["a"][:100]) + 10)
    fails_to_read(top / "a")
    (top / "a").unlink()
    until(lambda: damaged(pair.far) == [], "it to be forgotten")
    pack.unlink()
    fails_to_read(top / "c")
    assert len(damaged(pair.far)) == 1 and not pair.far.status()["safe"]
    pair.far.umount(status=3)


def test_a_file_of_which_another_has_the_bytes_is_not_forgotten(pair: Pair, tmp_path: Path) -> None:
    """What the pack lost is here, so it is brought here whole, and both are published anew, unaided."""
    parts = {name: os.urandom(SIZE) for name in "ab"}
    pair.save(**parts)
    (pack,) = objects(pair.remote, "packs")
    top = pair.far.mountpoint / "run"
    pair.far.mount("--remote", pair.url, *FAST)
    pack.unlink()
    fails_to_read(top / "a")
    (top / "again").write_bytes(parts["a"])
    assert pair.far.run("wait", str(top / "again"), "--timeout", "60s").status == 0
    report = scrub(pair.far, status=3)
    assert report["lost"] == ["/run/b"] and len(damaged(pair.far)) == 1
    assert pair.far.status()["safe"]
    pair.far.umount()
    assert third_reads(tmp_path, pair, "a") == third_reads(tmp_path, pair, "again") == parts["a"]
    assert third_reads(tmp_path, pair, "b") is None


def test_a_file_that_does_not_fit_here_keeps_its_pack_in_doubt(pair: Pair, tmp_path: Path) -> None:
    """It cannot be published anew; what was saved again stays unsafe, and is told so, until nothing else is needed."""
    (pair.near.store / "settings.json").unlink()  # chunks of a MiB
    first, rest = (np.frombuffer(os.urandom(size * MIB), np.uint8) for size in (2, 90))
    with small_disk(tmp_path, 100) as disk:
        pair.far.store = disk / "store"
        pair.far.store.mkdir()
        (pair.far.store / "settings.json").write_text(json.dumps({"tuning": {"retry_most_s": 2}}))
        pair.near.mount("--remote", pair.url, *FAST)
        np.savez(pair.near.mountpoint / "large.npz", first=first)
        assert pair.near.run("wait", str(pair.near.mountpoint)).status == 0
        (pack,) = objects(pair.remote, "packs")
        np.savez(pair.near.mountpoint / "large.npz", first=first, rest=rest)
        pair.near.umount()
        top = pair.far.mountpoint
        pair.far.mount("--remote", pair.url, *FAST)
        pack.unlink()
        fails_to_read(top / "large.npz")
        np.savez(top / "again.npz", first=first)
        report = scrub(pair.far, status=3)
        assert report["lost"] == ["/large.npz"] and "make room" in report["findings"][0]["repair"]
        assert pair.far.run("wait", str(top / "again.npz"), "--timeout", "10s").status == 3
        assert not pair.far.status()["safe"]
        (top / "large.npz").unlink()
        assert pair.far.run("wait", str(top / "again.npz"), "--timeout", "60s").status == 0
        assert pair.far.status()["safe"]
        pair.far.umount()


def test_a_machine_that_has_nothing_finds_a_rotated_series_sound(pair: Pair) -> None:
    """Deltas that no file needs any more are against checkpoints that are gone: that is no damage."""
    settings = pair.near.store / "settings.json"
    settings.write_text(json.dumps({"tuning": {**TINY, "piece_bytes": 1 << 20, "pack_bytes": 1 << 20}}))
    weights = np.random.default_rng(3).normal(size=(80, 100)).astype(np.float32)
    top = pair.near.mountpoint
    pair.near.mount("--remote", pair.url, *FAST)
    for step in range(4):
        for name in ("model", "other"):
            (top / f"step-{step}").mkdir(exist_ok=True)
            np.save(top / f"step-{step}" / f"{name}.npy", weights * np.float32(1 + 1e-4 * step + (name == "other")))
        assert pair.near.run("wait", str(top)).status == 0
    for step in range(3):
        shutil.rmtree(top / f"step-{step}")
    (top / "step-3" / "model.npy").unlink()
    pair.near.umount()
    pair.far.mount("--remote", pair.url, *FAST)
    assert scrub(pair.far, status=0)["findings"] == []
    assert pair.far.run("wait", str(pair.far.mountpoint), "--for", "verified", "--timeout", "30s").status == 0
    assert damaged(pair.far) == []
    pair.far.umount()


def test_what_is_damaged_keeps_nothing_else_from_being_fetched(pair: Pair) -> None:
    """`prefetch` names it, and what mends it; all others are here afterwards."""
    saved = {name: os.urandom(SIZE) for name in "abcdefgh"}
    pair.save(**saved)
    (pack,) = (each for each in objects(pair.remote, "packs") if saved["b"][:100] in each.read_bytes())
    flip(pack, pack.read_bytes().find(saved["b"][:100]) + 10)
    heals_every(pair.far, 3600)
    pair.far.mount("--remote", pair.url, *FAST)
    done = pair.far.run("prefetch", str(pair.far.mountpoint))
    assert done.status == 1 and "/run/b: " in done.err and "scrub --remote" in done.err, done.said
    assert pack.name in done.err and "/run/a" not in done.err
    pair.remote.rename(pair.remote.with_name("away"))
    for name in saved.keys() - {"b"}:
        assert (pair.far.mountpoint / "run" / name).read_bytes() == saved[name]
    pair.remote.with_name("away").rename(pair.remote)
    pair.far.umount(status=3)


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_manifest_that_cannot_be_read(pair: Pair, damage: str) -> None:
    """Its file is not called replicated by who noticed; that is over, unaided, when the object is back."""
    pair.save(**{name: os.urandom(10 * SIZE) for name in "ab"})
    path = objects(pair.remote, "manifests")[0]
    body = path.read_bytes()
    pair.far.mount("--remote", pair.url, *FAST)
    top = pair.far.mountpoint / "run"
    if damage == "remove":
        path.unlink()
    else:
        flip(path, len(body) // 2)
    good, bad = (top / "b", top / "a") if can_be_read(top / "b") else (top / "a", top / "b")
    assert can_be_read(good) and not can_be_read(bad)
    status = pair.far.status()
    assert [each["object"] for each in status["damaged"]] == [str(path.relative_to(pair.remote))]
    assert status["newest_safe_set"] is None and status["safe"], "nothing of it is on this machine"
    assert (state(good), state(bad), state(top)) == ("replicated", "sealed", "sealed")
    waited = pair.far.run("wait", str(bad), "--timeout", "30s")
    assert waited.status == 1 and "scrub --remote" in waited.err, waited.said
    path.write_bytes(body)
    until(lambda: damaged(pair.far) == [], "it to be looked at again")
    assert state(top) == "replicated" and can_be_read(bad)
    pair.far.umount()


def test_a_directory_that_cannot_be_listed(pair: Pair) -> None:
    """Nor is it called replicated by who noticed, nor what is above it, until its tree is back."""
    pair.save(**{f"file-{number}": b"%d" % number for number in range(30)})
    pair.far.mount("--remote", pair.url, *FAST)
    top = pair.far.mountpoint / "run"
    assert os.listdir(pair.far.mountpoint) == ["run"]
    trees = {path: path.read_bytes() for path in objects(pair.remote, "trees")}
    for path in trees:
        path.unlink()
    with pytest.raises(OSError, match="Input/output"):
        os.listdir(top)
    status = pair.far.status()
    assert [each["object"] for each in status["damaged"]] == ["the tree of /run"]
    assert status["newest_safe_set"] is None and status["safe"], "nothing of it is on this machine"
    assert status["state"] == "sealed" and state(top) == "sealed"
    waited = pair.far.run("wait", str(top), "--timeout", "30s")
    assert waited.status == 1 and "scrub --remote" in waited.err, waited.said
    for path, body in trees.items():
        path.write_bytes(body)
    until(lambda: damaged(pair.far) == [], "it to be looked at again")
    assert state(pair.far.mountpoint) != "sealed" and len(os.listdir(top)) == 30
    pair.far.umount()


def can_be_read(path: Path) -> bool:
    try:
        return len(path.read_bytes()) > 0
    except OSError as error:
        assert error.errno == errno.EIO
        return False


def test_what_nobody_needs_is_not_missed(pair: Pair) -> None:
    """Once the files are deleted that lost something, nothing is in doubt."""
    pair.save(one=os.urandom(SIZE))
    (pack,) = objects(pair.remote, "packs")
    pair.far.mount("--remote", pair.url, *FAST)
    pack.unlink()
    fails_to_read(pair.far.mountpoint / "run" / "one")
    assert len(damaged(pair.far)) == 1
    (pair.far.mountpoint / "run" / "one").unlink()
    until(lambda: damaged(pair.far) == [], "it to be forgotten")
    pair.far.umount()


def test_what_a_pack_in_doubt_has_is_not_evicted(pair: Pair, tmp_path: Path) -> None:
    """A disk is so full that everything should make way: what is safe does; what may be nowhere else stays."""
    (pair.near.store / "settings.json").unlink()  # one pack for all of a directory
    kept, safe = os.urandom(8 * MIB), [os.urandom(10 * MIB) for _ in range(3)]
    pair.save(kept=kept, lost=os.urandom(SIZE))
    (pack,) = objects(pair.remote, "packs")
    pair.near.mount()
    for number, data in enumerate(safe):
        (pair.near.mountpoint / f"safe-{number}").write_bytes(data)
    pair.near.umount()
    with small_disk(tmp_path, 200) as disk:
        pair.far.store = disk / "store"
        pair.far.store.mkdir()
        rarely = {"tuning": {"retry_most_s": 3600}}  # healing would send it again, and it could go
        (pair.far.store / "settings.json").write_text(json.dumps(rarely))
        pair.far.mount("--remote", pair.url, *FAST)
        files = {pair.far.mountpoint / f"safe-{number}": data for number, data in enumerate(safe)}
        files[pair.far.mountpoint / "run" / "kept"] = kept
        assert all(path.read_bytes() == data for path, data in files.items())
        assert all(is_local(pair.far, path) for path in files)
        pack.unlink()
        fails_to_read(pair.far.mountpoint / "run" / "lost")
        until(lambda: not pair.far.status()["safe"], "it to be recorded what is here", 10)
        with filled(disk, leaving=4 * MIB):
            for number in range(4):  # each waits for room
                (pair.far.mountpoint / f"saved-{number}").write_bytes(os.urandom(10_000))
            until(lambda: [is_local(pair.far, path) for path in files] == [False] * 3 + [True], "what is safe to go")
        assert all(path.read_bytes() == data for path, data in files.items())
        pair.far.umount(status=3)


def is_local(site: Site, path: Path) -> bool:
    """Whether the site's disk holds bytes of the file."""
    try:
        return image_of(site.store, path.name).stat().st_blocks > 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_what_deltas_are_against_is_damaged(pair: Pair, damage: str) -> None:
    """That pack is named, by the log and by scrub, with all files that need it; the packs of the deltas are not."""
    settings = pair.near.store / "settings.json"  # pieces as long as those that become differences
    settings.write_text(json.dumps({"tuning": {**TINY, "piece_bytes": 1 << 20}}))
    weights = np.random.default_rng(3).normal(size=(80, 100)).astype(np.float32)
    pair.near.mount("--remote", pair.url, *FAST)
    for step in range(3):
        (pair.near.mountpoint / f"step-{step}").mkdir()
        np.save(pair.near.mountpoint / f"step-{step}" / "model.npy", weights * np.float32(1 + 1e-4 * step))
        assert pair.near.run("wait", str(pair.near.mountpoint)).status == 0
    pair.near.umount()
    store = Store.open(pair.near.store)
    rows = store.catalog.db.execute(
        "SELECT DISTINCT pack.name FROM packed JOIN pack ON pack.id = packed.pack"
        " WHERE packed.chunk IN (SELECT base FROM packed WHERE base IS NOT NULL)"
    ).fetchall()
    deltas = store.catalog.db.execute(
        "SELECT DISTINCT pack.name FROM packed JOIN pack ON pack.id = packed.pack WHERE packed.base IS NOT NULL"
    ).fetchall()
    (base,), others = (pack_key(row[0]) for row in rows), [pack_key(row[0]) for row in deltas]
    store.close()
    assert len(others) == 2, "nothing was sent as a difference"
    path = pair.remote / base
    body = path.read_bytes()
    pair.far.mount("--remote", pair.url, *FAST)
    if damage == "remove":
        path.unlink()
    else:
        flip(path, len(body) // 2)
    files = sorted(f"/step-{step}/model.npy" for step in range(3))
    for name in files:
        fails_to_read(Path(f"{pair.far.mountpoint}{name}"))
    assert damaged(pair.far) == [base]
    log = pair.far.log()
    assert base in log and not any(other in log for other in others)
    report = scrub(pair.far, status=3)
    assert [each["where"] for each in report["findings"]] == [base], report["findings"]
    assert report["lost"] == files
    path.write_bytes(body)
    report = scrub(pair.far, status=0)
    assert report["findings"] == [] and damaged(pair.far) == []
    pair.far.umount()
