"""An exception in a handler or background task costs that one request or round, and is logged; the mount goes on."""

from __future__ import annotations

import ast
import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import ckptfs
from ckptfs_mount.native import library
from tests.support.injected import ANSWERS, HANDLERS, INSIDE, TASKS
from tests.support.mounts import TINY, Site, is_alive, is_mounted, until

NO_ANSWER = {"release", "releasedir"}
"""The kernel has no use for what these answer."""


class Injected:
    """A mount whose daemon fails where it is asked to."""

    def __init__(self, site: Site, directory: Path) -> None:
        self.site = site
        self.root = site.mountpoint
        self._request = directory / "inject"

    def ask(self, name: str) -> None:
        self._request.write_text(name)

    def asked(self) -> bool:
        return self._request.exists()

    def forget(self) -> None:
        self._request.unlink(missing_ok=True)


@contextmanager
def injected(tmp_path: Path, passthrough: str) -> Iterator[Injected]:
    with Site(tmp_path, tuning={**TINY, "sync_every_s": 0.1}) as site:
        (tmp_path / "remote").mkdir()
        command = [sys.executable, "-m", "tests.support.injected", "mount", str(site.mountpoint), "--foreground"]
        command += ["--store", str(site.store), "--force", "--remote", f"file://{tmp_path}/remote"]
        command += ["--passthrough", passthrough, "--settle", "50ms", "--lag", "100ms", "--reclaim-after", "0s"]
        daemon = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env={**site.environment, "CKPTFS_INJECT": str(tmp_path / "inject")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            until(lambda: is_mounted(site.mountpoint) and "mounted" in site.log(), "the mount")
            yield Injected(site, tmp_path)
        finally:
            daemon.kill()
            daemon.wait(30)


def calls(root: Path) -> dict[str, Callable[[], object]]:
    """For each handler something that leads to it, and can be done again."""
    numbers = iter(range(10_000))

    def new() -> Path:
        return root / f"new-{next(numbers)}"

    def made() -> Path:
        path = new()
        path.write_bytes(b"x" * 5000)
        return path

    def with_file(flags: int, call: Callable[[int], object]) -> Callable[[], object]:
        def do() -> object:
            path = made()
            fd = os.open(path, flags)
            try:
                return call(fd)
            finally:
                os.close(fd)

        return do

    def directory_fsync() -> None:
        fd = os.open(root, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def with_made(call: Callable[[Path], object]) -> Callable[[], object]:
        return lambda: call(made())

    def directory() -> Path:
        path = new()
        path.mkdir()
        return path

    def link() -> Path:
        path = new()
        path.symlink_to("there")
        return path

    return {
        "lookup": lambda: new().exists(),
        "getattr": lambda: [(time.sleep(0.15), os.stat(root))],  # the kernel keeps them for the lag
        "setattr": with_made(lambda path: path.chmod(0o600)),
        "mkdir": lambda: new().mkdir(),
        "mknod": lambda: os.mkfifo(new()),
        "symlink": lambda: new().symlink_to("there"),
        "link": with_made(lambda path: os.link(path, new())),
        "unlink": with_made(lambda path: path.unlink()),
        "rmdir": lambda: directory().rmdir(),
        "rename": with_made(lambda path: path.rename(new())),
        "readlink": lambda: os.readlink(link()),
        "getxattr": with_made(lambda path: os.getxattr(path, "user.ckptfs.state")),
        "listxattr": with_made(lambda path: os.listxattr(path)),
        "setxattr": with_made(lambda path: os.setxattr(path, "user.x", b"y")),
        "removexattr": with_made(lambda path: (os.setxattr(path, "user.x", b"y"), os.removexattr(path, "user.x"))),
        "statfs": lambda: os.statvfs(root),
        "create": made,
        "open": with_made(lambda path: path.read_bytes()),
        "read": with_file(os.O_RDWR | os.O_DIRECT, lambda fd: os.pread(fd, 4096, 0)),
        "write": with_file(os.O_WRONLY, lambda fd: os.pwrite(fd, b"z", 0)),
        "flush": made,
        "fsync": with_file(os.O_WRONLY, os.fsync),
        "release": made,
        "opendir": lambda: os.listdir(root),
        "readdir": with_made(lambda path: os.listdir(root)),  # a new name, or the kernel lists what it kept
        "releasedir": lambda: os.listdir(root),
        "fsyncdir": directory_fsync,
    }


@pytest.mark.timeout(120)
def test_case_056_every_handler(tmp_path: Path) -> None:
    """One call is EIO, is logged, and the next is as usual; a file that is open goes on."""
    with injected(tmp_path, "off") as mount:
        table = calls(mount.root)
        assert sorted(table) == HANDLERS, "a handler that nothing here leads to"
        with open(mount.root / "open", "w+b", buffering=0) as held:
            for number, (name, call) in enumerate(table.items()):
                mount.ask(name)
                error: OSError | None = None
                try:
                    call()
                except OSError as raised:
                    error = raised
                if name in NO_ANSWER:
                    until(lambda: not mount.asked(), f"{name} to be reached")
                    assert error is None
                else:
                    assert not mount.asked(), f"{name} was not reached"
                    assert error is not None and error.errno == errno.EIO, f"{name}: {error}"
                assert f"Injected: {name}" in mount.site.log(), name
                call()
                held.write(b"%d" % number)
                assert os.pread(held.fileno(), 1000, 0).endswith(b"%d" % number), name
        assert ckptfs.wait(mount.root / "open", "replicated", 30)


@pytest.mark.timeout(120)
@pytest.mark.skipif(library is None, reason="the C module was not built")
def test_case_056_every_answer_to_the_c_module(tmp_path: Path) -> None:
    """The request is handled as if it had not been asked; the program sees nothing of it."""
    with injected(tmp_path, "off") as mount:
        for name in ANSWERS:
            mount.ask(name)
            path, data = mount.root / name, os.urandom(50_000)
            with open(path, "w+b", buffering=0) as file:
                file.write(data[:20_000])
                file.write(data[20_000:])
            assert path.read_bytes() == data
            with pytest.raises(OSError) as refused:
                os.getxattr(path, "security.capability")
            assert refused.value.errno == errno.ENODATA
            assert not mount.asked(), f"{name} was not reached"
            assert f"Injected: {name}" in mount.site.log()
            assert path.read_bytes() == data and path.stat().st_size == len(data)
        assert ckptfs.wait(mount.root, "replicated", 30)


def save(mount: Injected, name: str, data: bytes) -> None:
    """As programs do: also through a map that outlives its descriptor, and with a question to the daemon."""
    path = mount.root / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, data)
        mapped = mmap.mmap(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    mount.site.run("status", str(mount.root))
    mapped.close()
    path.unlink()  # and the kernel forgets it


class Other:
    """Another machine on the same remote; what it saves is looked at and read here."""

    def __init__(self, site: Site) -> None:
        self.root = site.mountpoint
        self._numbers = iter(range(10_000))

    def save(self, mount: Injected) -> None:
        number = next(self._numbers)
        data = os.urandom(20_000)
        for path in (self.root / f"theirs-{number}", self.root / "theirs"):
            path.write_bytes(data)
        ckptfs.publish(self.root)
        here = mount.root / f"theirs-{number}"
        until(here.exists, "what the other machine published", 10)
        assert here.read_bytes() == data
        (mount.root / "theirs").read_bytes()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, name="other", tuning=TINY) as site:
        yield site


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "places", [pytest.param(TASKS, id="tasks"), pytest.param(INSIDE, id="inside", marks=pytest.mark.slow)]
)
def test_case_056_every_background_task(tmp_path: Path, other: Site, places: tuple[str, ...]) -> None:
    """It begins anew: what is saved then is sealed, replicated and durable as ever, and what others save is read."""
    with injected(tmp_path, "auto") as mount:
        other.mount("--remote", f"file://{tmp_path}/remote", "--settle", "50ms", "--lag", "100ms")
        theirs = Other(other)
        for number, name in enumerate(places):
            mount.ask(name)
            for _ in range(40):
                with suppress(OSError, ckptfs.CkptfsError, AssertionError):  # whoever was waiting for it may be told
                    save(mount, f"file-{number}", os.urandom(30_000))
                    theirs.save(mount)
                if not mount.asked():
                    break
                time.sleep(0.2)
            assert not mount.asked(), f"{name} was not reached"
            until(lambda name=name: f"Injected: {name}" in mount.site.log(), f"{name} in the log")  # type: ignore[misc]
            data = b"%d after" % number * 4000
            (mount.root / f"after-{number}").write_bytes(data)
            (mount.root / f"after-{number}").rename(mount.root / "latest")
            assert ckptfs.wait(mount.root / "latest", "replicated", 30), f"after {name}"
            assert (mount.root / "latest").read_bytes() == data
            theirs.save(mount)
        other.umount()
        mount.site.umount()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["_write_back", "_watch_writers"])
