"""Mounting, unmounting, dying and coming back, through the real command."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import ckptfs
from ckptfs.errors import MountError
from tests.support.maps import mapped
from tests.support.mounts import COMMAND_S, Site, is_alive, is_mounted, run, until

pytestmark = pytest.mark.timeout(120)


def test_mount_use_unmount_and_again_with_the_mountpoint_alone(site: Site) -> None:
    """A missing mountpoint is created, usable on return, and after umount the next mount needs only its path."""
    done = site.mount("--settle", "1500ms", "--lag", "3s")
    assert is_mounted(site.mountpoint)
    assert "ckptfs" in run(["findmnt", "-n", str(site.mountpoint)]).out
    assert str(site.store) in done.out and "free of" in done.out
    (site.mountpoint / "exp").mkdir()
    (site.mountpoint / "exp" / "model.bin").write_bytes(b"weights" * 1000)
    pid = site.pid()
    site.umount()
    assert not is_mounted(site.mountpoint)
    assert list(site.mountpoint.iterdir()) == []
    until(lambda: not is_alive(pid), "the daemon to end")
    again = site.run("mount", str(site.mountpoint), "--force")
    assert again.status == 0, again.said
    assert (site.mountpoint / "exp" / "model.bin").read_bytes() == b"weights" * 1000
    settings = json.loads((site.store / "settings.json").read_text())
    assert (settings["settle_s"], settings["lag_s"]) == (1.5, 3.0)
    site.umount()


def test_no_process_is_left_when_umount_returns(site: Site) -> None:
    """So that the store's disk can be unmounted in the next line of a script."""
    for _ in range(5):
        site.mount()
        (site.mountpoint / "file").write_bytes(os.urandom(100_000))
        pid = site.pid()
        site.umount()
        assert not is_alive(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="another mount namespace takes root")
def test_case_058_a_container_that_has_the_mount_keeps_it(site: Site, tmp_path: Path) -> None:
    """Bound into another mount namespace it is read and written there, also after umount, which says who has it; the
    daemon ends with the last of them, and nothing is lost."""
    site.mount()
    (site.mountpoint / "before").write_bytes(b"before")
    inside = tmp_path / "inside"
    inside.mkdir()
    command = ["unshare", "--mount", "--propagation", "private", "sh"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as container:
        assert container.stdin is not None and container.stdout is not None
        try:
            container.stdin.write(f"mount --bind {site.mountpoint} {inside}; cat {inside}/before; echo\n")
            assert container.stdout.readline() == "before\n"
            done = site.umount(status=3)
            assert f"pid {container.pid}" in done.err and str(inside) in done.err
            assert not is_mounted(site.mountpoint) and site.daemon() is not None
            container.stdin.write(f"echo after > {inside}/after; cat {inside}/after\n")
            assert container.stdout.readline() == "after\n"
            container.stdin.close()
            container.wait(30)
        finally:
            container.kill()
    assert site.gone(30)
    site.mount()
    assert (site.mountpoint / "before").read_bytes() == b"before"
    assert (site.mountpoint / "after").read_bytes() == b"after\n"
    site.umount()


def test_the_usual_store_lies_in_the_data_directory_per_mountpoint(site: Site, tmp_path: Path) -> None:
    """Without a name the store is below XDG_DATA_HOME, readable by name, and private."""
    done = site.run("mount", str(site.mountpoint), "--force")
    assert done.status == 0, done.said
    (store,) = (each for each in (tmp_path / "xdg" / "ckptfs").iterdir() if each.is_dir())
    assert store.name.startswith("mnt-")
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert stat.S_IMODE((store / "control.sock").stat().st_mode) == 0o600
    site.umount()
    assert not (store / "control.sock").exists()


def test_what_is_wrong_is_told_in_one_line_before_anything_is_mounted(site: Site, tmp_path: Path) -> None:
    """A full mountpoint, a file, a store within the mount, a used store, a bad URL: refused, nothing mounted."""

    def refused(*arguments: str, **environment: str) -> str:
        done = site.run("mount", *arguments, **environment)
        assert done.status == 1, done.said
        assert len(done.err.splitlines()) == 1, done.err
        return done.err

    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert "not empty" in refused(str(full), "--force")
    assert "not a directory" in refused(str(full / "file"), "--force")
    new = tmp_path / "new"
    assert "inside the mountpoint" in refused(str(new), "--store", str(new / "store"))
    assert "around the mountpoint" in refused(str(full / "new"), "--store", str(full))
    assert "is no store" in refused(str(new), "--store", str(full))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    assert "holds other objects" in refused(str(new), "--force", "--remote", f"file://{foreign}")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "ckptfs.json").write_text('{"format": "ckptfs", "version": 99}')
    assert "newer ckptfs" in refused(str(new), "--force", "--remote", f"file://{tmp_path / 'newer'}")
    site.mount()
    other = refused(str(new), "--force", "--store", str(site.store))
    assert str(site.pid()) in other and str(site.mountpoint) in other
    assert not new.exists(), "a mountpoint created in vain is removed again"
    assert [each for each in (new, full) if is_mounted(each)] == []
    site.umount()


