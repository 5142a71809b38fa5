"""What people do wrong, or what goes wrong under them: each mistake is told, with what to do next, and does no harm."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import ckptfs
from ckptfs.errors import NameMissing
from tests.support.mounts import COMMAND, Site, end, is_alive, is_mounted, until

pytestmark = pytest.mark.timeout(120)


def refused(site: Site, *arguments: str, status: int = 1) -> str:
    """The one line in which the command says no."""
    done = site.run(*arguments)
    assert done.status == status, done.said
    assert len(done.err.splitlines()) == 1, done.err
    return done.err


@pytest.mark.parametrize("named", [True, False], ids=["named", "usual"])
def test_a_store_that_was_moved_is_missed(site: Site, tmp_path: Path, named: bool) -> None:
    """Neither an empty mount nor another store: refused until the user names it, or begins anew."""
    first = ("--store", str(site.store)) if named else ()
    done = site.run("mount", str(site.mountpoint), "--force", *first)
    assert done.status == 0, done.said
    (site.mountpoint / "saved").write_bytes(b"1")
    store, moved = Path(site.status()["mount"]["store"]), tmp_path / "moved"
    site.umount()
    store.rename(moved)
    said = refused(site, "mount", str(site.mountpoint), "--force")
    assert str(store) in said and "moved" in said and "--store" in said and "--remote" in said
    assert not store.exists() and not is_mounted(site.mountpoint)
    assert site.run("mount", str(site.mountpoint), "--force", "--store", str(moved)).status == 0
    assert (site.mountpoint / "saved").read_bytes() == b"1"
    site.umount()
    assert site.run("mount", str(site.mountpoint), "--force").status == 0, "it is remembered where it is now"
    site.umount()
    moved.rename(store)
    anew = site.run("mount", str(site.mountpoint), "--force", "--remote", f"file://{tmp_path / 'bucket'}")
    assert anew.status == 0, anew.said
    assert list(site.mountpoint.iterdir()) == []
    site.umount()


def test_a_first_mount_without_a_remote_says_what_that_means(site: Site) -> None:
    """So that a renamed mountpoint, which cannot be told from a new one, does not go on unreplicated in silence."""
    assert "nothing leaves this machine (--remote URL replicates)" in site.mount().out
    site.umount()
    again = site.mount().out
    assert "remote  none: the store alone\n" in again
    site.umount()


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "alone"])
def test_a_store_that_went_while_mounted_leads_to_umount(site: Site, tmp_path: Path, remote: bool) -> None:
    """Every command names `ckptfs umount`, and that unmounts and says what it means; nothing hangs."""
    url = ("--remote", f"file://{tmp_path / 'bucket'}") if remote else ()
    site.mount("--stop-timeout", "1s", *url)
    (site.mountpoint / "saved").write_bytes(b"1")
    pid, moved = site.pid(), tmp_path / "moved"
    site.store.rename(moved)
    try:
        for command in ("mount", "status", "wait", "publish", "prefetch", "auth"):
            said = refused(site, command, str(site.mountpoint))
            assert str(site.store) in said and f"`ckptfs umount {site.mountpoint}`" in said
        listed = site.run("status")
        assert listed.status == 0 and f"`ckptfs umount {site.mountpoint}`" in listed.out
        (document,) = (
            each
            for each in json.loads(site.run("status", "--json").out)
            if each["mount"]["mountpoint"] == str(site.mountpoint)
        )
        assert not document["safe"] and "is gone" in document["error"]
        done = site.umount(status=3)
        assert "is gone" in done.out and "lost" in done.out
        assert not is_mounted(site.mountpoint)
        until(lambda: not is_alive(pid), "the daemon to end")
    finally:
        end(pid)
    moved.rename(site.store)
    site.mount()
    assert (site.mountpoint / "saved").read_bytes() == b"1"
    site.umount()


def test_a_remote_that_would_hold_itself_is_refused(site: Site, tmp_path: Path) -> None:
    """A directory within the mountpoint, the mountpoint, or one around it: nothing is mounted or made."""
    site.mountpoint.mkdir(exist_ok=True)
    for remote, word in ((site.mountpoint / "bucket", "inside"), (site.mountpoint, "inside"), (tmp_path, "around")):
        said = refused(site, "mount", str(site.mountpoint), "--store", str(site.store), "--remote", f"file://{remote}")
        assert word in said and "choose another" in said
    assert not is_mounted(site.mountpoint) and not site.store.exists() and list(site.mountpoint.iterdir()) == []


def test_too_little_memory_is_refused(site: Site) -> None:
    """With the least that is enough; so is a size that is none."""
    for size, why in (("100M", "100.0 MiB is not enough: give it 192M or more"), ("much", "'much' is no size")):
        done = site.run("mount", str(site.mountpoint), "--memory", size)
        assert done.status == 2 and why in done.err


def test_memory_is_remembered(site: Site) -> None:
    """And may be changed with the next mount; nobody who did not choose is held to what was the default."""
    site.mount()
    assert site.status()["mount"]["settings"]["memory_bytes"] >= 256 << 20
    site.umount()
    site.mount("--memory", "200M")
    site.umount()
    site.mount()
    assert site.status()["mount"]["settings"]["memory_bytes"] == 200 << 20
    site.umount()


def test_other_options_for_a_running_mount_are_refused(site: Site) -> None:
    """One line that says what is in force; options equal to that are fine, and nothing changes."""
    site.mount("--settle", "3s", "--owner", "1:2", "--memory", "384M")
    for options, in_force in (
        (["--read-only"], "without --read-only"),
        (["--offline"], "without --offline"),
        (["--settle", "1s"], "--settle 3s"),
        (["--max-lag", "7m"], "--max-lag 120s"),
        (["--read-timeout", "7m"], "--read-timeout 60s"),
        (["--owner", "mine"], "--owner 1:2"),
        (["--passthrough", "on"], "--passthrough "),
        (["--memory", "1G"], "--memory 384M"),
        (["--no-allow-other" if os.geteuid() == 0 else "--allow-other"], "allow-other"),
        (["--foreground"], f"pid {site.pid()}"),
    ):
        said = refused(site, "mount", str(site.mountpoint), *options)
        assert in_force in said and "unmount it first" in said
    same = site.mount("--settle", "3000ms", "--owner", "1:2", "--max-lag", "2m", "--memory", "0.375G")
    assert "mounted already" in same.out
    assert site.status()["mount"]["settings"]["settle_s"] == 3.0
    assert site.status()["mount"]["settings"]["memory_bytes"] == 384 << 20
    site.umount()


def test_a_missing_path_is_told_as_it_was_typed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of every other program, from the command and from Python."""
    site.mount()
    missing = f"{site.mountpoint}/nope/deeper"
    for command in ("status", "wait", "publish", "prefetch"):
        assert refused(site, command, missing) == f"Error: {missing}: no such file or directory\n"
    monkeypatch.chdir(site.mountpoint)
    for ask in (ckptfs.status, ckptfs.wait, ckptfs.publish, ckptfs.prefetch):
        with pytest.raises(NameMissing, match=r"^nope: no such file or directory$"):
            ask("nope")
    monkeypatch.undo()
    site.umount()