def test_case_056_stopping(tmp_path: Path, name: str) -> None:
    """What fails while the daemon is being stopped ends it at once, in order: the next mount has everything."""
    with injected(tmp_path, "auto") as mount:
        (mount.root / "file").write_bytes(b"x" * 30_000)
        mount.ask(f"ckptfs_mount.daemon:Daemon.{name}")
        pid = mount.site.pid()
        os.kill(pid, signal.SIGTERM)
        until(lambda: not is_alive(pid), "the daemon to end")
        assert not mount.asked() and "stopping at once" in mount.site.log() and "ended:" in mount.site.log()
        mount.site.mount()
        assert (mount.root / "file").read_bytes() == b"x" * 30_000
        mount.site.umount()


NOT_TRIED = {
    "ckptfs/engine.py: self.replica.run": "holds those below",
    "ckptfs/engine.py: work": "on behalf of a client, who is told",
    "ckptfs/engine.py: heal": "within Engine._heal",
    "ckptfs/replica/replica.py: task": "those in TASKS",
    "ckptfs/replica/replica.py: watch": "on behalf of a client, who is told",
    "ckptfs/replica/trees.py: work": "within Publisher._step",
    "ckptfs/replica/chunks.py: get": "within ChunkFetcher._get_run",
    "ckptfs/replica/chunks.py: self._copy": "as ChunkFetcher._fetch_run",
    "ckptfs/replica/chunks.py: self._elsewhere": "as ChunkFetcher._fetch_run",
    "ckptfs/replica/flights.py: self._fetch": "only what it calls, ChunkFetcher.fetch, can fail",
    "ckptfs/prefetching.py: work": "on behalf of a client, who is told",
    "mount/requests.py: self._give_up": "on behalf of a client, who is told",
    "mount/requests.py: self._report": "on behalf of a client, who is told",
    "mount/unmounted.py: engine.run": "no mount",
    "mount/unmounted.py: _show": "no mount",
    "mount/daemon.py: self._watch_signals": "the mount's own life: without it nobody can stop it",
    "mount/daemon.py: self._engine.run": "holds those of the engine",
    "mount/daemon.py: self._announce": "the mount is not announced, and `ckptfs mount` says why",
    "mount/daemon.py: self._stop_gently": "see test_case_056_stopping",
    "mount/daemon.py: self._watch_writers": "see test_case_056_stopping",
    "mount/daemon.py: hurry": "waits for an event",
    "mount/control.py: self._serve": "as ControlServer._converse",
    "mount/control.py: _cancel_on_hangup": "on behalf of a client, who has gone",
}
"""What is begun in the background, and why an exception is not injected there."""


def begun() -> dict[str, str]:
    """Everything in the sources that is given to a nursery: file and words -> the last name."""
    found = {}
    top = Path(__file__).parents[2]
    for folder in ("ckptfs", "mount"):
        for path in sorted((top / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                if node.func.attr not in ("start_soon", "start") or "nursery" not in ast.unparse(node.func.value):
                    continue
                words = [ast.unparse(each) for each in node.args]
                task = words[1] if words[0].startswith("steadily") else words[0]
                found[f"{path.relative_to(top)}: {task}"] = task.rpartition(".")[2]
    return found


def test_every_background_task_is_tried() -> None:
    """What is begun somewhere and neither injected into nor exempt is new: say which it is."""
    tried = {name.rpartition(".")[2] for name in (*TASKS, *INSIDE)}
    tasks = begun()
    assert len(tasks) > 25 and set(NOT_TRIED) <= tasks.keys()
    unknown = {task for task, name in tasks.items() if task not in NOT_TRIED and name not in tried}
    assert unknown == set()