def test_an_unreachable_or_forbidding_remote_is_told_before_mounting(site: Site, tmp_path: Path) -> None:
    """A remote that refuses connections, or these credentials, fails the command, and the store stays usable."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = site.try_mount(
            "--remote", "s3://bucket/run",
            AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b",
        )  # fmt: skip
    assert done.status == 1 and len(done.err.splitlines()) == 1, done.said
    assert "127.0.0.1" in done.err
    assert not is_mounted(site.mountpoint)
    site.mount()
    site.umount()


def test_case_058_mounting_again_over_a_killed_daemon_cleans_up_and_has_everything(site: Site) -> None:
    """After SIGKILL the mount is dead; the same command cleans it and every closed file is there."""
    site.mount()
    (site.mountpoint / "saved").write_bytes(b"x" * 100_000)
    site.kill()
    with pytest.raises(OSError, match=r"not connected|Software caused"):
        os.stat(site.mountpoint)
    done = site.mount()
    assert "killed" in done.out
    assert (site.mountpoint / "saved").read_bytes() == b"x" * 100_000
    site.kill()
    assert "killed" in site.umount(status=3).out
    assert not is_mounted(site.mountpoint)


def test_mounting_again_on_a_live_mount_changes_nothing(site: Site) -> None:
    """The same command on a live mount succeeds and says so; one that asks for another remote or store is refused."""
    site.mount()
    pid = site.pid()
    done = site.mount(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    assert "mounted already" in done.out and "AWS_ACCESS_KEY_ID" in done.out
    assert site.pid() == pid
    assert site.try_mount("--remote", "file:///elsewhere").status == 1
    assert site.run("mount", str(site.mountpoint), "--store", str(site.store) + "2").status == 1
    auth = site.run("auth", str(site.mountpoint), AWS_SESSION_TOKEN="c")
    assert auth.status == 0 and "AWS_SESSION_TOKEN" in auth.out
    assert "b" not in site.log().split()
    site.umount()


def test_a_busy_mount_is_refused_naming_who_uses_it(site: Site) -> None:
    """umount names the pids by working directory and by open file, and nothing is unmounted."""
    site.mount()
    path = site.mountpoint / "open"
    path.touch()
    for arguments, expected in (([], "working directory"), ([str(path)], str(path))):
        held = "import sys; f = [open(p) for p in sys.argv[1:]]; print('ready', flush=True); sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", held, *arguments],
            cwd=site.mountpoint if not arguments else "/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdout.readline()
            done = site.umount(status=1)
            assert str(holder.pid) in done.err and expected in done.err
            holder.stdin.close()
            holder.wait(COMMAND_S)
    site.umount()


def test_sigterm_serves_on_while_a_file_is_open_for_writing(site: Site) -> None:
    """The trainer got SIGTERM too and saves now: its save succeeds, and the daemon ends after it."""
    site.mount("--stop-timeout", "20s")
    pid = site.pid()
    with open(site.mountpoint / "last", "wb") as save:
        save.write(b"a" * 1000)
        os.kill(pid, signal.SIGTERM)
        until(lambda: "serving on" in site.log(), "the daemon to take note")
        assert site.status()["mount"]["stopping"]
        save.write(b"b" * 1000)
        save.flush()
        (site.mountpoint / "another").write_bytes(b"c")
    until(lambda: not is_alive(pid), "the daemon to end")
    assert not is_mounted(site.mountpoint)
    assert "ended: everything is in the store" in site.log()
    site.mount()
    assert (site.mountpoint / "last").read_bytes() == b"a" * 1000 + b"b" * 1000
    assert (site.mountpoint / "another").read_bytes() == b"c"
    site.umount()


def test_sigterm_stops_at_the_timeout_and_at_a_second_one(site: Site) -> None:
    """A file that stays open does not hold the daemon beyond stop_timeout, nor beyond a second SIGTERM.

    What is written later is refused, or, where passthrough goes on without the daemon, in the next mount.
    """
    kept = []
    for second in (False, True):
        site.mount("--stop-timeout", "60s" if second else "1s")
        pid = site.pid()
        save = os.open(site.mountpoint / f"open-{second}", os.O_CREAT | os.O_WRONLY)
        os.write(save, b"kept")
        os.kill(pid, signal.SIGTERM)
        until(lambda: site.log().count("serving on") == 1 + second, "the daemon to take note")  # noqa: B023
        if second:
            os.kill(pid, signal.SIGTERM)
        until(lambda: not is_alive(pid), "the daemon to end", 20)  # noqa: B023
        kept.append(b"kept")
        try:
            os.write(save, b"late")
            kept[-1] += b"late"
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        with suppress(OSError):
            os.close(save)
        assert not is_mounted(site.mountpoint)
    site.mount()
    assert [path.read_bytes() for path in sorted(site.mountpoint.iterdir())] == kept
    site.umount()


def test_unmounting_by_other_means_ends_the_daemon_in_order(site: Site) -> None:
    """After umount(8) or fusermount3 the daemon closes its store and ends by itself."""
    site.mount()
    pid = site.pid()
    (site.mountpoint / "file").write_bytes(b"1")
    assert run(["fusermount3", "-u", str(site.mountpoint)]).status == 0
    until(lambda: not is_alive(pid), "the daemon to end")
    assert "ended: everything" in site.log()
    site.mount()
    assert (site.mountpoint / "file").read_bytes() == b"1"
    site.umount()


def test_the_foreground_daemon_ends_on_ctrl_c(site: Site) -> None:
    """--foreground stays, says when it is ready, and SIGINT ends it with status 0 and a last word."""
    arguments = ("mount", str(site.mountpoint), "--store", str(site.store), "--force", "--stop-timeout", "1s")
    with site.spawn(*arguments, "--foreground") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("mounted"):
                break
        (site.mountpoint / "file").write_bytes(b"1")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 0, rest
    assert "serving on" in rest and "unmounted" in rest
    assert not is_mounted(site.mountpoint)


def test_a_store_deep_in_the_tree_has_a_control_socket(tmp_path: Path) -> None:
    """A store's path may be longer than the 107 bytes that a socket's path may have, with odd names in it."""
    deep = tmp_path / ("d" * 100) / "größe und\tTab"
    deep.mkdir(parents=True)
    with Site(deep) as site:
        site.mount()
        assert site.status()["mount"]["store"] == str(site.store)
        site.umount()


def test_paths_inside_find_their_mount(site: Site, tmp_path: Path) -> None:
    """status and wait take any path in the mount, also through a symbolic link; others are refused in one line."""
    site.mount()
    (site.mountpoint / "a b").mkdir()
    (site.mountpoint / "a b" / "ü").write_bytes(b"1")
    (tmp_path / "link").symlink_to(site.mountpoint / "a b")
    os.close(os.open(os.fsencode(site.mountpoint) + b"/\xff", os.O_CREAT | os.O_WRONLY))
    assert ckptfs.wait(os.fsencode(site.mountpoint) + b"/\xff", "sealed", 30)
    done = site.run("status", "--json", str(tmp_path / "link" / "ü"))
    assert json.loads(done.out)["path"] == "/a b/ü"
    assert site.run("wait", str(site.mountpoint / "a b"), "--for", "sealed", "--timeout", "30s").status == 0
    missing = site.run("status", str(site.mountpoint / "missing"))
    assert missing.status == 1 and len(missing.err.splitlines()) == 1
    outside = site.run("wait", str(tmp_path))
    assert outside.status == 1 and "not in a ckptfs mount" in outside.err
    assert site.run("status", str(site.mountpoint)).out.startswith("If this machine vanished now")
    assert f"mount        {site.mountpoint} " in site.run("status").out
    site.umount()


def test_wait_says_when_it_was_not_reached_in_time(site: Site) -> None:
    """A file that is open for writing is not sealed: status 3 after the timeout, and the state is told."""
    site.mount()
    with open(site.mountpoint / "open", "wb") as file:
        file.write(b"1")
        file.flush()
        done = site.run("wait", str(site.mountpoint), "--for", "sealed", "--timeout", "300ms")
        assert done.status == 3 and "writing" in done.err
        assert not ckptfs.wait(site.mountpoint, "sealed", 0.1)
    assert ckptfs.wait(site.mountpoint, "sealed", 30)
    site.umount()


def test_a_waiting_client_that_hangs_up_harms_nothing(site: Site) -> None:
    """Killing `ckptfs wait` cancels its request; the daemon answers the next one."""
    site.mount()
    with open(site.mountpoint / "open", "wb") as file:
        file.write(b"1")
        file.flush()
        with site.spawn("wait", str(site.mountpoint), "--for", "sealed") as waiting:
            assert waiting.poll() is None
            waiting.kill()
        assert site.status()["mount"]["mounted"]
    site.umount()
    assert "Traceback" not in site.log()


def test_mounted_in_python_hides_no_exception_and_unmounts_no_other_mount(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while a file is open is the training's own, with a note; what was mounted before stays mounted."""
    monkeypatch.setenv("XDG_DATA_HOME", site.environment["XDG_DATA_HOME"])
    site.mount()
    with ckptfs.mounted(site.mountpoint):
        pass
    assert is_mounted(site.mountpoint)
    site.umount()
    with pytest.raises(ValueError, match="training broke") as caught, ckptfs.mounted(
        site.mountpoint, store=site.store, options=("--force",)
    ) as path:
        file = open(path / "checkpoint", "wb", buffering=0)  # noqa: SIM115
        raise ValueError("training broke")
    assert is_mounted(site.mountpoint)
    assert "stays mounted" in "".join(getattr(caught.value, "__notes__", ["stays mounted"]))
    file.close()
    site.umount()


