"""`ckptfs scrub`: damage here is mended from the remote, damage there from here, and what is lost is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfs.client import ask
from ckptfs.engine import Engine
from ckptfs.repair.findings import Report
from ckptfs.repair.pace import Scrubbing
from ckptfs.repair.scrub import ScrubOptions
from ckptfs_mount.unmounted import work_on
from tests.support.consistency import problems
from tests.support.damage import flip, image_of, objects
from tests.support.mounts import TINY, Site
from tests.support.publishing import restore

pytestmark = pytest.mark.timeout(120)

SIZE = 40_000
KILLS = int(os.environ.get("CKPTFS_TEST_KILLS", "3"))
"""How often a repair is killed; more when asked."""


@dataclass
class Saved:
    """A store that was mounted, filled, published and unmounted, its remote, and what was saved."""

    site: Site
    remote: Path
    content: dict[str, bytes]

    @property
    def url(self) -> str:
        return f"file://{self.remote}"

    def scrub(self, *options: str, status: int = 0, path: Path | None = None) -> dict[str, Any]:
        done = self.site.run("scrub", str(path or self.site.store), "--json", *options)
        assert done.status == status, done.said
        report: dict[str, Any] = json.loads(done.out)
        return report

    def check(self) -> None:
        """Everything reads as it was saved, from the mount and from the remote alone."""
        self.site.mount()
        for name, data in self.content.items():
            assert (self.site.mountpoint / name).read_bytes() == data, name
        self.site.umount()
        assert problems(self.site.store) == []


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    directory = tmp_path_factory.mktemp("saved")
    remote = directory / "remote"
    remote.mkdir()
    random = np.random.default_rng(7)
    content = {f"run/step-{number}/model.bin": random.bytes(SIZE) for number in range(2)}
    content["run/weights.npy"] = b""
    content |= {f"run/many/file-{number}": random.bytes(700) for number in range(12)}
    with Site(directory, tuning=TINY) as site:
        site.mount("--remote", f"file://{remote}", "--settle", "100ms")
        for name, data in content.items():
            (site.mountpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (site.mountpoint / name).write_bytes(data)
        weights = site.mountpoint / "run/weights.npy"
        np.save(weights, random.normal(size=(90, 90)).astype(np.float32))
        content["run/weights.npy"] = weights.read_bytes()
        site.umount()
        yield Saved(site, remote, content)


@pytest.fixture
def saved(original: Saved, tmp_path: Path) -> Iterator[Saved]:
    with copied(original, tmp_path) as copy:
        yield copy


@contextmanager
def copied(original: Saved, directory: Path) -> Iterator[Saved]:
    """A copy of the store and remote, to be damaged: the daemon takes it for the same machine's by its settings."""
    with Site(directory, tuning=None) as site:
        shutil.copytree(original.site.store, site.store, symlinks=True)
        remote = directory / "remote"
        shutil.copytree(original.remote, remote)
        settings = json.loads((site.store / "settings.json").read_text())
        settings["remote"] = f"file://{remote}"
        (site.store / "settings.json").write_text(json.dumps(settings))
        yield Saved(site, remote, original.content)


def test_a_sound_store_is_said_to_be_so(saved: Saved) -> None:
    """Nothing is found, everything was looked at, and nothing changes here or there."""
    report = saved.scrub("--remote")
    assert report["sound"] and report["findings"] == [] and report["lost"] == []
    assert report["files"] == len(saved.content)
    assert report["bytes"] == sum(map(len, saved.content.values()))
    assert report["packs"] == len(objects(saved.remote, "packs"))
    done = saved.site.run("scrub", str(saved.site.store))
    assert done.status == 0 and "everything is as it was saved" in done.out
    saved.check()


def test_damage_here_is_mended_from_the_remote(saved: Saved) -> None:
    """A flipped byte and a cut-off end: named with their place and tensor, put back, and gone the second time."""
    flip(image_of(saved.site.store, "weights.npy"), 20_000)
    model = image_of(saved.site.store, "model.bin")
    with open(model, "r+b") as file:
        file.truncate(SIZE - 9000)
    told = saved.scrub("--no-repair", status=3)
    assert {each["state"] for each in told["findings"]} == {"found"}
    report = saved.scrub()
    assert [each["state"] for each in report["findings"]] == ["repaired", "repaired"]
    assert ["/run/weights.npy"] in [each["paths"] for each in report["findings"]]
    assert any("16," in each["what"] for each in report["findings"])
    assert saved.scrub()["findings"] == []
    saved.check()


