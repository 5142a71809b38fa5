"""Talking to a mount's daemon: where it is, the control socket's client side, and the Python interface on top.

The standard library alone: a trainer may import this next to anything. The mount is always another process, started
through the `ckptfs` command, so that neither the interpreter lock nor a fork in the trainer can stop it.

The protocol: a Unix socket in the store; the client sends one JSON object on one line, `{"op": ..., ...}`; the daemon
answers with any number of `{"progress": ...}` lines and then `{"result": ...}` or `{"error": message, "kind": class}`.
Hanging up cancels what was asked. Paths inside a mount travel as text with surrogate escapes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfs import errors
from ckptfs.errors import CkptfsError, MountError, NameMissing
from ckptfs.local.mountinfo import CKPTFS_TYPE, mount_of

CONTROL_SOCKET = "control.sock"
STORE_XATTR = "user.ckptfs.store"
TARGETS = ("sealed", "replicated", "verified")

SILENCE_S = 60.0
"""The daemon reports at least every second while it works; after this long without a word it counts as hung."""

_EXIT_S = 5.0
_MOST_LINE_BYTES = 64 << 20  # a status that names many sets; only a bound on nonsense

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class StoreGone(MountError):
    """The daemon of a mount runs on, but without its store's files."""

    def __init__(self, mountpoint: str, store: Path) -> None:
        self.what = (
            f"its store {store} is gone (deleted, moved, or hidden by another mount), and what is not on a remote yet "
            "is lost unless it comes back"
        )
        super().__init__(f"{mountpoint}: {self.what}; `ckptfs umount {mountpoint}` unmounts")


@dataclass(frozen=True)
class Place:
    """A path, seen from the daemon that serves it."""

    mountpoint: str
    store: Path
    inside: bytes
    """The path from the mount's root, beginning with `/`."""


def locate(path: PathLike) -> Place:
    """Find the mount that *path* (which need not exist) lies in.

    Raises MountError when it lies in no ckptfs mount, or in one whose daemon is gone, and StoreGone.
    """
    real = os.path.realpath(_absolute(path))
    mount = mount_of(real)
    if mount is None or mount.type != CKPTFS_TYPE:
        raise MountError(f"{os.fsdecode(path)}: not in a ckptfs mount")
    try:
        store = Path(os.fsdecode(os.getxattr(mount.mountpoint, STORE_XATTR)))
    except OSError as error:
        raise MountError(
            f"{mount.mountpoint}: the daemon of this mount does not answer ({error.strerror}); "
            f"run `ckptfs mount {mount.mountpoint}` again to clean up and carry on"
        ) from error
    if _is_missing(store / CONTROL_SOCKET) and mount_of(real) == mount:  # still there: not just unmounted
        raise StoreGone(mount.mountpoint, store)
    inside = os.path.normpath(os.path.join(mount.root, os.path.relpath(real, mount.mountpoint)))
    return Place(mount.mountpoint, store, os.fsencode(inside))


class Conversation:
    """One request to the daemon of *store*, open until its result was read.

    A context manager; leaving it early hangs up, which cancels the request. Raises MountError when nobody listens.
    """

    def __init__(self, store: Path, op: str, **fields: Any) -> None:
        self._socket = _connect(store)
        self._buffer = b""
        self._socket.settimeout(SILENCE_S)
        try:
            self._socket.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
        except OSError as error:
            self._socket.close()
            raise MountError(f"the daemon of {store} hung up: {error.strerror}") from error

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def result(self, on_progress: Callable[[dict[str, Any]], None] | None = None) -> Any:
        """The answer; each progress report before it goes to *on_progress*.

        Raises what the daemon raised, as the class of that name in `ckptfs.errors`, and MountError when it ended.
        """
        while True:
            message = json.loads(self._line())
            if "progress" in message:
                if on_progress is not None:
                    on_progress(message["progress"])
            elif "error" in message:
                raise _error(message["error"], message.get("kind", ""))
            else:
                return message["result"]

    def ended(self) -> None:
        """Wait until the daemon has closed its end, and a little for its process to let go of the store's disk."""
        process = _process_of(self._socket)
        try:
            while self._socket.recv(4096):
                pass
        except OSError:
            pass  # reset: as good as closed
        if process is not None:
            select.select([process], [], [], _EXIT_S)
            os.close(process)

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError as error:
                raise MountError(f"the daemon has not said a word for {SILENCE_S:.0f} s: it hangs") from error
            except OSError as error:
                raise MountError(f"the daemon hung up: {error.strerror}") from error
            if not more or len(self._buffer) > _MOST_LINE_BYTES:
                raise MountError("the daemon ended before it answered; its log is daemon.log in the store")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def ask(store: Path, op: str, on_progress: Callable[[dict[str, Any]], None] | None = None, **fields: Any) -> Any:
    """Send one request to the daemon of *store* and return its result; see `Conversation`."""
    with Conversation(store, op, **fields) as conversation:
        return conversation.result(on_progress)