def test_mounted_in_python_lasts_for_the_block(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """`with ckptfs.mounted(...)` mounts in another process and unmounts, also after an exception."""
    monkeypatch.setenv("XDG_DATA_HOME", site.environment["XDG_DATA_HOME"])
    with pytest.raises(ZeroDivisionError), ckptfs.mounted(
        site.mountpoint, store=site.store, options=("--force",)
    ) as path:
        assert path == site.mountpoint and is_mounted(path)
        (path / "file").write_bytes(b"1")
        assert ckptfs.wait(path / "file", "sealed", 30)
        assert ckptfs.status(path)["mount"]["pid"] == site.pid() != os.getpid()
        raise ZeroDivisionError
    assert not is_mounted(site.mountpoint)
    with pytest.raises(MountError, match="not in a ckptfs mount"):
        ckptfs.status(site.mountpoint)
    with pytest.raises(MountError, match="is no URL"), ckptfs.mounted(site.mountpoint, remote="nonsense"):
        pass


def test_a_read_only_mount_writes_nothing(site: Site) -> None:
    """--read-only shows what is there and refuses changes; it is not remembered."""
    site.mount()
    (site.mountpoint / "file").write_bytes(b"1")
    site.umount()
    site.mount("--read-only")
    assert (site.mountpoint / "file").read_bytes() == b"1"
    with pytest.raises(OSError, match="Read-only"):
        (site.mountpoint / "new").touch()
    site.umount()
    site.mount()
    (site.mountpoint / "new").touch()
    site.umount()


def test_the_owner_is_as_asked(site: Site) -> None:
    """`mine` and UID:GID show one owner, `stored` what chown left; the choice is remembered."""
    site.mount("--owner", "4321:8765")
    (site.mountpoint / "file").touch()
    assert ((site.mountpoint / "file").stat().st_uid, (site.mountpoint / "file").stat().st_gid) == (4321, 8765)
    site.umount()
    site.mount()
    assert (site.mountpoint / "file").stat().st_uid == 4321
    site.umount()
    site.mount("--owner", "mine")
    assert (site.mountpoint / "file").stat().st_uid == os.geteuid()
    site.umount()


def test_umount_streams_and_leaves_while_others_ask(site: Site) -> None:
    """Several clients at once: each gets its answer or a clear error, also those caught by the unmount."""
    site.mount()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while True:
                ckptfs.status(site.mountpoint)
        except MountError:
            pass  # unmounted meanwhile
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    # getxattr on the mountpoint holds it for a moment, so the kernel may call it busy
    until(lambda: site.run("umount", str(site.mountpoint)).status == 0, "umount to succeed")
    for thread in threads:
        thread.join(COMMAND_S)
    assert errors == []
    assert not is_mounted(site.mountpoint)


@pytest.mark.parametrize("attempt", range(4))
def test_killed_at_the_moment_it_mounts(site: Site, attempt: int) -> None:
    """A daemon that is killed while it finds out whether its mount answers leaves a dead mount, not a stuck one."""
    with site.spawn("mount", str(site.mountpoint), "--store", str(site.store)) as command:
        until(lambda: is_mounted(site.mountpoint), "the mount")
        site.kill()
        command.wait(30)
        assert command.stdout is not None
        command.stdout.read()
    site.mount()
    (site.mountpoint / "file").write_bytes(b"after")
    site.umount()


def test_sigterm_keeps_what_was_stored_through_a_map(site: Site) -> None:
    """A sealed file is changed through a map without a descriptor, and never synced: the stop hands it over."""
    site.mount("--stop-timeout", "2s")
    pid = site.pid()
    path = site.mountpoint / "file"
    path.write_bytes(b"a" * 100_000)
    assert ckptfs.wait(path, "sealed", 30)
    with mapped(path, writable=True) as data:
        data[:4] = b"late"
        os.kill(pid, signal.SIGTERM)
        until(lambda: not is_alive(pid), "the daemon to end", 30)
        data.release()
    site.mount()
    assert path.read_bytes() == b"late" + b"a" * 99_996
    site.umount()
