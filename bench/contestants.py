"""The file systems that are compared, each mounted the way its users would mount it for checkpoints.

A contestant is mounted by a context manager, which unmounts it and ends its processes (by their ids) however the block
ends. All of them lie on the same disk, and their buckets are directories of that disk: what differs is the software.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ckptfs
from ckptfs.client import ask

from .machine import forget, process_tree

_READY_S = 60.0
_SETTLE_S = 900.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Contestant:
    """A mounted file system."""

    name: str
    directory: Path
    pids: Callable[[], list[int]]
    """The processes that serve it; none for a plain directory."""
    settle: Callable[[], None]
    """Returns when the work in the background (hashing, uploading) is done."""
    before_load: Callable[[Path], None] = lambda path: None
    """Lets the next load of *path* come from where its bytes lie."""


Mount = Callable[[Path], contextlib.AbstractContextManager[Contestant]]
"""Mounts below a work directory of its own, which exists and is empty."""


def available() -> dict[str, Mount]:
    """What can be mounted on this machine, in the order in which the tables show it."""
    found: dict[str, Mount] = {PLAIN: plain, LOCAL: ckptfs_local, SERVED: ckptfs_served, REMOTE: ckptfs_remote}
    if find_tool("juicefs"):
        found |= {"juicefs": juicefs, NETWORK: network, BESIDE: ckptfs_beside_network}
    if find_tool("rclone"):
        found["rclone"] = rclone
    if find_tool("s3fs") and find_tool("weed"):
        found["s3fs"] = s3fs
    return found


PLAIN, LOCAL, SERVED, REMOTE = "plain", "ckptfs", "ckptfs-off", "ckptfs+remote"
NETWORK, BESIDE = "network", "ckptfs+network"
OPTIONAL = ("s3fs", NETWORK, BESIDE)
"""Only on demand: s3fs uploads inside close(), which takes its runs to another scale, as does a thin network."""

NETWORK_UP_MBIT, NETWORK_DOWN_MBIT = 770, 5000
"""What a training framework reported of the network directory that its checkpoints went to."""


def is_peer(name: str) -> bool:
    """Whether *name* is somebody else's file system."""
    return name not in (PLAIN, LOCAL, SERVED, REMOTE, NETWORK, BESIDE)


@contextlib.contextmanager
def plain(work: Path) -> Iterator[Contestant]:
    """A directory of the disk: what nothing can beat."""
    yield Contestant(PLAIN, work, lambda: [], lambda: None)


@contextlib.contextmanager
def ckptfs_local(work: Path) -> Iterator[Contestant]:
    """`ckptfs mount DIR --store STORE`: chunks are cut and hashed, nothing is uploaded."""
    with _ckptfs(LOCAL, work, None, "sealed") as contestant:
        yield contestant


@contextlib.contextmanager
def ckptfs_served(work: Path) -> Iterator[Contestant]:
    """The same with `--passthrough=off`: every byte goes through the daemon."""
    with _ckptfs(SERVED, work, None, "sealed", "--passthrough=off") as contestant:
        yield contestant


@contextlib.contextmanager
def ckptfs_remote(work: Path) -> Iterator[Contestant]:
    """`ckptfs mount DIR --store STORE --remote file://BUCKET`."""
    (work / "bucket").mkdir()
    with _ckptfs(REMOTE, work, f"file://{work / 'bucket'}", "replicated") as contestant:
        yield contestant


@contextlib.contextmanager
def _ckptfs(name: str, work: Path, remote: str | None, settled: str, *options: str) -> Iterator[Contestant]:
    store = work / "store"
    with ckptfs.mounted(work / "mount", remote=remote, store=store, wait=False, options=options) as directory:
        pid = ask(store, "hello")["pid"]

        def settle() -> None:
            if not ckptfs.wait(directory, settled, timeout=_SETTLE_S):
                raise TimeoutError(f"{name}: not {settled} after {_SETTLE_S:.0f} s")

        yield Contestant(name, directory, lambda: process_tree(pid), settle)


@contextlib.contextmanager
def juicefs(work: Path) -> Iterator[Contestant]:
    """JuiceFS with SQLite metadata, a local bucket and `--writeback`, its fastest way to save."""
    cache = work / "cache"

    def settle() -> None:
        _wait(lambda: not any(path.is_file() for path in cache.rglob("rawstaging/**/*")), _SETTLE_S, "JuiceFS uploads")

    with _juicefs("juicefs", work, "--writeback", "--cache-dir", str(cache)) as (mountpoint, pid):
        yield Contestant("juicefs", mountpoint, lambda: process_tree(pid), settle)


@contextlib.contextmanager
def juicefs_compressing(work: Path) -> Iterator[Contestant]:
    """JuiceFS that compresses its blocks with zstd; a close returns when they are in the bucket."""
    with _juicefs("juicefs", work, "--cache-dir", str(work / "cache"), compress="zstd") as (mountpoint, pid):
        yield Contestant("juicefs", mountpoint, lambda: process_tree(pid), lambda: None)


