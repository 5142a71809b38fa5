"""A store knows its remote from every other place: what answers in its stead gets nothing and vouches for nothing."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptfs
from ckptfs.errors import RemoteUnusable
from tests.conftest import Bucket
from tests.support.mounts import TINY, Site, is_mounted, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, tuning=TINY) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the remote is."""
    return tmp_path / "bucket"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A remote that another store made."""
    with Site(tmp_path, name="other", tuning=TINY) as other:
        other.mount("--remote", f"file://{tmp_path}/foreign")
        (other.mountpoint / "theirs").write_bytes(b"other")
        other.umount()
    return tmp_path / "foreign"


def save(site: Site, name: str) -> None:
    (site.mountpoint / name).write_bytes(os.urandom(50_000))


def everything(place: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in place.rglob("*") if each.is_file()}


def replicated(site: Site, place: Path) -> None:
    """Mount with *place*, save, umount."""
    site.mount("--remote", f"file://{place}")
    save(site, "model")
    site.umount()


def refused(site: Site, *words: str) -> None:
    done = site.try_mount()
    assert done.status == 1 and len(done.err.splitlines()) == 1, done.said
    for word in (*words, "--store", "--offline", str(site.store)):
        assert word in done.err, done.err
    assert not is_mounted(site.mountpoint)


@pytest.mark.parametrize("empty", [False, True])
def test_a_remote_that_is_gone_is_not_made_anew(site: Site, place: Path, empty: bool) -> None:
    """A mount finds nothing, or an empty directory: it is refused, nothing is created, and all is well afterwards."""
    replicated(site, place)
    away = place.rename(place.with_name("away"))
    if empty:
        place.mkdir()
    refused(site, f"file://{place}", "mounted")
    assert os.listdir(place) == [] if empty else not place.exists()
    if empty:
        place.rmdir()
    away.rename(place)
    site.mount()
    assert site.status()["safe"]
    site.umount()


def test_another_remote_in_its_place_is_refused(site: Site, place: Path, foreign: Path) -> None:
    """Another remote, which somebody moved there, is left as it is."""
    replicated(site, place)
    place.rename(place.with_name("away"))
    foreign.rename(place)
    before = everything(place)
    refused(site, f"file://{place} is another remote")
    assert everything(place) == before


def test_reading_is_enough_to_know_a_remote(site: Site, tmp_path: Path, foreign: Path) -> None:
    """A store that only read does not take an empty place for its remote; what it has is saved once that is back."""
    site.mount("--remote", f"file://{foreign}")
    assert (site.mountpoint / "theirs").read_bytes() == b"other"
    away = foreign.rename(tmp_path / "away")
    save(site, "new")
    until(lambda: "is it still mounted" in (site.status()["last_error"] or ""), "the error to be told")
    site.umount("--no-wait", status=3)
    refused(site, "mounted")
    assert not foreign.exists()
    away.rename(foreign)
    site.mount()
    assert ckptfs.wait(site.mountpoint, timeout=30)
    site.umount()
    assert site.run("ls", f"file://{foreign}/new").status == 0
    assert site.run("ls", f"file://{foreign}/theirs").status == 0


def test_another_remote_that_takes_its_place_under_a_mount(site: Site, place: Path, foreign: Path) -> None:
    """Nothing is put there, nothing is called safe, nobody waits; when the right one is back, all goes on unaided."""
    site.mount("--remote", f"file://{place}", "--settle", "200ms")
    save(site, "first")
    assert ckptfs.wait(site.mountpoint, timeout=30)
    place.rename(place.with_name("away"))
    foreign.rename(place)
    before = everything(place)
    status = site.status()
    assert not status["safe"] and status["newest_safe_set"] is None and "another remote" in status["last_error"]
    save(site, "second")
    with pytest.raises(RemoteUnusable, match="another remote"):
        ckptfs.wait(site.mountpoint)
    with pytest.raises(RemoteUnusable, match="another remote"):
        ckptfs.publish(site.mountpoint)
    shown = site.run("status", str(site.mountpoint)).out.splitlines()
    assert "Nothing is known to be safe" in shown[0] and "another remote" in shown[0]
    assert everything(place) == before
    assert os.listdir(site.mountpoint) == ["first", "second"]  # and theirs is not mixed in
    place.rename(foreign)
    place.with_name("away").rename(place)
    until(lambda: site.status()["safe"], "everything to be replicated, unaided")
    assert site.umount().status == 0


def test_leaving_while_another_remote_is_there(site: Site, place: Path, foreign: Path) -> None:
    """umount neither waits for a remote that is not coming nor says that anything is on it."""
    site.mount("--remote", f"file://{place}")
    save(site, "first")
    assert ckptfs.wait(site.mountpoint, timeout=30)
    place.rename(place.with_name("away"))
    foreign.rename(place)
    done = site.umount(status=3)
    assert "everything is on" not in done.out and "another remote" in done.out
    place.rename(foreign)
    place.with_name("away").rename(place)
    site.mount()
    place.rename(place.with_name("away"))
    foreign.rename(place)
    save(site, "second")
    done = site.umount(status=3)
    assert "NOT on" in done.out and "another remote" in done.out


def test_offline_shows_what_the_store_has(site: Site, place: Path) -> None:
    """Without its remote a store can be mounted, read and written; later it goes on with the remote it remembers."""
    replicated(site, place)
    away = place.rename(place.with_name("away"))
    site.mount("--offline")
    content = (site.mountpoint / "model").read_bytes()
    assert len(content) == 50_000
    save(site, "offline")
    (site.mountpoint / "model").unlink()
    status = site.status()
    assert not status["safe"] and "offline" in status["last_error"] and status["remote"] == f"file://{place}"
    with pytest.raises(RemoteUnusable, match="offline"):
        ckptfs.wait(site.mountpoint)
    assert "NOT on" in site.umount(status=3).out
    assert not place.exists()
    away.rename(place)
    site.mount()
    site.umount()
    shown = site.run("ls", f"file://{place}")
    assert "offline" in shown.out and "model" not in shown.out


def test_a_bucket_that_is_not_the_one(tmp_path: Path, bucket: Bucket) -> None:
    """The same bucket name on another server, as when AWS_ENDPOINT_URL is forgotten, lacks ckptfs.json."""
    from ckptfs.remote.open import open_remote

    remote = open_remote(f"{bucket.url}/run", environment=bucket.environment)
    with Site(tmp_path, environment=bucket.environment, tuning=TINY) as site:
        site.mount("--remote", remote.url)
        save(site, "first")
        assert ckptfs.wait(site.mountpoint, timeout=30)
        ours = remote.get("ckptfs.json")
        remote.delete(["ckptfs.json"])
        save(site, "second")
        with pytest.raises(RemoteUnusable, match="AWS_ENDPOINT_URL"):
            ckptfs.wait(site.mountpoint)
        assert not site.status()["safe"]
        site.umount(status=3)
        refused(site, remote.url, "AWS_ENDPOINT_URL")
        assert remote.size("ckptfs.json") is None
        remote.put("ckptfs.json", ours)
        site.mount()
        assert ckptfs.wait(site.mountpoint, timeout=30)
        site.umount()


def test_a_refused_mount_leaves_nothing_behind(site: Site, place: Path, tmp_path: Path) -> None:
    """Neither where another URL leads, nor in a directory that holds something else."""
    replicated(site, place)
    other = tmp_path / "elsewhere"
    other.mkdir()
    assert "replicates to" in site.try_mount("--remote", f"file://{other}").err
    assert "replicates to" in site.try_mount("--remote", f"file://{tmp_path}/none").err
    assert os.listdir(other) == [] and not (tmp_path / "none").exists()
    (other / "thesis.tex").touch()
    with Site(tmp_path, name="fresh", tuning=TINY) as fresh:
        assert "thesis.tex" in fresh.try_mount("--remote", f"file://{other}").err
        assert os.listdir(other) == ["thesis.tex"]
        done = fresh.try_mount("--remote", "file:///proc/foo")
        assert done.status == 1 and "cannot be created: No such file" in done.err, done.said


def test_what_is_no_remote_is_explained(site: Site) -> None:
    """A wrong URL, a web server and a closed port are told from an empty bucket, by mount and by ls."""
    for url, words in (("file://rel/path", "three slashes"), ("file:/abs", "Did you mean file:///abs?")):
        assert words in site.try_mount("--remote", url).err
        done = site.run("ls", url)
        assert done.status == 1 and words in done.err, done.said
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _NotFound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        for done in (
            site.run("ls", "s3://runs/exp1", AWS_ENDPOINT_URL=endpoint, **keys),
            site.try_mount("--remote", "s3://runs/exp1", AWS_ENDPOINT_URL=endpoint, **keys),
        ):
            assert done.status == 1 and "no such bucket (runs)" in done.err and endpoint in done.err, done.said
    finally:
        server.shutdown()
        server.server_close()
    done = site.try_mount("--remote", "s3://runs/exp1", AWS_ENDPOINT_URL=endpoint, **keys)
    assert done.status == 1 and "Check AWS_ENDPOINT_URL" in done.err and "get ckptfs.json" not in done.err, done.said


class _NotFound(http.server.BaseHTTPRequestHandler):
    """A web server that knows nothing of S3."""

    def do_GET(self) -> None:
        self.send_error(404)

    do_HEAD = do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None: ...