@pytest.mark.slow
def test_an_image_that_is_gone_is_fetched_again(saved: Saved) -> None:
    """The file is read from the remote from then on."""
    image_of(saved.site.store, "weights.npy").unlink()
    done = saved.site.run("scrub", str(saved.site.store), "--json")
    assert done.status == 0, done.said  # opening the store has seen it already
    saved.check()


def test_something_else_in_the_place_of_an_image(saved: Saved) -> None:
    """A directory there counts as the image being gone, for whoever reads, checks, mends or mounts."""
    path, model = saved.site.mountpoint / "run/weights.npy", saved.site.mountpoint / "run/step-0/model.bin"
    images = [image_of(saved.site.store, "weights.npy"), image_of(saved.site.store, "model.bin")]
    for image in images:
        image.unlink()
        image.mkdir()
    saved.site.mount()  # opening the store saw it
    assert path.read_bytes() == saved.content["run/weights.npy"]
    saved.site.umount()
    saved.site.mount()
    image = image_of(saved.site.store, "weights.npy")
    image.unlink()
    with pytest.raises(OSError, match="Input/output"):
        path.read_bytes()
    assert "ckptfs scrub" in saved.site.log()
    image.mkdir()
    with pytest.raises(OSError, match="Input/output"):
        path.read_bytes()
    assert path.stat().st_size == len(saved.content["run/weights.npy"])
    report = saved.scrub(path=path)
    assert [(each["what"], each["state"]) for each in report["findings"]] == [
        ("its file is gone from images/", "repaired")
    ]
    assert path.read_bytes() == saved.content["run/weights.npy"]
    assert model.read_bytes() == saved.content["run/step-0/model.bin"]
    saved.site.umount()
    done = saved.site.run("fsck", str(saved.site.store), "--repair")
    assert done.status == 0, done.said
    saved.check()


@pytest.mark.parametrize("mounted", [True, False], ids=["mounted", "store"])
def test_trees_that_are_gone_after_files_were_read(saved: Saved, mounted: bool) -> None:
    """Their atimes moved, so that the very trees cannot be made: what the directories hold is published anew."""
    saved.site.mount("--settle", "100ms")
    for name in saved.content:
        path = saved.site.mountpoint / name
        os.utime(path, ns=(1, path.stat().st_mtime_ns))
    assert saved.site.run("wait", str(saved.site.mountpoint)).status == 0
    for name in saved.content:
        (saved.site.mountpoint / name).read_bytes()
    time.sleep(1)  # atimes are noted a moment later
    if not mounted:
        saved.site.umount()
    for path in objects(saved.remote, "trees"):
        path.unlink()
    report = saved.scrub("--remote", path=saved.site.mountpoint if mounted else None)
    assert "published anew" in str(report["findings"])
    assert {each["state"] for each in report["findings"]} == {"repaired"}
    if not mounted:
        saved.site.mount()
    assert saved.site.run("wait", str(saved.site.mountpoint), "--timeout", "30s").status == 0
    saved.site.umount()
    assert saved.scrub("--remote")["findings"] == []
    with Site(saved.remote.parent, name="fresh", tuning=TINY) as fresh:
        fresh.mount("--remote", saved.url, "--read-only")
        assert {name: (fresh.mountpoint / name).read_bytes() for name in saved.content} == saved.content
        fresh.umount()


def test_an_object_that_the_remote_does_not_give(saved: Saved) -> None:
    """Of each kind one cannot be read, for another reason than being gone: told, and all others are looked at."""
    away = saved.remote.with_name("away")
    needed, unread = [], [str(objects(saved.remote, "heads")[0].relative_to(saved.remote))]
    for kind in ("packs", "manifests", "trees"):
        (saved.remote / kind).rename(away)
        found = saved.scrub("--remote", "--no-repair", status=3)["findings"]
        some = sorted(each["where"] for each in found if each["where"].startswith(f"{kind}/"))
        needed += some
        unread.append(some[0])
        away.rename(saved.remote / kind)
    kept = {where: (saved.remote / where).read_bytes() for where in unread}
    for where in unread:
        (saved.remote / where).unlink()
        (saved.remote / where).symlink_to(os.path.basename(where))
    others = [where for where in needed if where not in unread]
    for where in others:
        flip(saved.remote / where, 5)
    found = saved.scrub("--remote", status=3)["findings"]
    assert sorted(each["where"] for each in found if "it cannot be read" in each["what"]) == sorted(unread)
    assert {each["where"]: each["state"] for each in found if each["where"] in others} == dict.fromkeys(
        others, "repaired"
    )
    for where, data in kept.items():
        (saved.remote / where).unlink()
        (saved.remote / where).write_bytes(data)
    assert saved.scrub("--remote")["findings"] == []