def ask_about(
    path: PathLike, op: str, on_progress: Callable[[dict[str, Any]], None] | None = None, **fields: Any
) -> Any:
    """Send a request about *path* to the daemon of its mount and return the result; see `Conversation`.

    Raises NameMissing, in the words of whoever gave the path, when there is no such file.
    """
    place = locate(path)
    try:
        return ask(place.store, op, on_progress, path=os.fsdecode(place.inside), **fields)
    except NameMissing as error:
        if os.path.lexists(_absolute(path)):
            raise  # something below it was removed meanwhile
        raise NameMissing(f"{os.fsdecode(path)}: no such file or directory") from error


def status(path: PathLike) -> dict[str, Any]:
    """What is safe and what is not in the mount that holds *path*; `ckptfs status --json` prints the same."""
    answer: dict[str, Any] = ask_about(path, "status")
    return answer


def wait(path: PathLike, for_: str = "replicated", timeout: float | None = None) -> bool:
    """Wait until everything under *path* is "sealed", "replicated" or "verified"; False after *timeout* seconds.

    What is there now is cut at once: nothing waits for the settle time.
    """
    if for_ not in TARGETS:
        raise ValueError(f"for_ must be one of {', '.join(TARGETS)}, not {for_!r}")
    answer = ask_about(path, "wait", target=for_, timeout_s=timeout)
    return bool(answer["reached"])


def publish(path: PathLike) -> list[str]:
    """Make what is under *path* visible on the remote now, without waiting for it to settle; returns when it is.

    Gives the paths, below the mountpoint, of files that were left out because they are open for writing.
    """
    return list(ask_about(path, "publish")["unfinished"])


def prefetch(path: PathLike) -> None:
    """Bring every file under *path* to this disk now, so that reading it never waits for the remote.

    Raises ContentUnavailable when something cannot be had, and StoreFull, before anything is fetched where the disk has
    too little room from the start; what came is kept.
    """
    ask_about(path, "prefetch")


@contextlib.contextmanager
def mounted(
    mountpoint: PathLike,
    *,
    remote: str | None = None,
    store: PathLike | None = None,
    read_only: bool = False,
    wait: bool = True,
    options: tuple[str, ...] = (),
) -> Iterator[Path]:
    """Mount for the length of a `with` block; gives the mountpoint.

    The daemon is a process of its own. At the end, also after an exception, uploads are waited for (unless *wait* is
    False: then the next mount of the same store goes on with them) and the directory is unmounted, unless it was
    mounted before. An exception of the block is raised as it is; when the directory cannot be unmounted then, a file
    being open still, it stays mounted and a note on the exception says so. *options* are further options of
    `ckptfs mount`. Raises MountError with the command's own words.
    """
    path = _absolute(mountpoint)
    command = ["mount", *options]
    if remote is not None:
        command += ["--remote", remote]
    if store is not None:
        command += ["--store", _absolute(store)]
    if read_only:
        command.append("--read-only")
    before = _is_mounted(path)
    _run([*command, "--", path])

    def unmount() -> None:
        if not before:
            _run(["umount", *([] if wait else ["--no-wait"]), "--", path], fine=(0,) if wait else (0, 3))

    try:
        yield Path(path)
    except BaseException as error:
        try:
            unmount()
        except MountError as left:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"{path} stays mounted: {left}")
        raise
    unmount()


def _is_mounted(path: str) -> bool:
    """Whether a ckptfs that answers is mounted at *path*."""
    mount = mount_of(path)
    if mount is None or mount.type != CKPTFS_TYPE or mount.mountpoint != path:
        return False
    try:
        os.stat(path)
    except OSError:  # its daemon is gone
        return False
    return True


def _absolute(path: PathLike) -> str:
    return os.path.abspath(os.path.expanduser(os.fsdecode(path)))


def _run(arguments: list[str], fine: tuple[int, ...] = (0,)) -> None:
    # From "/", because -m puts the current directory first on the module path, and users' directories hold anything.
    done = subprocess.run(
        [sys.executable, "-m", "ckptfs_mount", *arguments],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode not in fine:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        last = said[-1].removeprefix("Error: ") if said else ""
        raise MountError(last or f"ckptfs {arguments[0]} failed with status {done.returncode}")


def _is_missing(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass  # another user's: connecting tells
    return False


def _connect(store: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory = os.open(store, os.O_PATH | os.O_DIRECTORY)
        try:
            # Through the descriptor, because a socket's path ends at 107 bytes and a store's does not.
            connection.settimeout(SILENCE_S)
            connection.connect(f"/proc/self/fd/{directory}/{CONTROL_SOCKET}")
        finally:
            os.close(directory)
    except OSError as error:
        connection.close()
        raise MountError(f"no daemon answers for the store {store}: {error.strerror}") from error
    return connection


def _process_of(connection: socket.socket) -> int | None:
    """A descriptor of the process at the other end, which can be read when that is gone; None when it cannot be had."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        return os.pidfd_open(pid)
    except OSError:  # gone already, or in another container
        return None


def _error(message: str, kind: str) -> CkptfsError:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, CkptfsError):
        return found(message)
    return CkptfsError(message)