def test_errors_in_python_are_the_bare_message(site: Site) -> None:
    """Without the command's own prefix, under the name that `ckptfs` exports."""
    with pytest.raises(ckptfs.MountError, match=r"^/dev/null/x|^cannot create /dev/null/x"), ckptfs.mounted(
        "/dev/null/x", store=site.store, options=("--force",)
    ):
        pass


def test_wrong_usage_leaves_nothing_behind(site: Site, tmp_path: Path) -> None:
    """A malformed owner or URL is status 2 before anything is made; a remote that cannot be, 1 and cleaned up."""
    for options, words in (
        (["--owner", "bob"], "UID:GID"),
        (["--remote", "/somewhere"], "is no URL"),
        (["--remote", "ftp://host/x"], "not supported"),
        (["--remote", "s3://"], "no bucket name"),
    ):
        done = site.run("mount", str(site.mountpoint), "--store", str(site.store), "--force", *options)
        assert done.status == 2 and words in done.err and done.out == "", done.said
        assert not site.mountpoint.exists() and not site.store.exists()
    mistyped = ("--remote", f"file://{tmp_path}/no/such/directory")
    for extra in ((), ("--foreground",)):
        done = site.run("mount", str(site.mountpoint), "--store", str(site.store), "--force", *mistyped, *extra)
        assert done.status == 1, done.said
        assert not site.mountpoint.exists() and not site.store.exists()
    site.mount()
    (site.mountpoint / "saved").write_bytes(b"1")
    site.umount()
    assert site.try_mount(*mistyped).status == 1
    site.mount()
    assert (site.mountpoint / "saved").read_bytes() == b"1"
    site.umount()