def test_damage_under_a_mount_is_mended_while_it_serves(saved: Saved) -> None:
    """The daemon scrubs beside everything else; what is open is mended once it is closed."""
    saved.site.mount()
    path = saved.site.mountpoint / "run/weights.npy"
    image = image_of(saved.site.store, "weights.npy")
    with open(path, "rb"):
        flip(image, 9000)
        report = saved.scrub("--no-repair", path=path, status=3)
        assert report["files"] == 1
        report = saved.scrub(path=path, status=3)
        assert "close it and scrub again" in report["findings"][0]["repair"]
    assert saved.scrub(path=saved.site.mountpoint / "run")["findings"][0]["state"] == "repaired"
    assert path.read_bytes() == saved.content["run/weights.npy"]
    assert "are not what was sealed" in saved.site.log()
    saved.site.umount()
    saved.check()


def test_damage_on_the_remote_is_mended_from_here(saved: Saved, tmp_path: Path) -> None:
    """Of each kind one object damaged and others gone: all are put again as they were, and a restore needs no more."""
    kinds = [objects(saved.remote, kind) for kind in ("packs", "manifests", "trees", "heads")]
    before = {path: path.read_bytes() for paths in kinds for path in paths}
    for paths in kinds:
        flip(paths[0], len(before[paths[0]]) // 2)
        for path in paths[1::2]:
            path.unlink()
    assert saved.scrub("--remote", "--no-repair", status=3)["findings"]
    report = saved.scrub("--remote")
    assert {each["state"] for each in report["findings"]} == {"repaired"}
    assert {path: path.read_bytes() for path in before} == before
    assert saved.scrub("--remote")["findings"] == []
    restored = restore(saved.remote, tmp_path / "restored")
    assert {name: restored[name] for name in saved.content} == saved.content


def test_what_nobody_has_any_more_is_lost_and_named(saved: Saved, tmp_path: Path) -> None:
    """The same bytes damaged here and there: exit status 3, the one file is named, everything else stays sound."""
    flip(image_of(saved.site.store, "file-3"), 300)
    damaged = [path for path in objects(saved.remote, "packs")]
    for path in damaged:
        path.unlink()
    report = saved.scrub("--remote", status=3)
    assert report["lost"] == ["/run/many/file-3"]
    assert saved.scrub("--remote", status=3)["lost"] == ["/run/many/file-3"]
    saved.site.mount()
    for name, data in saved.content.items():
        if not name.endswith("file-3"):
            assert (saved.site.mountpoint / name).read_bytes() == data
    saved.site.umount()
    with Site(tmp_path, name="elsewhere", tuning=TINY) as elsewhere:  # what shared a pack with it was sent again
        elsewhere.mount("--remote", saved.url, "--read-only")
        for name, data in saved.content.items():
            if not name.endswith("file-3"):
                assert (elsewhere.mountpoint / name).read_bytes() == data
        with pytest.raises(OSError, match="Input/output"):
            (elsewhere.mountpoint / "run/many/file-3").read_bytes()
        elsewhere.umount()


@pytest.mark.slow
def test_without_a_remote_other_files_help(site: Site) -> None:
    """A store alone: what another file has is put back, what nobody has is lost and stays as it is."""
    shared, alone = np.random.default_rng(1).bytes(SIZE), np.random.default_rng(2).bytes(SIZE)
    site.mount()
    (site.mountpoint / "one").write_bytes(shared)
    (site.mountpoint / "two").write_bytes(shared)
    (site.mountpoint / "alone").write_bytes(alone)
    assert site.run("wait", str(site.mountpoint), "--for", "sealed").status == 0
    site.umount()
    flip(image_of(site.store, "one"), 100)
    flip(image_of(site.store, "alone"), 100)
    done = site.run("scrub", str(site.mountpoint), "--json")
    assert done.status == 3, done.said
    assert json.loads(done.out)["lost"] == ["/alone"]
    site.mount()
    assert (site.mountpoint / "one").read_bytes() == shared
    assert len((site.mountpoint / "alone").read_bytes()) == SIZE
    site.umount()


def test_what_cannot_be_scrubbed_is_said(site: Site, tmp_path: Path) -> None:
    """No store and no mount, a wrong share, no remote: one line each."""
    done = site.run("scrub", str(tmp_path))
    assert done.status == 1 and "neither in a ckptfs mount, nor a store" in done.err
    assert site.run("scrub", str(tmp_path), "--sample", "2").status == 2
    site.mount()
    done = site.run("scrub", "--remote", str(site.mountpoint))
    assert done.status == 1 and "no remote" in done.err
    site.umount()


def test_a_share_is_looked_at(site: Site) -> None:
    """Of 400 files some 40, others each time; a share of all is all."""
    site.mount()
    for number in range(400):
        (site.mountpoint / str(number)).write_bytes(b"%d" % number * 100)
    assert site.run("wait", str(site.mountpoint), "--for", "sealed").status == 0
    looked = []
    for share in ("10%", "10%", "100%"):
        done = site.run("scrub", str(site.mountpoint), "--sample", share, "--json")
        assert done.status == 0, done.said
        looked.append(json.loads(done.out)["files"])
    assert looked[2] == 400 and all(10 < each < 80 for each in looked[:2]), looked  # five standard deviations
    site.umount()


def test_a_rate_is_kept_and_progress_told(site: Site) -> None:
    """Four files of a MiB at a MiB a second take three seconds at the least; who waits sees how far it is."""
    site.mount()
    for number in range(4):
        (site.mountpoint / str(number)).write_bytes(os.urandom(1 << 20))
    assert site.run("wait", str(site.mountpoint), "--for", "sealed").status == 0
    done = site.run("scrub", str(site.mountpoint))
    assert done.status == 0, done.said
    began = time.monotonic()
    done = site.run("scrub", str(site.mountpoint), "--rate", "1M")
    assert done.status == 0 and "scrubbing: " in done.err, done.said
    assert time.monotonic() - began > 2.8
    told: list[dict[str, Any]] = []
    request = {"path": "/", "remote": False, "sample": 1.0, "rate_bytes_s": 2 << 20, "repair": True}
    assert ask(site.store, "scrub", told.append, **request)["bytes"] == 4 << 20
    ways = [each["sent_bytes"] for each in told]
    assert ways == sorted(ways) and len(set(ways)) > 2, ways
    assert {each["sent_bytes"] + each["pending_bytes"] for each in told} == {4 << 20}
    site.umount()


@pytest.mark.slow
def test_packs_that_come_out_differently_are_sent_anew(saved: Saved, tmp_path: Path, monkeypatch: Any) -> None:
    """Where another version of zstd makes other bytes, what is here goes into new packs, and the files are published
    anew: another machine reads everything."""
    monkeypatch.setattr("ckptfs.repair.packs.encode_as", lambda codec, raw, length, base: None)
    for path in objects(saved.remote, "packs"):
        flip(path, 10)

    async def work(engine: Engine) -> Report:
        return await engine.scrub(b"/", ScrubOptions(remote=True, alone=True), Scrubbing())

    report = work_on(saved.site.store, work, lambda: None, needs_remote=True)
    assert report.is_sound and len(report.findings) == len(objects(saved.remote, "packs")), report.findings
    saved.check()
    with Site(tmp_path, name="elsewhere", tuning=TINY) as elsewhere:
        elsewhere.mount("--remote", saved.url, "--read-only")
        for name, data in saved.content.items():
            assert (elsewhere.mountpoint / name).read_bytes() == data
        elsewhere.umount()


@pytest.mark.slow
def test_a_scrub_that_is_killed_makes_nothing_worse(saved: Saved) -> None:
    """Killed at any moment, the store is consistent and the next scrub mends what the first one did not."""
    flip(image_of(saved.site.store, "weights.npy"), 20_000)
    for number in range(1, 12):  # the first chunk of a pack is another's
        flip(image_of(saved.site.store, f"file-{number}"), number)
    for path in objects(saved.remote, "packs")[::2]:
        flip(path, 10)
    for step in range(KILLS):
        with saved.site.spawn("scrub", str(saved.site.store), "--remote") as process:
            try:
                process.wait(0.4 + 1.2 * step / KILLS)
            except subprocess.TimeoutExpired:
                process.kill()
        wrong = [each for each in problems(saved.site.store) if "are not the chunk that is located there" not in each]
        assert wrong == [], (step, wrong)
    assert saved.scrub("--remote")["sound"]
    saved.check()