@contextlib.contextmanager
def network(work: Path) -> Iterator[Contestant]:
    """A directory across a thin network: JuiceFS without writeback and without a cache on disk, its rates limited.

    A close returns when everything is at the other end; a load comes from there, once the kernel forgot its pages.
    """
    rates = ("--upload-limit", str(NETWORK_UP_MBIT), "--download-limit", str(NETWORK_DOWN_MBIT))
    with _juicefs(NETWORK, work, "--cache-size", "0", *rates) as (mountpoint, pid):
        yield Contestant(NETWORK, mountpoint, lambda: process_tree(pid), lambda: None, forget)


@contextlib.contextmanager
def ckptfs_beside_network(work: Path) -> Iterator[Contestant]:
    """ckptfs whose remote is such a directory: `ckptfs mount DIR --store STORE --remote file://NETWORK`."""
    (work / "network").mkdir()
    with network(work / "network") as far, _ckptfs(BESIDE, work, f"file://{far.directory}", "replicated") as contestant:
        yield contestant


@contextlib.contextmanager
def _juicefs(name: str, work: Path, *options: str, compress: str = "none") -> Iterator[tuple[Path, int]]:
    """Mountpoint and pid."""
    tool = _tool("juicefs")
    mountpoint, metadata = work / "mount", f"sqlite3://{work / 'metadata.db'}"
    mountpoint.mkdir()
    bucket = ("--storage", "file", "--bucket", f"{work / 'bucket'}/", "--trash-days", "0", "--compress", compress)
    subprocess.run([tool, "format", *bucket, metadata, "bench"], check=True, capture_output=True)
    command = [
        *(tool, "mount", "--free-space-ratio", "0.01", *options),
        *("--no-usage-report", "--backup-meta", "0", "--no-syslog", "--metrics", "127.0.0.1:0"),
        *(metadata, str(mountpoint)),
    ]
    with _serving(name, command, work, mountpoint) as pid:
        yield mountpoint, pid


@contextlib.contextmanager
def rclone(work: Path) -> Iterator[Contestant]:
    """rclone with a local bucket and `--vfs-cache-mode writes`; it begins to upload a second after a close."""
    mountpoint, bucket = work / "mount", work / "bucket"
    mountpoint.mkdir()
    bucket.mkdir()
    command = [
        *(_tool("rclone"), "mount", "--config", "", "--cache-dir", str(work / "cache")),
        *("--vfs-cache-mode", "writes", "--vfs-write-back", "1s", f":local:{bucket}", str(mountpoint)),
    ]

    def sizes(directory: Path) -> dict[str, int]:
        files = (path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): path.stat().st_size for path in files}

    def settle() -> None:
        _wait(lambda: sizes(bucket) == sizes(mountpoint), _SETTLE_S, "rclone's uploads")

    with _serving("rclone", command, work, mountpoint) as pid:
        yield Contestant("rclone", mountpoint, lambda: process_tree(pid), settle)


@contextlib.contextmanager
def s3fs(work: Path) -> Iterator[Contestant]:
    """s3fs on a SeaweedFS of this machine; it uploads inside close()."""
    from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed

    mountpoint, password = work / "mount", work / "password"
    mountpoint.mkdir()
    password.touch(mode=0o600)
    password.write_text(f"{ACCESS_KEY}:{SECRET_KEY}")
    with Seaweed() as server:
        command = [
            *(_tool("s3fs"), server.create_bucket("bench"), str(mountpoint), "-f"),
            *("-o", f"url={server.endpoint},use_path_request_style,passwd_file={password}"),
        ]
        with _serving("s3fs", command, work, mountpoint) as pid:
            yield Contestant("s3fs", mountpoint, lambda: process_tree(pid), lambda: None)


@contextlib.contextmanager
def _serving(name: str, command: list[str], work: Path, mountpoint: Path) -> Iterator[int]:
    """Run a FUSE daemon in the foreground until the block ends; gives its pid once the mount is there."""
    with open(work / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=work
        )
    try:

        def ready() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{name} did not start:\n{(work / 'log').read_text(errors='replace')[-2000:]}")
            return os.path.ismount(mountpoint)

        _wait(ready, _READY_S, f"{name} to mount")
        yield process.pid
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], capture_output=True)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)  # also what a supervisor of its own left behind
        except ProcessLookupError:
            pass  # all of it has ended
        process.wait(timeout=20)


def find_tool(name: str) -> str | None:
    """The path of a program: beside this interpreter first, as wheels install theirs, then on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name)


def _tool(name: str) -> str:
    found = find_tool(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed")
    return found


def _wait(reached: Callable[[], bool], seconds: float, words: str) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {words}")
        time.sleep(_LOOK_EVERY_S)
