"""What a store holds is its owner's alone, and credentials are nowhere but in the daemon's memory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.support.mounts import Site, until

pytestmark = pytest.mark.timeout(120)

SECRET, TOKEN = "a-secret-that-nobody-may-see", "a-token-that-nobody-may-see"


def modes(store: Path) -> dict[str, int]:
    return {
        str(path.relative_to(store)): stat.S_IMODE(path.lstat().st_mode) for path in (store, *store.rglob("*"))
    }


def test_store_files_are_private(site: Site) -> None:
    """Directories 0700 and files 0600, mounted and unmounted, also with a umask that hides nothing, and after a repair
    and a kill."""
    old = os.umask(0)
    try:
        site.mount()
        (site.mountpoint / "file").write_bytes(b"x" * 100_000)
        os.chmod(site.mountpoint / "file", 0o666)
        assert site.run("wait", str(site.mountpoint), "--for", "sealed").status == 0
        while_mounted = modes(site.store)
        site.kill()
        (site.store / "images" / "00").mkdir(exist_ok=True, mode=0o700)
        site.mount()
        site.umount()
        assert site.run("fsck", "--repair", str(site.store)).status == 0
        assert site.run("scrub", str(site.store)).status == 0
    finally:
        os.umask(old)
    for found in (while_mounted, modes(site.store)):
        open_to_others = {name: oct(mode) for name, mode in found.items() if mode & 0o077}
        assert open_to_others == {}
        assert {"catalog.db", "settings.json", "daemon.log", "lock", "images"} <= found.keys()


NOBODY = """
import os, socket, sys
os.fchdir(int(sys.argv[1]))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.settimeout(10)
s.connect("control.sock")
s.sendall(b'{"op": "hello"}\\n')
print(s.recv(9))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as somebody else")
def test_the_control_socket_answers_its_owner_only(site: Site) -> None:
    """Another user gets nothing out of it, even where the directories let them in."""
    site.mount()
    site.store.chmod(0o711)
    directory = os.open(site.store, os.O_RDONLY | os.O_DIRECTORY)

    def asked() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", NOBODY, str(directory)], pass_fds=[directory], capture_output=True, text=True,
            timeout=30, check=False,
        )  # fmt: skip

    try:
        refused = asked()
        assert refused.returncode != 0 and "PermissionError" in refused.stderr, refused
        (site.store / "control.sock").chmod(0o666)  # as a copied or restored store might have it
        looked_at = asked()
        assert looked_at.stdout.strip() in ("", "b''"), looked_at  # hung up on, before or after it asked
    finally:
        os.close(directory)
    assert site.run("status", str(site.mountpoint)).status == 0
    site.umount()


@pytest.fixture
def secretive(tmp_path: Path, bucket: Bucket) -> Iterator[Site]:
    environment = {**bucket.environment, "AWS_SESSION_TOKEN": ""}
    with Site(tmp_path, environment=environment, name="secretive") as site:
        yield site


def test_credentials_show_nowhere(secretive: Site, bucket: Bucket) -> None:
    """Not in the store, nor in what `ps` shows of the daemon and of its background process, also after `auth`."""
    secret = bucket.environment["AWS_SECRET_ACCESS_KEY"]
    secretive.mount("--remote", bucket.url)
    (secretive.mountpoint / "file").write_bytes(os.urandom(8 << 20))
    assert secretive.run("wait", str(secretive.mountpoint)).status == 0
    daemon = secretive.pid()
    until(lambda: bool(children(daemon)), "a background process")
    shown = {pid: what_ps_shows(pid) for pid in (daemon, *children(daemon))}
    wrong = secretive.run("auth", str(secretive.mountpoint), AWS_SECRET_ACCESS_KEY=SECRET, AWS_SESSION_TOKEN=TOKEN)
    assert wrong.status == 3 and SECRET not in wrong.said and TOKEN not in wrong.said
    (secretive.mountpoint / "more").write_bytes(b"more")
    secretive.run("wait", str(secretive.mountpoint), "--timeout", "2")
    assert secretive.run("auth", str(secretive.mountpoint), AWS_SESSION_TOKEN="").status == 0
    assert secretive.run("wait", str(secretive.mountpoint), "--timeout", "30").status == 0
    shown |= {-pid: what_ps_shows(pid) for pid in (daemon, *children(daemon))}
    status = secretive.run("status", "--json", str(secretive.mountpoint))
    secretive.umount()
    for each in (secret, SECRET, TOKEN):
        for pid, text in shown.items():
            assert each.encode() not in text, pid
        assert each not in status.said
        for path in secretive.store.rglob("*"):
            assert not path.is_file() or each.encode() not in path.read_bytes(), path


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def what_ps_shows(pid: int) -> bytes:
    """Command line, name and environment."""
    return b"".join((Path(f"/proc/{pid}") / name).read_bytes() for name in ("cmdline", "comm", "environ"))