def test_the_end_is_told_to_programs(site: Site, tmp_path: Path) -> None:
    """`umount --json` gives what is pending beside the exit status, also when a killed daemon cannot tell."""
    site.mount("--remote", f"file://{tmp_path / 'bucket'}")
    (site.mountpoint / "saved").write_bytes(b"1" * 5000)
    document = json.loads(site.umount("--json").out)
    assert document["unmounted"] and document["safe"] and not any(document["pending"].values())
    site.mount("--settle", "100s")
    (site.mountpoint / "more").write_bytes(b"2" * 5000)
    document = json.loads(site.umount("--json", "--no-wait", status=3).out)
    assert document["pending"]["files"] == 1 and not document["safe"]
    site.mount()
    site.kill()
    document = json.loads(site.umount("--json", status=3).out)
    assert document["pending"] is None and "killed" in document["last_error"]


def test_status_without_a_path_tells_each_mount_once(site: Site) -> None:
    """With the state of the root; a dead mount's path stands in its line once."""
    site.mount()
    (site.mountpoint / "file").write_bytes(b"1")
    assert site.status()["bytes"]["logical"] == site.status()["at_risk"]["bytes"] == 1, "sealed or not"
    assert ckptfs.wait(site.mountpoint, "sealed", 30)
    assert "state        / is sealed" in site.run("status").out
    site.kill()
    lines = site.run("status").out.splitlines()  # of this machine: tests that run beside this one kill daemons too
    (line,) = (each for each in lines if "does not answer" in each and str(site.mountpoint) in each)
    assert line.count(f"{site.mountpoint}: ") == 1
    site.umount(status=3)


def test_a_mount_whose_words_nobody_reads(site: Site) -> None:
    """`ckptfs mount DIR | head -1`, also after a kill, and with a full disk behind stdout: it mounts all the same."""
    site.mount()
    site.kill()
    command = [*COMMAND, "mount", str(site.mountpoint), "--store", str(site.store), "--force"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=site.environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
    site.try_mount()  # knows the daemon now, and says that it is mounted already
    (site.mountpoint / "file").write_bytes(b"1")
    assert site.status()["state"] in ("closed", "sealed")
    site.umount()


@pytest.mark.parametrize("stays", [False, True], ids=["daemon", "foreground"])
def test_mounting_over_the_current_directory(site: Site, stays: bool) -> None:
    """What is started inside the directory that becomes the mountpoint serves it, and is not in its own way."""
    site.mountpoint.mkdir()
    command = [*COMMAND, "mount", ".", "--store", str(site.store), "--force", *(["--foreground"] if stays else [])]
    with subprocess.Popen(
        command, cwd=site.mountpoint, env=site.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as started:  # fmt: skip
        try:
            until(lambda: is_mounted(site.mountpoint) and site.daemon() is not None, "the mount")
            (site.mountpoint / "file").write_bytes(b"data")
            assert (site.mountpoint / "file").read_bytes() == b"data"
            if not stays:
                assert started.wait(30) == 0
            site.umount()
            assert started.wait(30) == 0 and not is_mounted(site.mountpoint)
        finally:
            started.kill()
    assert os.listdir(site.mountpoint) == []
